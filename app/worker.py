"""A process that only runs things: everything but HTTP. Any number of them may share a database."""

from __future__ import annotations

import structlog

from app.process import Process
from app.resources import open_resources
from app.settings import Settings

log = structlog.get_logger(__name__)


async def run_worker(settings: Settings, database_url: str, process: Process) -> None:
    """Execute runs until the process is told to stop, then come to a safe point and give the rest back."""

    def broke() -> None:
        process.stop("a part of the worker died", broken=True)

    async with open_resources(settings, database_url, on_broken=broke):
        process.ready = True
        log.info("worker_ready", slots=settings.max_concurrent_runs)
        await process.stopping.wait()
