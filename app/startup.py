"""What comes before serving: the database, its migrations, the rule of the open door, the listening socket.

Whatever may be wrong with a machine or a setting is a StartError here, and one line for a person.
"""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from alembic.util import CommandError
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.exc import SQLAlchemyError

from app.auth import any_key
from app.db.embedded import EmbeddedPostgres, EmbeddedPostgresError, data_home
from app.db.engine import open_database, psycopg_url, sqlalchemy_url
from app.db.migrate import Progress, migrate, pending
from app.settings import Settings


class StartError(RuntimeError):
    """The command cannot do its work. The message is one line that says what to do."""


def say(line: str) -> None:
    """A line of progress for whoever started the process. Results go to stdout, so that they can be piped."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def one_line(error: BaseException) -> str:
    """The message of a library's error, for a line of ours."""
    return " ".join(str(error).split())[:300].rstrip(" .?") or type(error).__name__


@contextmanager
def database(settings: Settings) -> Iterator[tuple[str, bool]]:
    """The database to use: `(url, embedded)`. An embedded one runs as long as somebody is in here."""
    if settings.database_url is not None:
        url = settings.database_url.get_secret_value()
        for name, given in (("DATABASE_URL", url), ("KEYTURN_DATABASE_DIRECT_URL", settings.direct_url(url))):
            try:
                sqlalchemy_url(given)
                conninfo_to_dict(psycopg_url(given))
            except (ValueError, psycopg.Error):  # their messages repeat the address, which has a password
                raise StartError(f"{name} must look like postgresql://user:password@host:5432/database.") from None
        yield url, False
        return
    if settings.database_direct_url is not None:
        raise StartError("KEYTURN_DATABASE_DIRECT_URL goes with the DATABASE_URL of a pooler. Set both, or neither.")
    server = EmbeddedPostgres(data_home(settings.data_dir))
    say(f"Starting Postgres in {server.home}")
    try:
        server.acquire()
    except EmbeddedPostgresError as error:
        raise StartError(str(error)) from error
    try:
        yield server.url(), True
    finally:
        server.release()


async def bring_up_to_date(url: str, progress: Progress | None = None) -> None:
    """Migrate, and say in one line why that does not work."""
    try:
        await migrate(url, progress)
    except CommandError as error:
        raise StartError(f"The database is not one that this version can migrate: {one_line(error)}.") from error
    except psycopg.OperationalError as error:
        raise StartError(f"The database does not answer: {one_line(error)}. Check DATABASE_URL.") from error
    except (psycopg.Error, SQLAlchemyError) as error:
        reason = getattr(error, "orig", None) or error
        raise StartError(f"The database cannot be migrated: {one_line(reason)}.") from error


async def prepare(settings: Settings, url: str, *, embedded: bool, listens: bool = False) -> None:
    """Migrate the embedded database; refuse an outdated one of somebody else, and an open door."""
    url = settings.direct_url(url)
    try:
        outdated = await pending(url)
    except psycopg.Error as error:
        raise StartError(f"The database does not answer: {one_line(error)}. Check DATABASE_URL.") from error
    if outdated and not embedded:
        raise StartError("The database lacks migrations. Run `keyturn migrate` with the same DATABASE_URL, then start again.")
    if outdated:
        say("Migrating the database")
        await bring_up_to_date(url)
    if listens and not settings.loopback_only and settings.bootstrap_key is None:
        async with open_database(url, pool_size=4, name="keyturn-start") as db, db.transaction() as tx:
            if not await any_key(tx):
                raise StartError(
                    f"Listening on {settings.host} needs an API key, or everybody could use this server. "
                    "Make one with `keyturn keys create`, or listen on 127.0.0.1."
                )


def bind(settings: Settings, port: int) -> socket.socket:
    """A socket that listens on a port of `settings.host`, or one line that says why not."""
    host = settings.host.strip("[]")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)  # now, not when all is ready: a second server must find out before it does anything
    except (OSError, ValueError) as error:
        listener.close()
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise StartError(
                f"Port {port} of {host} is in use. Stop what listens there, or choose another: --port {port + 1}."
            ) from error
        reason = error.strerror if isinstance(error, OSError) else None
        raise StartError(f"Cannot listen on {host}:{port}: {reason or one_line(error)}.") from error
    listener.setblocking(False)
    return listener


def shown_url(settings: Settings, port: int) -> str:
    """Where a person on this machine opens the inbox. All addresses become one that can be opened."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host.strip("[]"), settings.host.strip("[]"))
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/inbox"
