"""The command line: `keyturn serve | worker | migrate | keys | inbox | openapi | db`. Expected failures are one line."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import orjson
import psycopg
from psycopg_pool import PoolTimeout
from pydantic import ValidationError
from pydantic_settings import SettingsError
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from app import __version__
from app.auth import DEFAULT_TENANT, SCOPES, create_key, list_keys, revoke_key
from app.db.engine import open_database
from app.errors import AppError
from app.inbox_cli import main as inbox_main
from app.main import create_app
from app.observability import configure_logging
from app.process import Process, leave
from app.server import CLOSING_SECONDS, serve
from app.settings import Settings
from app.startup import StartError, bind, bring_up_to_date, database, one_line, prepare, say
from app.worker import run_worker


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    top = argparse.ArgumentParser(
        prog="keyturn",
        description="An HTTP agent service with persistent threads and an interrupt inbox.",
        epilog="Every option is a setting too: KEYTURN_PORT=9000 is --port 9000. See the README for all settings.",
    )
    top.add_argument("--version", action="version", version=f"keyturn {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")

    server = commands.add_parser(
        "serve",
        help="serve the API and execute runs (the default)",
        description="Serve the API and execute runs. Without DATABASE_URL, an embedded Postgres is started and migrated too.",
    )
    server.add_argument("--host", help="address to listen on (127.0.0.1)")
    server.add_argument("--port", type=int, help="port to listen on (8123; 0 for any)")
    _common(server)
    server.add_argument("--workers", type=int, metavar="N", help="server processes behind the port (1)")
    server.add_argument("--no-worker", dest="worker", action="store_false", default=None, help="only serve the API")
    server.add_argument("--channel", type=int, help=argparse.SUPPRESS)  # from the supervisor
    server.add_argument("--no-examples", dest="examples", action="store_false", default=None, help="do not offer the examples")
    server.set_defaults(run=_serve)

    worker = commands.add_parser(
        "worker",
        help="execute runs without serving the API",
        description="Execute runs without serving the API. Any number of workers and servers may share a DATABASE_URL.",
    )
    _common(worker)
    worker.add_argument("--health-port", type=int, metavar="PORT", help="answer GET /ok there")
    worker.set_defaults(run=_worker)

    migration = commands.add_parser(
        "migrate",
        help="bring the database to this version's schema",
        description="Bring the database to this version's schema. May be run at any time, by any number of processes at once.",
    )
    _common(migration)
    migration.set_defaults(run=_migrate)

    keys = commands.add_parser("keys", help="create, list and revoke API keys").add_subparsers(dest="action", required=True)
    create = keys.add_parser("create", help="create a key and print it, once")
    create.add_argument("--subject", default="admin", help="who acts with the key; shown in the audit")
    create.add_argument("--tenant", default=DEFAULT_TENANT, help="whose data the key reaches")
    create.add_argument("--name", default="", help="a note for the list")
    create.add_argument("--scopes", default=",".join(sorted(SCOPES)), help="comma separated; all by default")
    create.add_argument("--expires-days", type=_days, metavar="DAYS", help="days after which the key stops to work")
    create.set_defaults(run=_with_tx(_keys_create))
    listing = keys.add_parser("list", help="list keys, without their text")
    listing.set_defaults(run=_with_tx(_keys_list))
    revoke = keys.add_parser("revoke", help="revoke a key, on every process at once")
    revoke.add_argument("id", type=UUID)
    revoke.set_defaults(run=_with_tx(_keys_revoke))
    for sub in (create, listing, revoke):
        _common(sub)

    openapi = commands.add_parser("openapi", help="print the OpenAPI document")
    openapi.set_defaults(run=_openapi)

    db = commands.add_parser("db", help="about the database").add_subparsers(dest="action", required=True)
    url = db.add_parser("url", help="print the address of the database; an embedded one runs until Ctrl-C")
    _common(url)
    url.set_defaults(run=_db_url)

    commands.add_parser("inbox", help="answer pending questions in the terminal", add_help=False)
    return top


def _days(text: str) -> timedelta:
    try:
        days = timedelta(days=float(text))
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of days") from None
    if not timedelta(0) < days < timedelta(days=36_500):
        raise argparse.ArgumentTypeError("must be more than 0, and at most a hundred years")
    return days


def _common(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--data-dir", type=Path, metavar="DIR", help="where the embedded Postgres lives (.keyturn)")
    sub.add_argument("--config", type=Path, metavar="FILE", help="a langgraph.json whose graphs are served")


def settings_of(args: argparse.Namespace) -> Settings:
    """Settings from the environment, with what the command line says over them."""
    given = {k: v for k in Settings.model_fields if (v := getattr(args, k, None)) is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "setting"
        raise StartError(f"KEYTURN_{name.upper().removeprefix('KEYTURN_')}: {first['msg']}") from error
    except SettingsError as error:
        raise StartError(one_line(error)) from error


def main(argv: list[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0 done, 1 failed, 2 wrong usage."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["inbox"]:
        return inbox_main(argv[1:])
    if not argv or (argv[0].startswith("--") and argv[0] not in ("--help", "--version")):
        argv = ["serve", *argv]
    args = parser().parse_args(argv)
    # As Ctrl-C does, SIGTERM unwinds, so that an embedded Postgres is stopped. A server has better handlers once it runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        settings = settings_of(args)
        configure_logging(settings)
        code = int(args.run(args, settings) or 0)
        sys.stdout.flush()
        return code
    except (StartError, AppError) as error:
        say(f"keyturn: {error}")
    except (psycopg.Error, SQLAlchemyError, PoolTimeout) as error:
        say(f"keyturn: the database does not do its part: {one_line(getattr(error, 'orig', None) or error)}")
    except BrokenPipeError:  # whoever reads has enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 1


def _serve(args: argparse.Namespace, settings: Settings) -> None:
    leave(serve(settings, channel=args.channel))


def _worker(_: argparse.Namespace, settings: Settings) -> None:
    settings = settings.model_copy(update={"worker": True})
    health = (
        contextlib.nullcontext() if settings.health_port is None else contextlib.closing(bind(settings, settings.health_port))
    )
    with health as listener, database(settings) as (url, embedded):
        asyncio.run(prepare(settings, url, embedded=embedded))
        process = Process(settings.shutdown_seconds + CLOSING_SECONDS)
        code = process.run(run_worker(settings, url, process, listener))
    leave(code)


def _migrate(_: argparse.Namespace, settings: Settings) -> None:
    with database(settings) as (url, _embedded):
        asyncio.run(bring_up_to_date(settings.direct_url(url), lambda step: say(f"Migrating: {step}")))
    say("The database is up to date.")


TxCommand = Callable[[AsyncSession, argparse.Namespace], Awaitable[int]]


def _with_tx(command: TxCommand) -> Callable[[argparse.Namespace, Settings], int]:
    """A command that needs one transaction on a migrated database."""

    def run(args: argparse.Namespace, settings: Settings) -> int:
        async def inside(url: str, embedded: bool) -> int:
            await prepare(settings, url, embedded=embedded)
            async with open_database(settings.direct_url(url), pool_size=4, name="keyturn-cli") as db, db.transaction() as tx:
                return await command(tx, args)

        with database(settings) as (url, embedded):
            return asyncio.run(inside(url, embedded))

    return run


async def _keys_create(tx: AsyncSession, args: argparse.Namespace) -> int:
    scopes = [scope.strip() for scope in args.scopes.split(",") if scope.strip()]
    row, key = await create_key(
        tx, tenant=args.tenant, subject=args.subject, name=args.name, scopes=scopes, expires_in=args.expires_days
    )
    print(f"id:  {row.id}\nkey: {key}\nThe key is shown this once. From now on every request needs one, as X-Api-Key.")
    return 0


async def _keys_list(tx: AsyncSession, _: argparse.Namespace) -> int:
    for key in await list_keys(tx):
        state = "revoked" if key.revoked_at else f"until {key.expires_at:%Y-%m-%d}" if key.expires_at else "valid"
        print(f"{key.id}  {key.prefix}…  {state:<18} {key.tenant_id}/{key.subject}  {key.name}")
    return 0


async def _keys_revoke(tx: AsyncSession, args: argparse.Namespace) -> int:
    done = await revoke_key(tx, args.id)
    print("Revoked." if done else "There is no such valid key.")
    return 0 if done else 1


def _openapi(_: argparse.Namespace, settings: Settings) -> None:
    document: dict[str, Any] = create_app(settings, "postgresql://unused").openapi()
    print(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())


def _db_url(_: argparse.Namespace, settings: Settings) -> None:
    with database(settings) as (url, embedded):
        print(url, flush=True)
        if embedded:
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()


if __name__ == "__main__":
    sys.exit(main())
