"""A process that only runs things: everything but HTTP. Any number of them may share a database."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import structlog
import uvicorn
from fastapi import FastAPI

from app import observability
from app.main import UNTOLD, add_error_handlers
from app.process import Process
from app.resources import Resources, open_resources
from app.settings import Settings

log = structlog.get_logger(__name__)


async def run_worker(settings: Settings, database_url: str, process: Process, listener: socket.socket | None = None) -> None:
    """Execute runs until the process is told to stop, then come to a safe point and give the rest back.

    With a `listener`, the process says there how it is.
    """

    def broke() -> None:
        process.stop("a part of the worker died", broken=True)

    async with open_resources(settings, database_url, on_broken=broke) as resources, _health(resources, listener):
        process.ready = True
        log.info("worker_ready", slots=settings.max_concurrent_runs)
        await process.stopping.wait()
        await resources.drain()


class _Health(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the Process'."""
        yield


@contextlib.asynccontextmanager
async def _health(resources: Resources, listener: socket.socket | None) -> AsyncIterator[None]:
    """Answer `/ok` and `/info`, and nothing else."""
    if listener is None:
        yield
        return
    app = FastAPI(openapi_url=None, telemetry=UNTOLD)
    app.state.resources = resources
    app.include_router(observability.router)
    add_error_handlers(app)
    server = _Health(uvicorn.Config(app, loop="none", lifespan="off", log_config=None, access_log=False, ws="none"))
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="health")
    try:
        yield
    finally:
        server.should_exit = True
        await serving
