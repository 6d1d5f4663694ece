"""Chooses where events are kept. A library that only some need is loaded only for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.db.engine import Database
from app.db.listen import Listener
from app.errors import AppError
from app.settings import Settings
from app.streaming.postgres import PostgresStore
from app.streaming.store import EventStore


@asynccontextmanager
async def open_event_store(settings: Settings, database: Database, listener: Listener) -> AsyncIterator[EventStore]:
    """The store that the settings ask for. Raises AppError with one line for a person if it cannot be used."""
    if settings.redis_url is None:
        yield PostgresStore(database, listener)
        return
    try:
        from app.streaming.redis import RedisStore  # noqa: PLC0415 (optional)
    except ModuleNotFoundError as error:
        raise AppError("KEYTURN_REDIS_URL needs the package `redis`: pip install 'keyturn[redis]'.") from error
    try:
        store = RedisStore(settings.redis_url.get_secret_value(), keep_seconds=settings.event_retention_hours * 3600)
    except ValueError:  # its message may repeat the address, which has a password
        raise AppError("KEYTURN_REDIS_URL must look like redis://user:password@host:6379/0.") from None
    async with store.opened():
        yield store
