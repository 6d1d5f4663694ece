"""The server process: uvicorn with signals and a lifespan of our own, and the embedded Postgres around it.

uvicorn alone waits for open streams for ever. Here SIGTERM turns readiness off, brings runs to a safe point, ends the
streams, and then stops; a second signal stops at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import Iterator

import structlog
import uvicorn
from fastapi import FastAPI

from app.main import create_app
from app.resources import Resources
from app.settings import Settings
from app.startup import bind, database, prepare, shown_url

log = structlog.get_logger(__name__)

CLOSING_SECONDS = 1.5
"""What is left after the grace for running steps, to end streams and close pools."""


class Server(uvicorn.Server):
    """uvicorn, told to stop by us."""

    def __init__(self, app: FastAPI, settings: Settings, listener: socket.socket) -> None:
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
        self._listener = listener
        self._main: asyncio.Task[bool] | None = None
        self._draining: asyncio.Task[None] | None = None
        self.broken = False

    async def run_until_stopped(self, url: str, *, embedded: bool) -> bool:
        """Prepare the database, open everything, serve, close. Returns False when a part of the process died."""
        self._main = asyncio.current_task()
        self._app.state.side_task_broke = self.side_task_broke
        with self._signals():
            await prepare(self._settings, url, embedded=embedded, listens=True)
            async with self._app.router.lifespan_context(self._app):
                await self.serve(sockets=[self._listener])
        return not self.broken

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, signal.Signals(number).name)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own handlers would raise the signal again at the end, and skip what comes after."""
        yield

    def stop(self, why: str) -> None:
        """Begin to stop; the second time, or before anything is served, stop at once."""
        if self._draining is None and self.started:
            log.info("stopping", why=why)
            self._draining = asyncio.create_task(self._drain(), name="drain")
            # Neither a database that does not answer nor a stream that does not end may keep the process.
            patience = self._settings.shutdown_seconds + CLOSING_SECONDS
            asyncio.get_running_loop().call_later(patience, self._give_up, "the time is over")
        else:
            self._give_up(why)

    def _give_up(self, why: str) -> None:
        log.warning("stopping_at_once", why=why)
        self.force_exit = self.should_exit = True
        assert self._main is not None
        self._main.cancel()

    async def _drain(self) -> None:
        resources: Resources = self._app.state.resources
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
        # What start-up made lives as long as the process: the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)  # runs make many short-lived objects and few cycles
        print(f"Keyturn is ready: {shown_url(self._settings, self._listener)}", flush=True)

    def side_task_broke(self) -> None:
        """A part of the process has died: better to end, and be started again, than to limp."""
        self.broken = True
        self.stop("a part of the server died")


def serve(settings: Settings) -> int:
    """Run the server until a signal. Returns the exit code. Raises StartError, and an AppError for a wrong project."""
    # First of all, before the slow part: a port in use is the most common reason not to start.
    with contextlib.closing(bind(settings)) as listener, database(settings) as (url, embedded):
        server = Server(create_app(settings, url), settings, listener)
        with asyncio.Runner(loop_factory=new_loop) as runner:
            try:
                return 0 if runner.run(server.run_until_stopped(url, embedded=embedded)) else 1
            except asyncio.CancelledError:
                return 1 if server.broken else 0


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop of uvloop, which is faster."""
    import uvloop  # noqa: PLC0415 (not on every platform)

    return uvloop.new_event_loop()
