"""The command line: what it prints, and that every expected failure is one line."""

from __future__ import annotations

import logging
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import psycopg
import pytest
import structlog

from app import __version__
from app.cli import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def keyturn(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Runs a command in this process: `(exit code, stdout, stderr)`. Leaves no trace of what a command configures."""
    logs, handlers, level = structlog.get_config(), logging.root.handlers[:], logging.root.level
    handler = signal.getsignal(signal.SIGTERM)

    def run(*args: str, **env: str) -> tuple[int, str, str]:
        with monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            try:
                code = main(list(args))
            except SystemExit as done:  # argparse
                code = int(done.code or 0)
        out, err = capfd.readouterr()
        return code, out, err

    yield run
    signal.signal(signal.SIGTERM, handler)
    structlog.configure(**logs)
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def refused(result: tuple[int, str, str], *, code: int = 1) -> str:
    """The one line with which a command was refused."""
    assert (result[0], result[1]) == (code, ""), result
    [line] = result[2].splitlines()
    assert line.startswith("keyturn: ")
    return line.removeprefix("keyturn: ")


@pytest.mark.parametrize(
    "command",
    [[], ["serve"], ["worker"], ["migrate"], ["keys"], ["keys", "create"], ["keys", "list"], ["keys", "revoke"], ["openapi"],
     ["db"], ["db", "url"], ["inbox"]],
    ids=" ".join,
)  # fmt: skip
def test_help(keyturn: Command, command: list[str]) -> None:
    code, out, err = keyturn(*command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: {' '.join(['keyturn', *command])}")


def test_help_names_every_command(keyturn: Command) -> None:
    _, out, _ = keyturn("--help")
    for command in ("serve", "worker", "migrate", "keys", "openapi", "db", "inbox"):
        assert re.search(rf"^    {command} +\w", out, re.MULTILINE), command
    assert keyturn("--version") == (0, f"keyturn {__version__}\n", "")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nosuch"], "invalid choice: 'nosuch'"),
        (["serve", "--port", "many"], "invalid int value"),
        (["keys"], "required"),
        (["keys", "revoke", "me"], "invalid UUID value"),
        (["keys", "create", "--expires-days", "nan"], "'nan' is no number of days"),
        (["keys", "create", "--expires-days", "-1"], "must be more than 0"),
        (["keys", "create", "--expires-days", "1e300"], "no number of days"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage(keyturn: Command, args: list[str], said: str) -> None:
    code, out, err = keyturn(*args)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "env", "said"),
    [
        (["--port", "99999"], {}, r"KEYTURN_PORT: .*65535"),
        ([], {"KEYTURN_PORT": "many"}, "KEYTURN_PORT: "),
        ([], {"KEYTURN_EXAMPLES": "perhaps"}, "KEYTURN_EXAMPLES: "),
        (["--port", "0"], {"DATABASE_URL": "mysql://root:secret@db/x"}, "DATABASE_URL must look like postgresql://"),
        (["--port", "0"], {"DATABASE_URL": "secret"}, "DATABASE_URL must look like postgresql://"),
        (
            ["--port", "0"],
            {"DATABASE_URL": "postgresql://me:secret@127.0.0.1:1/x"},
            r"does not answer: .* Check DATABASE_URL\.",
        ),
        (["--port", "0", "--host", "nowhere.invalid"], {}, "Cannot listen on nowhere.invalid:0"),
        (["--port", "0", "--host", "a" * 70], {}, "Cannot listen on a"),
        (["--port", "0", "--host", "203.0.113.1"], {}, "Cannot listen on 203.0.113.1:0"),
        (["--port", "0", "--data-dir", "/dev/null/x"], {}, r"The data directory /dev/null/x cannot be used: "),
    ],
)
def test_a_server_that_cannot_start(keyturn: Command, args: list[str], env: dict[str, str], said: str) -> None:
    *progress, line = keyturn("serve", *args, **env)[2].splitlines()
    assert re.search(said, line)
    assert "secret" not in line
    assert progress in ([], ["Starting Postgres in /dev/null/x"])


def test_a_port_in_use(keyturn: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        # Said before anything is started: the database is not even asked for.
        assert refused(keyturn("serve", "--port", str(port), DATABASE_URL="nonsense")) == (
            f"Port {port} of 127.0.0.1 is in use. Stop what listens there, or choose another: --port {port + 1}."
        )


def test_a_database_without_migrations(keyturn: Command, empty_database_url: str) -> None:
    for command in (["serve", "--port", "0"], ["worker"], ["keys", "list"]):
        assert refused(keyturn(*command, DATABASE_URL=empty_database_url)) == (
            "The database lacks migrations. Run `keyturn migrate` with the same DATABASE_URL, then start again."
        )
    code, out, err = keyturn("migrate", DATABASE_URL=empty_database_url)
    assert (code, out) == (0, "")
    assert err.splitlines()[-1] == "The database is up to date."
    assert keyturn("migrate", DATABASE_URL=empty_database_url)[0] == 0
    assert keyturn("keys", "list", DATABASE_URL=empty_database_url) == (0, "", "")


def test_a_database_of_a_newer_version(keyturn: Command, fresh_database_url: str) -> None:
    with psycopg.connect(fresh_database_url, autocommit=True) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'from_the_future'")
    code, _, err = keyturn("migrate", DATABASE_URL=fresh_database_url)
    assert code == 1
    assert "not one that this version can migrate" in err.splitlines()[-1]
    assert "Traceback" not in err


def test_an_account_that_may_not_migrate(keyturn: Command, empty_database_url: str) -> None:
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE guest LOGIN")
        try:
            code, _, err = keyturn("migrate", DATABASE_URL=empty_database_url.replace("postgres@", "guest@"))
        finally:
            connection.execute("DROP ROLE guest")
    assert code == 1
    assert err.splitlines()[-1].startswith("keyturn: The database cannot be migrated: permission denied")
    assert "Traceback" not in err


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_an_open_door_needs_a_key(keyturn: Command, fresh_database_url: str, host: str) -> None:
    if host == "192.0.2.1":  # an address of some other machine cannot be bound at all
        assert "Cannot listen" in refused(keyturn("serve", "--host", host, "--port", "0", DATABASE_URL=fresh_database_url))
        return
    line = refused(keyturn("serve", "--host", host, "--port", "0", DATABASE_URL=fresh_database_url))
    assert line.startswith(f"Listening on {host} needs an API key")
    assert "`keyturn keys create`" in line


def test_keys_are_created_listed_and_revoked(keyturn: Command, fresh_database_url: str) -> None:
    env = {"DATABASE_URL": fresh_database_url}
    code, out, _ = keyturn(
        "keys", "create", "--subject", "ada", "--scopes", "inbox:read, inbox:decide", "--name", "phone", **env
    )
    assert code == 0
    made = re.fullmatch(r"id:  (\S+)\nkey: (kt_\S+)\nThe key is shown this once\..*\n", out)
    assert made
    listed = keyturn("keys", "list", **env)[1]
    assert listed.startswith(made[1])
    assert "default/ada" in listed
    assert "phone" in listed
    assert made[2] not in listed
    assert keyturn("keys", "revoke", made[1], **env) == (0, "Revoked.\n", "")
    assert keyturn("keys", "revoke", made[1], **env) == (1, "There is no such valid key.\n", "")
    assert "revoked" in keyturn("keys", "list", **env)[1]
    assert "until" in keyturn("keys", "create", "--expires-days", "7", **env)[1] + keyturn("keys", "list", **env)[1]
    assert refused(keyturn("keys", "create", "--scopes", "world:rule", **env)).startswith("scopes: unknown: world:rule")


def test_the_address_of_the_database(keyturn: Command, fresh_database_url: str) -> None:
    assert keyturn("db", "url", DATABASE_URL=fresh_database_url) == (0, f"{fresh_database_url}\n", "")


def test_openapi_is_a_document(keyturn: Command, tmp_path: Path) -> None:
    code, out, err = keyturn("openapi")
    assert (code, err) == (0, "")
    assert orjson.loads(out)["info"]["title"] == "Keyturn"


def test_a_wrong_project(keyturn: Command, fresh_database_url: str, tmp_path: Path) -> None:
    config = tmp_path / "langgraph.json"
    config.write_text("{")
    line = refused(keyturn("serve", "--port", "0", "--config", str(config), DATABASE_URL=fresh_database_url))
    assert line.startswith(f"{config}: not JSON")


def test_help_does_not_load_the_server() -> None:
    program = "import sys; from app.cli import parser; parser(); assert not {'fastapi', 'langgraph'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
