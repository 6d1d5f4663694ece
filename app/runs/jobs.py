"""Delivery of runs that no process could start at once: Procrastinate on the same Postgres.

A job only says "this thread may have something to run". The run's row is the truth, so a job that comes twice, late or
never does no harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from uuid import UUID

import procrastinate
import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.engine import CONNECT_ARGS, driver_connection, psycopg_url

log = structlog.get_logger(__name__)

QUEUE = "runs"
TASK = "keyturn.run"
FETCHERS = 4
"""Jobs that one process holds while it waits for a slot. Few, so that they do not wait here while another is free."""


class Jobs:
    """Defers and receives jobs."""

    def __init__(self, url: str) -> None:
        self._url = psycopg_url(url)
        self._app = self._new_app()

    def _new_app(self) -> procrastinate.App:
        connector = procrastinate.PsycopgConnector(
            conninfo=self._url, min_size=1, max_size=2, kwargs=CONNECT_ARGS | {"application_name": "keyturn-jobs"}
        )
        return procrastinate.App(connector=connector)

    async def defer(self, tx: AsyncSession, thread_id: UUID, *, after_seconds: float | None = None) -> None:
        """Deliver the thread to some process once the transaction has committed, or not before the given delay."""
        at = datetime.now(UTC) + timedelta(seconds=after_seconds) if after_seconds else None
        job = self._app.configure_task(TASK, queue=QUEUE, schedule_at=at, connection=await driver_connection(tx))
        await job.defer_async(thread_id=str(thread_id))

    async def run(self, deliver: Callable[[UUID], Awaitable[None]]) -> None:
        """Receive jobs until cancelled. Comes back by itself after an outage."""
        delay = 0.5
        while True:
            app = self._new_app()

            async def handle(thread_id: str) -> None:
                await deliver(UUID(thread_id))

            app.task(name=TASK, queue=QUEUE)(handle)
            try:
                async with app.open_async():
                    delay = 0.5
                    await self._forget_lost(app)
                    await app.run_worker_async(
                        queues=[QUEUE],
                        concurrency=FETCHERS,
                        install_signal_handlers=False,
                        delete_jobs="always",
                        shutdown_graceful_timeout=0,
                    )
            except Exception as error:
                log.warning("job_receiver_stopped", error=repr(error), retry_in=delay)
            await asyncio.sleep(delay)
            delay = min(delay * 2, 10.0)

    @staticmethod
    async def _forget_lost(app: procrastinate.App) -> None:
        """Delete jobs of processes that died with them. Their runs are found by the sweep of any worker."""
        for job in await app.job_manager.get_stalled_jobs(queue=QUEUE, seconds_since_heartbeat=60):
            await app.job_manager.finish_job(job, status=procrastinate.jobs.Status.FAILED, delete_job=True)
