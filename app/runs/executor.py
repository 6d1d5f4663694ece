"""Executes one claimed run: graph → events → outcome, and ends it in one transaction.

Knows LangGraph's run-time API and nothing of HTTP. What follows from the outcome (inbox items, the thread's next run) is
decided inside the finishing transaction, under the run's epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import structlog
from langchain_core.runnables import RunnableConfig
from langgraph.errors import GraphDrained, UnknownInterruptError

from app.assistants.service import AssistantService
from app.codec import check_size, dumps
from app.db.engine import Database
from app.graphs.registry import Graphs
from app.graphs.review import LeaseLost
from app.graphs.saver import NEW_THREAD
from app.runs import queue
from app.runs.claims import Execution
from app.runs.failures import describe, is_outage
from app.runs.finish import Finisher
from app.runs.invocation import NOTHING, Graph, feed, invocation, newest
from app.runs.jobs import Jobs
from app.runs.models import StopReason
from app.runs.outcome import Outcome
from app.settings import Settings
from app.streaming.chunks import ChunkEncoder
from app.streaming.log import EventLog
from app.streaming.writer import RunWriter
from app.watchdog import RUN

log = structlog.get_logger(__name__)

T = TypeVar("T")
CHUNKS_AT_ONCE = 100
GIVEN_BACK = frozenset({StopReason.drained, StopReason.outage, StopReason.lease_lost})


class Executor:
    """Runs what it is given. One per process."""

    def __init__(
        self,
        *,
        settings: Settings,
        database: Database,
        events: EventLog,
        graphs: Graphs,
        assistants: AssistantService,
        jobs: Jobs,
        finisher: Finisher,
    ) -> None:
        self._settings = settings
        self._database = database
        self._events = events
        self._graphs = graphs
        self._assistants = assistants
        self._jobs = jobs
        self._finisher = finisher

    async def execute(self, execution: Execution) -> Execution | None:
        """Execute and end a run. Returns the thread's next run when this process claimed it in the same transaction."""
        run = execution.run
        writer = self._events.open(run.id, run.epoch)
        writer.publish("metadata", dumps({"run_id": run.id, "attempt": run.attempts}))
        if run.epoch > 1:  # what clients saw of a step that was not finished is told again
            writer.publish("attempt", dumps({"run_id": run.id, "attempt": run.attempts}))
        execution.task = asyncio.create_task(self._drive(execution, writer), name=f"run-{run.id}")
        if execution.reason is not None:
            execution.task.cancel()
        try:
            outcome = await execution.task
        except asyncio.CancelledError:
            if execution.reason is None:
                execution.task.cancel()
                raise
            outcome = Outcome.stopped(execution.reason)
        if outcome.reason in GIVEN_BACK:
            await self._give_back(execution, writer, outcome.reason)
            return None
        return await self._end(execution, writer, outcome)

    async def _drive(self, execution: Execution, writer: RunWriter) -> Outcome:
        """Drive the graph to its end or its pause. Every exception of a graph becomes an outcome."""
        run = execution.run
        RUN.set(str(run.id))
        encoder: ChunkEncoder | None = None
        snapshot = None
        try:
            if run.attempts > self._settings.max_attempts:
                return Outcome.failed(
                    {
                        "error": "AttemptsExhausted",
                        "message": f"The run was given up after {run.attempts - 1} attempts that did not end.",
                        "code": "attempts_exhausted",
                    }
                )
            revision = await self._assistants.revision(run.assistant_id, run.assistant_version)
            graph = self._graphs.graph(run.graph_id, (run.assistant_id, run.assistant_version), revision.config)
            config, context = invocation(self._graphs, self._settings, run, revision.config)
            encoder = ChunkEncoder(
                run.kwargs.get("stream_mode") or ["values"],
                subgraphs=bool(run.kwargs.get("stream_subgraphs")),
                private=self._graphs.private_keys,
            )
            given = await feed(execution, graph, config, first=run.epoch == 1)
            if run.epoch == 1 and run.base_checkpoint_id is None:
                NEW_THREAD.set(str(run.thread_id))
            try:
                if given is not NOTHING:
                    await self._stream(execution, graph, given, config, context, encoder, writer)
            except UnknownInterruptError:
                # The process that held the run before us, frozen until now, went on just then: look again.
                given = await feed(execution, graph, config, first=False)
                if given is not NOTHING:
                    await self._stream(execution, graph, given, config, context, encoder, writer)
            if given is NOTHING or encoder.paused or encoder.interrupts:
                snapshot = await graph.aget_state(newest(run))
            return Outcome.of(encoder, snapshot)
        except GraphDrained:
            return Outcome.stopped(StopReason.drained)
        except LeaseLost:
            return Outcome.stopped(StopReason.outage)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a graph may also raise SystemExit
            if is_outage(error):
                log.warning("run_lost_database", run_id=str(run.id), error=str(error))
                return Outcome.stopped(StopReason.outage)
            log.info("run_failed", run_id=str(run.id), graph_id=run.graph_id, error=repr(error), exc_info=error)
            return Outcome.failed(describe(error), encoder)

    async def _stream(
        self,
        execution: Execution,
        graph: Graph,
        given: Any,
        config: RunnableConfig,
        context: Any,
        encoder: ChunkEncoder,
        writer: RunWriter,
    ) -> None:
        kwargs = execution.run.kwargs
        subgraphs = bool(kwargs.get("stream_subgraphs"))
        stream: AsyncIterator[Any] = graph.astream(
            given,
            config,
            context=context,
            stream_mode=encoder.langgraph_modes,  # type: ignore[arg-type]
            subgraphs=subgraphs,
            interrupt_before=kwargs.get("interrupt_before"),
            interrupt_after=kwargs.get("interrupt_after"),
            durability=kwargs.get("durability") or "sync",
            control=execution.control,
        )
        count = 0
        async for chunk in stream:
            namespace, mode, payload = chunk if subgraphs else ((), *chunk)
            for event, data in encoder.encode(namespace, mode, payload):
                check_size(len(data))
                writer.publish(event, data)
            if (count := count + 1) % CHUNKS_AT_ONCE == 0:
                await asyncio.sleep(0)  # what a step has emitted comes without a pause, and others want to run too

    async def _give_back(self, execution: Execution, writer: RunWriter, reason: StopReason) -> None:
        """Stop without an outcome. Another process goes on, at once if the run can be released, else when the lease ends."""
        run = execution.run
        writer.abandon()
        log.info("run_given_back", run_id=str(run.id), reason=reason)
        if reason is StopReason.lease_lost:
            return

        async def release() -> None:
            async with self._database.transaction() as tx:
                thread = await queue.lock_thread(tx, run.thread_id)
                if thread is not None and await queue.release(tx, run, reason):
                    await self._jobs.defer(tx, run.thread_id)

        await self._patiently(execution, release)

    async def _patiently(self, execution: Execution, action: Callable[[], Awaitable[T]]) -> T:
        """Do something with the database, and wait for it while it is away, as long as the lease is ours."""
        delay = 0.1
        while True:
            try:
                return await action()
            except Exception as error:
                if not is_outage(error) or execution.reason is StopReason.lease_lost:
                    raise
                log.warning("database_awaited", run_id=str(execution.run.id), error=str(error), retry_in=delay)
            await asyncio.sleep(delay)
            delay = min(delay * 2, 2.0)

    async def _end(self, execution: Execution, writer: RunWriter, outcome: Outcome) -> Execution | None:
        """End the run. Returns what its thread runs next, if this process claimed it."""
        try:
            try:
                return await self._patiently(execution, lambda: self._finisher.finish(execution, writer, outcome))
            except Exception as error:
                if is_outage(error):
                    raise
                # The run has ended all the same: without what cannot be stored, else it would be tried for ever.
                log.exception("outcome_not_stored", run_id=str(execution.run.id))
                told = "The database refused what the run left behind. The server's log has the details under this run's id."
                bare = Outcome.failed({"error": type(error).__name__, "message": told, "code": "outcome_not_stored"})
                return await self._patiently(execution, lambda: self._finisher.finish(execution, writer, bare, read=False))
        except BaseException:
            writer.abandon()
            raise
