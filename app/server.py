"""The server process: uvicorn with a lifespan and an end of our own, and the embedded Postgres around it.

uvicorn alone waits for open streams for ever. Here SIGTERM turns readiness off, brings runs to a safe point, ends the
streams, and then stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import socket
from collections.abc import Iterator
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI

from app.handover import Receiver
from app.main import create_app
from app.process import Process
from app.resources import Resources
from app.settings import Settings
from app.startup import bind, database, prepare, shown_url
from app.supervisor import Supervisor

log = structlog.get_logger(__name__)

CLOSING_SECONDS = 1.0
"""What is left after the grace for running steps, to end streams and close pools."""


class Server(uvicorn.Server):
    """uvicorn, told to stop by a Process. `source`: a socket that listens, or brings connections from a supervisor."""

    def __init__(
        self, app: FastAPI, settings: Settings, process: Process, source: socket.socket, *, supervised: bool = False
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http="httptools",
                ws="none",
                lifespan="off",  # ours is around this server, so that its errors are ours
                log_config=None,
                access_log=False,
                proxy_headers=False,  # nothing here builds absolute addresses
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=1,
            )
        )
        self._app = app
        self._settings = settings
        self._process = process
        self._source = source
        self._supervised = supervised
        self._receiver: Receiver | None = None

    async def run_until_stopped(self, url: str, *, embedded: bool) -> None:
        """Prepare the database, open everything, serve, close."""
        self._app.state.side_task_broke = self._side_task_broke
        await prepare(self._settings, url, embedded=embedded, listens=True)
        async with self._app.router.lifespan_context(self._app):
            draining = asyncio.create_task(self._drain(self._app.state.resources), name="drain")
            await self.serve(sockets=[] if self._supervised else [self._source])
            await draining

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own handlers would raise the signal again at the end, and skip what comes after."""
        yield

    async def _drain(self, resources: Resources) -> None:
        await self._process.stopping.wait()
        try:
            async with asyncio.timeout(self._settings.shutdown_seconds + CLOSING_SECONDS / 2):
                await resources.drain()
        except TimeoutError:
            log.warning("drain_timed_out")
        finally:
            self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Say where the server is once it answers."""
        await super().startup(sockets=sockets)
        if self._supervised:
            kind: Any = self.config.http_protocol_class
            protocol = functools.partial(
                kind, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            gone = functools.partial(self._process.stop, "the supervisor is gone")
            self._receiver = Receiver(self._source, protocol, gone)
        # What start-up made lives as long as the process: the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)  # runs make many short-lived objects and few cycles
        self._process.ready = True
        if self._receiver is not None:
            self._receiver.ready()
        else:
            print(f"Keyturn is ready: {shown_url(self._settings, self._source.getsockname()[1])}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no connection any more, then end those that are open."""
        if self._receiver is not None:
            self._receiver.close()
        await super().shutdown(sockets=sockets)

    def _side_task_broke(self) -> None:
        """A part of the process has died: better to end, and be started again, than to limp."""
        if self._receiver is not None:
            self._receiver.close()
        self._process.stop("a part of the server died", broken=True)


def serve(settings: Settings, *, channel: int | None = None) -> int:
    """Run the server until a signal. Returns the exit code. Raises StartError, and an AppError for a wrong project.

    `channel`: descriptor of a socket of the supervisor, when this is one of several behind a port.
    """
    if settings.workers > 1:
        return _serve_many(settings)
    # First of all, before the slow part: a port in use is the most common reason not to start.
    source = bind(settings, settings.port) if channel is None else socket.socket(fileno=channel)
    supervised = channel is not None
    with contextlib.closing(source), database(settings) as (url, embedded):
        source.setblocking(False)
        source.set_inheritable(False)
        process = Process(settings.shutdown_seconds + CLOSING_SECONDS, follows=source if supervised else None)
        server = Server(create_app(settings, url), settings, process, source, supervised=supervised)
        return process.run(server.run_until_stopped(url, embedded=embedded))


def _serve_many(settings: Settings) -> int:
    with contextlib.closing(bind(settings, settings.port)) as listener, database(settings) as (url, embedded):
        process = Process(settings.shutdown_seconds + 2 * CLOSING_SECONDS)
        return process.run(Supervisor(settings, listener, process).run(url, embedded=embedded))
