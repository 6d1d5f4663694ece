"""The server process: uvicorn with signals of our own, the embedded Postgres around it, and what a person sees at start.

uvicorn alone waits for open streams for ever. Here SIGTERM turns readiness off, brings runs to a safe point, ends the
streams, and then stops; a second signal stops at once.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import uvicorn
from fastapi import FastAPI

from app.auth import any_key
from app.db.binaries import EmbeddedPostgresError
from app.db.embedded import EmbeddedPostgres, data_home
from app.db.engine import open_database
from app.db.migrate import migrate, pending
from app.main import create_app
from app.resources import Resources
from app.settings import Settings

log = structlog.get_logger(__name__)


class StartError(RuntimeError):
    """The server cannot start. The message is one line that says what to do."""


def say(line: str) -> None:
    """A line of progress for whoever started the process. Results go to stdout, so that they can be piped."""
    sys.stderr.write(f"{line}\n")


@contextmanager
def database(settings: Settings) -> Iterator[tuple[str, bool]]:
    """The database to use: `(url, embedded)`. An embedded one runs as long as somebody is in here."""
    if settings.database_url is not None:
        yield settings.database_url.get_secret_value(), False
        return
    home = data_home(settings.data_dir)
    say(f"Starting Postgres in {home}")
    server = EmbeddedPostgres(home)
    try:
        server.acquire()
    except (EmbeddedPostgresError, OSError) as error:
        raise StartError(str(error)) from error
    try:
        yield server.url(), True
    finally:
        server.release()


async def prepare(settings: Settings, url: str, *, embedded: bool) -> None:
    """Migrate the embedded database; refuse an outdated one of somebody else, and an open door."""
    try:
        outdated = await pending(url)
    except Exception as error:
        raise StartError(f"The database does not answer: {_one_line(error)}. Check DATABASE_URL.") from error
    if outdated and not embedded:
        raise StartError("The database lacks migrations. Run `keyturn migrate` with the same DATABASE_URL, then start again.")
    if outdated:
        say("Migrating the database")
        await migrate(url)
    if not settings.loopback_only and settings.bootstrap_key is None:
        async with open_database(url, pool_size=4, name="keyturn-start") as db, db.transaction() as tx:
            if not await any_key(tx):
                raise StartError(
                    f"Listening on {settings.host} needs an API key, or everybody could use this server. "
                    "Make one with `keyturn keys create`, or listen on 127.0.0.1."
                )


class Server(uvicorn.Server):
    """uvicorn, told to stop by us."""

    def __init__(self, app: FastAPI, config: uvicorn.Config, settings: Settings) -> None:
        super().__init__(config)
        self._app = app
        self._settings = settings
        self._stopping: asyncio.Task[None] | None = None
        self.broken = False

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Our handlers instead of uvicorn's, which would raise the signal again at the end and skip what comes after."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def stop(self, number: int | None = None) -> None:
        """Begin to stop; the second time, stop at once."""
        if self._stopping is not None:
            self.force_exit = True
            return
        log.info("stopping", signal=signal.Signals(number).name if number else None)
        self._stopping = asyncio.create_task(self._drain(), name="drain")

    async def _drain(self) -> None:
        # `config.loaded_app` is uvicorn's wrapping of the application, which has no state.
        resources: Resources | None = getattr(getattr(self.config.app, "state", None), "resources", None)
        try:
            if resources is not None:
                await resources.drain()
        finally:
            self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Say where the server is once it answers."""
        await super().startup(sockets=sockets)
        if self.started:
            # What start-up made lives as long as the process: the collector need not look at it again and again.
            gc.collect()
            gc.freeze()
            gc.set_threshold(20_000, 20, 50)  # runs make many short-lived objects and few cycles
            host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
            print(f"Keyturn is ready: http://{host}:{bound_port(sockets)}/inbox", flush=True)

    def side_task_broke(self) -> None:
        """A part of the process has died: better to end, and be started again, than to limp."""
        self.broken = True
        self.stop()


def bound_port(sockets: list[socket.socket] | None) -> int:
    """The port that was bound, also when any was asked for."""
    port: int = sockets[0].getsockname()[1] if sockets else 0
    return port


def bind(settings: Settings) -> socket.socket:
    """The listening socket, or one line that says why not."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise StartError(
            f"Cannot listen on {settings.host}:{settings.port}: {error.strerror or error}. "
            "Stop what listens there, or choose another --port."
        ) from error
    listener.listen(2048)
    listener.setblocking(False)
    return listener


async def _serve(settings: Settings, url: str, listener: socket.socket) -> bool:
    app = create_app(settings, url)
    config = uvicorn.Config(
        app,
        loop="none",
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nothing here builds absolute addresses
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    server = Server(app, config, settings)
    app.state.side_task_broke = server.side_task_broke
    await server.serve(sockets=[listener])
    if not server.started:
        raise StartError("The server could not start. The reason stands above.")
    return not server.broken


def serve(settings: Settings) -> int:
    """Run the server until a signal. Returns the exit code. Raises StartError."""
    listener = bind(settings)  # before the slow part: a port in use is the most common reason
    try:
        with database(settings) as (url, embedded), asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(prepare(settings, url, embedded=embedded))
            return 0 if runner.run(_serve(settings, url, listener)) else 1
    finally:
        listener.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    import uvloop  # noqa: PLC0415 (not on every platform)

    return uvloop.new_event_loop()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
