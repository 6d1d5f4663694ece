"""Executes one claimed run: graph → events → outcome, and ends it in one transaction.

Knows LangGraph's run-time API and nothing of HTTP. What follows from the outcome (inbox items, the thread's next run) is
decided inside the finishing transaction, under the run's epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import structlog
from langchain_core.runnables import RunnableConfig
from langgraph.errors import GraphDrained
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command
from sqlalchemy.ext.asyncio import AsyncSession

from app.assistants.service import AssistantService
from app.codec import dumps
from app.db.engine import Database, after_commit
from app.graphs.registry import Graphs
from app.runs import queue
from app.runs.claims import Claims, Execution
from app.runs.failures import describe, is_outage
from app.runs.jobs import Jobs
from app.runs.models import Run, RunKind, StopReason
from app.runs.outcome import Outcome, goto_nodes, settle_thread
from app.runs.ports import BREAKPOINT, InboxPort, RunFinished
from app.settings import Settings
from app.streaming.chunks import ChunkEncoder
from app.streaming.log import EventLog
from app.streaming.writer import RunWriter
from app.threads.state import pending_interrupts

log = structlog.get_logger(__name__)

Graph = CompiledStateGraph[Any, Any, Any, Any]
NOTHING = object()
"""There is nothing left to feed to the graph: the run only has to be ended."""


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
        inbox: InboxPort,
        claims: Claims,
        jobs: Jobs,
    ) -> None:
        self._settings = settings
        self._database = database
        self._events = events
        self._graphs = graphs
        self._assistants = assistants
        self._inbox = inbox
        self._claims = claims
        self._jobs = jobs

    async def execute(self, execution: Execution) -> Execution | None:
        """Execute and end a run. Returns the thread's next run when this process claimed it in the same transaction."""
        run = execution.run
        writer = self._events.open(run.id, run.epoch)
        writer.publish("metadata", dumps({"run_id": run.id, "attempt": run.attempts}))
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
        if outcome.reason in (StopReason.drained, StopReason.lease_lost):
            await self._give_back(run, writer, outcome.reason)
            return None
        return await self._end(execution, writer, outcome)

    async def _drive(self, execution: Execution, writer: RunWriter) -> Outcome:
        """Drive the graph to its end or its pause. Every exception of a graph becomes an outcome."""
        run = execution.run
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
            config, context = self._config(run, revision.config)
            encoder = ChunkEncoder(
                run.kwargs.get("stream_mode") or ["values"],
                subgraphs=bool(run.kwargs.get("stream_subgraphs")),
                private=self._graphs.private_keys,
            )
            feed = await self._feed(execution, graph, config)
            if feed is not NOTHING:
                await self._stream(execution, graph, feed, config, context, encoder, writer)
            if feed is NOTHING or encoder.paused or encoder.interrupts:
                snapshot = await graph.aget_state(config)
            return Outcome.of(encoder, snapshot)
        except GraphDrained:
            return Outcome.stopped(StopReason.drained)
        except Exception as error:
            if is_outage(error):
                log.warning("run_lost_database", run_id=str(run.id), error=str(error))
                return Outcome.stopped(StopReason.lease_lost)
            log.info("run_failed", run_id=str(run.id), graph_id=run.graph_id, error=repr(error), exc_info=error)
            return Outcome.failed(describe(error), encoder)

    async def _stream(
        self,
        execution: Execution,
        graph: Graph,
        feed: Any,
        config: RunnableConfig,
        context: Any,
        encoder: ChunkEncoder,
        writer: RunWriter,
    ) -> None:
        kwargs = execution.run.kwargs
        subgraphs = bool(kwargs.get("stream_subgraphs"))
        stream: AsyncIterator[Any] = graph.astream(
            feed,
            config,
            context=context,
            stream_mode=encoder.langgraph_modes,  # type: ignore[arg-type]
            subgraphs=subgraphs,
            interrupt_before=kwargs.get("interrupt_before"),
            interrupt_after=kwargs.get("interrupt_after"),
            durability=kwargs.get("durability") or "sync",
            control=execution.control,
        )
        async for chunk in stream:
            namespace, mode, payload = chunk if subgraphs else ((), *chunk)
            for event, data in encoder.encode(namespace, mode, payload):
                writer.publish(event, data)

    def _config(self, run: Run, assistant_config: dict[str, Any]) -> tuple[RunnableConfig, Any]:
        """The configuration of one invocation. Client keys were filtered; ours go over them."""
        kwargs = run.kwargs
        setup = self._graphs.configurable(
            run.graph_id, assistant_config, kwargs.get("config") or {}, kwargs.get("context") or {}
        )
        limit = min(setup.recursion_limit or self._settings.recursion_limit, self._settings.max_recursion_limit)
        configurable = {
            **setup.configurable,
            "thread_id": str(run.thread_id),
            "run_id": str(run.id),
            "assistant_id": str(run.assistant_id),
            "graph_id": run.graph_id,
            "user_id": kwargs.get("owner") or run.subject,
            "__keyturn_epoch": run.epoch,
            "__keyturn_tenant": run.tenant_id,
            # LangGraph then refuses an answer to a question that is not asked, rather than dropping it.
            "__pregel_strict_resume": True,
        }
        if checkpoint := kwargs.get("checkpoint"):
            configurable |= {k: checkpoint[k] for k in ("checkpoint_id", "checkpoint_ns") if checkpoint.get(k)}
        return {
            "configurable": configurable,
            "recursion_limit": limit,
            "metadata": {**run.metadata_, "run_attempt": run.attempts},
            "tags": setup.tags,
            "run_id": run.id,
        }, setup.context

    async def _feed(self, execution: Execution, graph: Graph, config: RunnableConfig) -> Any:
        """What to give to the graph: on a first claim the run's own input or answers, on a later one what is left of them."""
        run = execution.run
        own = self._own_input(run) if run.kind == RunKind.input else Command(resume=execution.answers)
        if run.epoch == 1:
            if BREAKPOINT in execution.answers:
                return None
            return own if run.kind == RunKind.input or execution.answers else NOTHING
        snapshot = await graph.aget_state({"configurable": {"thread_id": str(run.thread_id)}})
        asked = {p.interrupt_id for p in pending_interrupts(snapshot)}
        left = {k: v for k, v in execution.answers.items() if k in asked}
        head = snapshot.config.get("configurable", {}).get("checkpoint_id")
        if run.kind == RunKind.input and head == run.base_checkpoint_id:
            return own
        # The state moved on under this run, so it must go on from its newest checkpoint, wherever it started.
        config["configurable"].pop("checkpoint_id", None)
        if left:
            return Command(resume=left)
        if asked or not snapshot.next:
            return NOTHING
        return None

    @staticmethod
    def _own_input(run: Run) -> Any:
        command = run.kwargs.get("command")
        if not command:
            return run.kwargs.get("input")
        return Command(update=command.get("update"), goto=goto_nodes(command.get("goto")))

    async def _give_back(self, run: Run, writer: RunWriter, reason: StopReason) -> None:
        """Stop without an outcome: another process goes on, at once after a drain, when the lease ends otherwise."""
        writer.abandon()
        if reason is StopReason.drained:
            async with self._database.transaction() as tx:
                thread = await queue.lock_thread(tx, run.thread_id)
                if thread is not None and await queue.release(tx, run, reason):
                    await self._jobs.defer(tx, run.thread_id)
        log.info("run_given_back", run_id=str(run.id), reason=reason)

    async def _end(self, execution: Execution, writer: RunWriter, outcome: Outcome) -> Execution | None:
        """End the run; wait for the database if it is away, as long as the lease is ours."""
        delay = 0.1
        while True:
            try:
                return await self._finish(execution, writer, outcome)
            except Exception as error:
                if not is_outage(error) or execution.reason is StopReason.lease_lost:
                    writer.abandon()
                    raise
                log.warning("run_end_delayed", run_id=str(execution.run.id), error=str(error), retry_in=delay)
            await asyncio.sleep(delay)
            delay = min(delay * 2, 2.0)

    async def _finish(self, execution: Execution, writer: RunWriter, outcome: Outcome) -> Execution | None:
        run = execution.run
        if outcome.needs_state:
            outcome = await self._with_state(run, outcome)
        async with self._database.transaction() as tx:
            thread = await queue.lock_thread(tx, run.thread_id)
            if thread is None or not await queue.finish(tx, run, outcome.status, outcome.reason, outcome.error):
                writer.abandon()
                log.warning("run_not_ours", run_id=str(run.id), epoch=run.epoch)
                return None
            if outcome.pending or outcome.breakpoint_nodes or thread.interrupts or run.kind == RunKind.resume:
                await self._inbox.reconcile(
                    tx,
                    RunFinished(
                        run=run,
                        thread=thread,
                        status=outcome.status,
                        stop_reason=outcome.reason,
                        pending=outcome.pending,
                        breakpoint_nodes=outcome.breakpoint_nodes,
                        checkpoint_id=outcome.checkpoint_id,
                        values=outcome.values,
                        error=outcome.error,
                        changed=not outcome.needs_state,
                    ),
                )
            paused = bool(outcome.pending or outcome.breakpoint_nodes)
            following = await self._claims.claim(tx, thread, paused=paused)
            handed_on = following is None and await self._hand_on(tx, run.thread_id, paused=paused)
            await settle_thread(
                tx, thread, run, outcome, private=self._graphs.private_keys, busy=following is not None or handed_on
            )
            ended = {"run_id": run.id, "status": outcome.status, "stop_reason": outcome.reason}
            after_commit(tx, await writer.finish(tx, [*outcome.events, ("end", dumps(ended))]))
        log.info("run_ended", run_id=str(run.id), thread_id=str(run.thread_id), status=outcome.status, reason=outcome.reason)
        return following

    async def _hand_on(self, tx: AsyncSession, thread_id: UUID, *, paused: bool) -> bool:
        """Tell other processes of what the thread runs next, when this one takes nothing more. Returns whether there is."""
        if paused:
            await queue.wait_for_human(tx, thread_id)
        if self._claims.open or not await queue.has_due(tx, thread_id, paused=paused):
            return False
        await self._jobs.defer(tx, thread_id)
        return True

    async def _with_state(self, run: Run, outcome: Outcome) -> Outcome:
        """A run that was cut short or failed: read what it left behind, if that is possible at all."""
        try:
            revision = await self._assistants.revision(run.assistant_id, run.assistant_version)
            graph = self._graphs.graph(run.graph_id, (run.assistant_id, run.assistant_version), revision.config)
            return outcome.with_state(await graph.aget_state({"configurable": {"thread_id": str(run.thread_id)}}))
        except Exception as error:
            if is_outage(error):
                raise
            log.warning("state_unreadable", run_id=str(run.id), error=repr(error))
            return outcome
