"""A process that only runs things: everything but HTTP. Any number of them may share a database."""

from __future__ import annotations

import asyncio
import signal

import structlog

from app.resources import open_resources
from app.settings import Settings

log = structlog.get_logger(__name__)


async def run_worker(settings: Settings, database_url: str) -> None:
    """Execute runs until SIGTERM or SIGINT, then come to a safe point and give the rest back. A second signal ends at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None

    def signalled() -> None:
        if stop.is_set():
            main.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    async with open_resources(settings, database_url, on_broken=stop.set):
        log.info("worker_ready", slots=settings.max_concurrent_runs)
        await stop.wait()
        log.info("worker_stopping")
