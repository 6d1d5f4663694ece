"""What the commands of `keyturn` do: `serve | worker | migrate | keys | openapi | db`. Expected failures are one line."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import psycopg
from psycopg_pool import PoolTimeout
from pydantic import ValidationError
from pydantic_settings import SettingsError
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from app.auth import DEFAULT_TENANT, SCOPES, create_key, list_keys, revoke_key
from app.db.engine import open_database
from app.errors import AppError
from app.main import create_app
from app.observability import configure_logging
from app.process import Process, leave
from app.server import CLOSING_SECONDS, serve
from app.settings import Settings
from app.startup import StartError, bind, bring_up_to_date, database, one_line, prepare, say
from app.worker import run_worker

TxCommand = Callable[[AsyncSession, argparse.Namespace], Awaitable[int]]


def run(args: argparse.Namespace) -> int:
    """Do what the command line asks. Returns the exit code: 0 done, 1 failed."""
    # As Ctrl-C does, SIGTERM unwinds, so that an embedded Postgres is stopped. A server has better handlers once it runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        settings = settings_of(args)
        configure_logging(settings)
        code = COMMANDS[args.run](args, settings) or 0
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
    scopes = sorted(SCOPES) if args.scopes is None else [s.strip() for s in args.scopes.split(",") if s.strip()]
    row, key = await create_key(
        tx,
        tenant=args.tenant or DEFAULT_TENANT,
        subject=args.subject,
        name=args.name,
        scopes=scopes,
        expires_in=args.expires_days,
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


COMMANDS: dict[str, Callable[[argparse.Namespace, Settings], int | None]] = {
    "serve": _serve,
    "worker": _worker,
    "migrate": _migrate,
    "keys create": _with_tx(_keys_create),
    "keys list": _with_tx(_keys_list),
    "keys revoke": _with_tx(_keys_revoke),
    "openapi": _openapi,
    "db url": _db_url,
}
