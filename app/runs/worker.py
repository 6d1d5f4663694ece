"""The loop of a process that runs things: takes work, keeps its leases, takes over what others lost, stops cleanly.

Knows no graphs. Side tasks live in one task group: if one of them breaks, the process stops rather than limps.
"""

from __future__ import annotations

import asyncio
import time
from uuid import UUID

import structlog

from app.db.engine import Database, after_commit
from app.db.listen import Listener
from app.runs import lookup, queue
from app.runs.claims import Claims, Execution, LeaseClock, is_dead
from app.runs.executor import Executor
from app.runs.failures import is_outage
from app.runs.jobs import Jobs
from app.runs.models import StopReason
from app.runs.ports import InboxPort, RunTelemetry

log = structlog.get_logger(__name__)

CANCEL_CHANNEL = "keyturn_cancel"
STRANDED_AFTER = 15.0
"""Seconds after which a run that is due and that nobody starts is taken by whoever notices."""
SWEEP = 100
"""Threads that one sweep takes up at most."""


class Worker:
    """Executes runs of this process."""

    def __init__(
        self,
        *,
        database: Database,
        listener: Listener,
        claims: Claims,
        executor: Executor,
        jobs: Jobs,
        inbox: InboxPort,
        clock: LeaseClock,
        telemetry: RunTelemetry,
    ) -> None:
        self._database = database
        self._claims = claims
        self._executor = executor
        self._jobs = jobs
        self._inbox = inbox
        self._tasks: set[asyncio.Task[None]] = set()
        self._delivering: set[UUID] = set()
        self._receiver: asyncio.Task[None] | None = None
        self._clock = clock
        self._telemetry = telemetry
        listener.subscribe(CANCEL_CHANNEL, self._on_cancel)

    # -- executing

    def start(self, execution: Execution) -> None:
        """Execute a claimed run in the background, and then whatever its thread runs next."""
        self._claims.hold(execution)
        task = asyncio.create_task(self._execute(execution), name=f"execute-{execution.run.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _execute(self, execution: Execution) -> None:
        following = None
        try:
            with self._telemetry.running(execution):
                following = await self._executor.execute(execution)
        except Exception:
            # The run keeps its row: when the lease ends it is taken over, and after a few attempts given up with an error.
            log.exception("run_crashed", run_id=str(execution.run.id))
        finally:
            self._claims.drop(execution)
            if following is not None:
                self.start(following)

    async def deliver(self, thread_id: UUID) -> None:
        """A job: wait for a slot, then run what the thread has to run, if anything."""
        self._delivering.add(thread_id)
        while not self._claims.free:
            self._claims.released.clear()
            await self._claims.released.wait()
        await self.take(thread_id)
        self._delivering.discard(thread_id)

    async def take(self, thread_id: UUID) -> bool:
        """Claim and start what the thread has to run now. Returns whether there was something."""
        async with self._database.transaction() as tx:
            thread = await queue.lock_thread(tx, thread_id)
            if thread is None:
                return False
            paused = await self._inbox.waiting(tx, thread_id)
            execution = await self._claims.claim(tx, thread, paused=paused)
            if execution is None:
                if paused:
                    await queue.wait_for_human(tx, thread_id)
                return False
            await queue.mark_busy(tx, thread_id)
            after_commit(tx, lambda: self.start(execution))
        return True

    # -- side tasks

    async def run(self) -> None:
        """Keep leases, take over, receive jobs, until cancelled."""
        if not self._claims.open:
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_leases(), name="leases")
            group.create_task(self._take_over(), name="reaper")
            self._receiver = group.create_task(self._jobs.run(self.deliver), name="jobs")

    async def _keep_leases(self) -> None:
        """Renew all leases in one statement, and give everything up before anybody else may take it."""
        lease = self._claims.claimant.lease
        while True:
            await asyncio.sleep(lease / 6)
            if not self._claims.held:
                self._clock.renewed = time.monotonic()
                continue
            try:
                async with asyncio.timeout(lease / 6), self._database.transaction() as tx:
                    asked_at = time.monotonic()
                    before = list(self._claims.held.values())
                    still = await queue.renew(tx, self._claims.claimant, [e.run.id for e in before])
                self._clock.renewed = asked_at
            except Exception as error:
                if not (is_outage(error) or isinstance(error, TimeoutError)):
                    raise
                log.warning("leases_not_renewed", error=repr(error))
                if self._clock.age > lease * 2 / 3:
                    for execution in list(self._claims.held.values()):
                        execution.stop(StopReason.lease_lost)
                continue
            for execution in before:
                epoch, cancel = still.get(execution.run.id, (None, None))
                if epoch != execution.run.epoch:
                    if self._claims.held.get(execution.run.id) is execution:
                        execution.stop(StopReason.lease_lost)
                elif cancel is not None:
                    execution.stop(StopReason.cancelled)

    async def _take_over(self) -> None:
        """Look for work that nobody does: at start, then a few times per lease."""
        while True:
            try:
                await self._sweep()
            except Exception as error:
                if not is_outage(error):
                    raise
                log.warning("sweep_failed", error=repr(error))
            await asyncio.sleep(min(self._claims.claimant.lease / 3, 10.0))

    async def _sweep(self) -> None:
        async with self._database.transaction() as tx:
            if dead := [owner for owner in await lookup.owners(tx) if is_dead(owner)]:
                await queue.expire(tx, dead)
        if not self._claims.free:
            return
        async with self._database.transaction() as tx:
            threads = await lookup.stranded(tx, older_than=STRANDED_AFTER, limit=SWEEP)
        for thread_id in threads:
            if not self._claims.free:
                return
            if await self.take(thread_id):
                log.info("run_taken_over", thread_id=str(thread_id))

    def _on_cancel(self, payload: str | None) -> None:
        """A hint that a run of ours was cancelled. A missed one is found when leases are renewed."""
        if payload is None:
            return
        execution = self._claims.held.get(UUID(payload))
        if execution is not None:
            execution.stop(StopReason.cancelled)

    # -- stopping

    async def drain(self, seconds: float) -> None:
        """Take nothing more, let running supersteps end for up to `seconds`, then give the rest back."""
        self._claims.open = False
        await self._stop_receiving()
        for execution in list(self._claims.held.values()):
            execution.drain()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        for execution in list(self._claims.held.values()):
            execution.stop(StopReason.drained)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2.0)
        log.info("worker_drained", unfinished=len(self._claims.held))

    async def _stop_receiving(self) -> None:
        """Take no job any more, and leave those that were taken and not started to others."""
        if self._receiver is None:
            return
        self._receiver.cancel()
        await asyncio.wait({self._receiver}, timeout=2.0)
        self._receiver = None
        if not self._delivering:
            return
        try:
            async with self._database.transaction() as tx:
                for thread_id in self._delivering:
                    await self._jobs.defer(tx, thread_id)
        except Exception as error:
            if not is_outage(error):
                raise
            log.warning("jobs_not_returned", error=repr(error))  # the sweep of another process finds their threads
