"""The one LISTEN connection of a process. A notification is a hint: after every reconnect all callbacks are told to look."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

import psycopg
import structlog
from psycopg import sql

from app.db.engine import CONNECT_ARGS, psycopg_url

log = structlog.get_logger(__name__)

Callback = Callable[[str | None], None]


class Listener:
    """Fans notifications out to callbacks. A callback gets the payload, or None when something may have been missed."""

    def __init__(self, url: str, on_connect: Callable[[], None] = lambda: None) -> None:
        self._url = psycopg_url(url)
        self._on_connect = on_connect
        self._callbacks: dict[str, list[Callback]] = defaultdict(list)
        self.connected = asyncio.Event()

    def subscribe(self, channel: str, callback: Callback) -> Callable[[], None]:
        """Call `callback` for each notification on `channel`. Register channels before `run` starts.

        Returns a function that ends the subscription.
        """
        self._callbacks[channel].append(callback)
        return lambda: self._callbacks[channel].remove(callback)

    async def run(self) -> None:
        """Listen until cancelled; reconnect with a growing delay while the database is away."""
        delay = 0.1
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(
                    self._url, autocommit=True, **CONNECT_ARGS | {"application_name": "keyturn-listen"}
                ) as connection:
                    for channel in self._callbacks:
                        await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
                    self.connected.set()
                    self._on_connect()
                    delay = 0.1
                    self._tell_all()
                    async for notify in connection.notifies():
                        for callback in tuple(self._callbacks.get(notify.channel, ())):
                            callback(notify.payload)
            except psycopg.Error as error:
                self.connected.clear()
                log.warning("listen_connection_lost", error=str(error), retry_in=delay)
            await asyncio.sleep(delay)
            delay = min(delay * 2, 5.0)

    def _tell_all(self) -> None:
        for callbacks in self._callbacks.values():
            for callback in tuple(callbacks):
                callback(None)
