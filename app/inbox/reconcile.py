"""Brings the inbox to what the graph asks now: new questions become items, answered ones settle, vanished ones close.

Works inside the transaction that ended the run; the thread's row is locked. Reads LangGraph's state as it was handed over
and, to recognise an answer that broke its node, the checkpoint tables.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import structlog
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from uuid_utils.compat import uuid7

from app.assistants.models import AssistantVersion
from app.auth import Principal
from app.codec import clean, jsonable
from app.graphs.registry import Graphs
from app.graphs.review import args_hash
from app.inbox import decisions, items, permits
from app.inbox.items import By
from app.inbox.models import InboxItem, ItemStatus
from app.inbox.payloads import Kind
from app.inbox.questions import Asked, Key, asked, stopped_at, tool_message_id
from app.runs.models import RunStatus
from app.runs.ports import PendingInterrupt, RunFinished
from app.threads.models import Thread

log = structlog.get_logger(__name__)

# The answer is stored beside the error of the node that it broke: every later answer would replay it.
POISONED = text("""
    SELECT 1 FROM checkpoint_writes w
    JOIN checkpoint_writes e USING (thread_id, checkpoint_ns, checkpoint_id, task_id)
    WHERE w.thread_id = :thread AND w.channel = '__resume__' AND e.channel = '__error__'
      AND (w.checkpoint_ns = '' AND w.task_id = :task OR strpos(w.checkpoint_ns, :task) > 0)
      AND w.checkpoint_id = (
          SELECT max(c.checkpoint_id) FROM checkpoints c WHERE c.thread_id = w.thread_id AND c.checkpoint_ns = w.checkpoint_ns
      )
    LIMIT 1
""")
FAILED = text("SELECT interrupt_id, value_hash FROM inbox_items WHERE thread_id = :thread AND status = 'failed'")
WATCHERS = text("SELECT kwargs->'watchers' FROM runs WHERE id = :id")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a question comes from."""

    tenant_id: str
    thread_id: UUID
    run_id: UUID | None
    assistant_id: UUID
    assistant_version: int
    graph_id: str
    copied_from: UUID | None = None


class Reconciler:
    """Opens, settles and closes items after a run has ended, or after a state was written."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs

    async def after_run(self, tx: AsyncSession, outcome: RunFinished) -> None:
        """What the end of a run means for the thread's questions."""
        run, thread = outcome.run, outcome.thread
        known = await items.lock(tx, thread.id)
        if not outcome.changed:
            for item in known:
                if item.status == ItemStatus.resuming:
                    await self._end(tx, item, ItemStatus.failed, outcome, "state_unreadable")
            return
        questions = asked(outcome.pending) | stopped_at(outcome.breakpoint_nodes, outcome.checkpoint_id)
        for item in known:
            await self._judge(tx, item, questions, outcome)
        unknown = {key: q for key, q in questions.items() if key not in {(i.interrupt_id, i.value_hash) for i in known}}
        for key in await self._broken(tx, thread.id, unknown):
            del unknown[key]
        # Some watchers may have come after the claim.
        seen_by = (await tx.scalar(WATCHERS, {"id": run.id}) or []) if unknown else []
        origin = Origin(
            tenant_id=run.tenant_id,
            thread_id=thread.id,
            run_id=run.id,
            assistant_id=run.assistant_id,
            assistant_version=run.assistant_version,
            graph_id=run.graph_id,
        )
        await self._open(tx, origin, list(unknown.values()), seen_by, By.engine(run.id, "asked"))

    async def after_write(
        self,
        tx: AsyncSession,
        thread: Thread,
        pending: list[PendingInterrupt],
        principal: Principal,
        *,
        copied_from: UUID | None,
        run_id: UUID | None,
    ) -> None:
        """Open an item for each question that a written or copied state asks."""
        if thread.assistant_id is None or thread.assistant_version is None or thread.graph_id is None:
            return  # nothing could carry an answer
        known = {(i.interrupt_id, i.value_hash) for i in await items.lock(tx, thread.id)}
        questions = {key: q for key, q in asked(pending).items() if key not in known}
        for key in await self._broken(tx, thread.id, questions):
            del questions[key]
        origin = Origin(
            tenant_id=thread.tenant_id,
            thread_id=thread.id,
            run_id=run_id,
            copied_from=copied_from,
            assistant_id=thread.assistant_id,
            assistant_version=thread.assistant_version,
            graph_id=thread.graph_id,
        )
        reason = "thread_copied" if copied_from else "state_updated"
        by = By(principal.subject, "thread", "system", {"reason": reason})
        await self._open(tx, origin, list(questions.values()), [], by)

    # -- items that were open before

    async def _judge(self, tx: AsyncSession, item: InboxItem, questions: dict[Key, Asked], outcome: RunFinished) -> None:
        status, run_id = ItemStatus(item.status), outcome.run.id
        question = questions.get((item.interrupt_id, item.value_hash))
        if question is not None:
            if status is not ItemStatus.resuming:
                return
            if outcome.status is RunStatus.error and await self._poisoned(tx, item.thread_id, question):
                await self._end(tx, item, ItemStatus.failed, outcome, "answer_broke_the_graph")
            else:
                await decisions.revoke(tx, item, By.engine(run_id, "answer_not_delivered"))
        elif status is ItemStatus.resuming:
            await self._settle(tx, item, questions, outcome)
        else:
            await decisions.close(tx, item, ItemStatus.superseded, By.engine(run_id, "question_gone"))

    async def _settle(self, tx: AsyncSession, item: InboxItem, questions: dict[Key, Asked], outcome: RunFinished) -> None:
        """The answer is in the state. What became of it?"""
        run_id = outcome.run.id
        if item.message_id is not None and (item.message_id, item.call_index) in {q.call for q in questions.values()}:
            await decisions.close(tx, item, ItemStatus.superseded, By.engine(run_id, "asked_again"))
            return
        message_id = tool_message_id(outcome.values, item)
        unknown = item.bound and await permits.outcome_unknown(tx, item)
        if message_id is not None or unknown:
            state = "unknown_outcome" if unknown else "settled"
            await self._end(tx, item, ItemStatus.settled, outcome, state, message_id)
        elif item.message_id is not None and any(q.question.message_id == item.message_id for q in questions.values()):
            return  # no call of a message is carried out before all of them are decided
        elif outcome.status is RunStatus.error:
            await self._end(tx, item, ItemStatus.failed, outcome, "run_failed")
        elif outcome.status is not RunStatus.success and item.bound:
            await decisions.close(tx, item, ItemStatus.withdrawn, By.engine(run_id, "run_cancelled"))
        else:
            await self._end(tx, item, ItemStatus.settled, outcome, "settled")

    async def _end(
        self,
        tx: AsyncSession,
        item: InboxItem,
        to: ItemStatus,
        outcome: RunFinished,
        reason: str,
        message_id: str | None = None,
    ) -> None:
        state = "unknown_outcome" if reason == "unknown_outcome" else to.value
        values: dict[str, Any] = {
            "outcome": {"state": state, "error": clean(jsonable(outcome.error)), "tool_message_id": message_id}
        }
        if to is ItemStatus.settled:
            values["settled_at"] = datetime.now(UTC)
        else:
            await permits.revoke(tx, item)
        await items.move(tx, item, to, By.engine(outcome.run.id, reason, tool_message_id=message_id), **values)

    async def _poisoned(self, tx: AsyncSession, thread_id: UUID, question: Asked) -> bool:
        found = await tx.scalar(POISONED, {"thread": str(thread_id), "task": question.task_id or "-"})
        return found is not None

    async def _broken(self, tx: AsyncSession, thread_id: UUID, questions: dict[Key, Asked]) -> list[Key]:
        """Questions that look open, but whose failed item says that no further answer can reach them."""
        if not questions:
            return []
        failed = await tx.execute(FAILED, {"thread": thread_id})
        suspects = [(row.interrupt_id, row.value_hash) for row in failed]
        return [key for key in suspects if key in questions and await self._poisoned(tx, thread_id, questions[key])]

    # -- new items

    async def _open(self, tx: AsyncSession, origin: Origin, questions: list[Asked], seen_by: list[str], by: By) -> None:
        """An item for each question, with what the assistant says about its tool."""
        if not questions:
            return
        revision = await tx.get(AssistantVersion, (origin.assistant_id, origin.assistant_version))
        config = revision.config if revision is not None else None
        gated = config is not None and self._graphs.gated(origin.graph_id, config)
        for one in questions:
            question = one.question
            bound = gated and question.message_id is not None and question.call_index is not None
            request = question.action_request
            schema = one.schema if question.kind is not Kind.tool else None
            if bound and config is not None and question.tool is not None:
                schema = self._schema(origin, config, question.tool)
            await items.add(
                tx,
                InboxItem(
                    id=uuid7(),
                    version=1,
                    kind=question.kind,
                    **asdict(origin),
                    interrupt_id=one.interrupt_id,
                    value_hash=one.hash,
                    task_id=one.task_id,
                    path=list(one.path),
                    message_id=clean(question.message_id),
                    call_index=question.call_index,
                    tool_call_id=clean(question.tool_call_id),
                    tool=clean(question.tool),
                    action_request=clean(request),
                    config=question.config,
                    description=clean(question.description),
                    value=clean(one.value),
                    args_schema=clean(jsonable(schema)) if isinstance(schema, dict) else None,
                    args_hash=args_hash(request["action"], request["args"]) if request else None,
                    bound=bound,
                    seen_by=seen_by,
                ),
                by,
            )

    def _schema(self, origin: Origin, config: dict[str, Any], tool: str) -> dict[str, Any] | None:
        """The tool's schema. An agent that cannot be built any more must not keep its run from ending."""
        try:
            return self._graphs.tool_schema(origin.graph_id, config, tool)
        except Exception as error:
            log.warning("tool_schema_unknown", assistant_id=str(origin.assistant_id), tool=tool, error=repr(error))
            return None
