"""How a run ended, what it left pending, and what that makes of its thread."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from langgraph.types import Send, StateSnapshot
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from app.codec import clean, dumps, jsonable
from app.runs.models import Run, RunStatus, StopReason
from app.runs.ports import PendingInterrupt
from app.streaming.chunks import ChunkEncoder
from app.threads.models import Thread, ThreadStatus
from app.threads.state import pending_interrupts, public

SETTLE = text("""
UPDATE threads SET status = :status, interrupts = CAST(:interrupts AS jsonb), error = CAST(:error AS jsonb),
    "values" = coalesce(CAST(:values AS jsonb), "values"), assistant_id = :assistant_id,
    assistant_version = :version, graph_id = :graph_id, updated_at = now(), state_updated_at = now()
WHERE id = :id
""")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run. `events` are still to be sent: held questions and errors."""

    status: RunStatus
    reason: StopReason
    values: dict[str, Any] | None = None
    pending: list[PendingInterrupt] = field(default_factory=list)
    breakpoint_nodes: list[str] = field(default_factory=list)
    next: tuple[str, ...] = ()
    checkpoint_id: str | None = None
    error: dict[str, Any] | None = None
    events: list[tuple[str, bytes]] = field(default_factory=list)
    needs_state: bool = False

    @classmethod
    def of(cls, encoder: ChunkEncoder, snapshot: StateSnapshot | None) -> Outcome:
        """A graph that came to its end (no snapshot needed) or to a pause."""
        done = cls(RunStatus.success, StopReason.finished, values=encoder.last_values, events=list(encoder.held))
        return done if snapshot is None else done.with_state(snapshot)

    @classmethod
    def failed(cls, error: dict[str, Any], encoder: ChunkEncoder | None = None) -> Outcome:
        """A graph that raised."""
        values = encoder.last_values if encoder else None
        return cls(
            RunStatus.error, StopReason.failed, values=values, error=error, events=[("error", dumps(error))], needs_state=True
        )

    @classmethod
    def stopped(cls, reason: StopReason) -> Outcome:
        """A run that was told to stop."""
        status = RunStatus.timeout if reason is StopReason.timeout else RunStatus.interrupted
        return cls(status, reason, needs_state=True)

    def with_state(self, snapshot: StateSnapshot) -> Outcome:
        """The same outcome, with what the newest checkpoint says."""
        pending = pending_interrupts(snapshot)
        at_breakpoint = self.status is RunStatus.success and not pending and bool(snapshot.next)
        reason = self.reason
        if self.status is RunStatus.success and pending:
            reason = StopReason.human_input
        elif at_breakpoint:
            reason = StopReason.breakpoint
        return replace(
            self,
            reason=reason,
            values=snapshot.values if isinstance(snapshot.values, dict) else {"__root__": snapshot.values},
            pending=pending,
            breakpoint_nodes=list(snapshot.next) if at_breakpoint else [],
            next=snapshot.next,
            checkpoint_id=snapshot.config.get("configurable", {}).get("checkpoint_id"),
            needs_state=False,
        )

    def last_events(self, run: Run) -> list[tuple[str, bytes]]:
        """What readers are still to be told, and that this was all."""
        return [*self.events, ("end", dumps({"run_id": run.id, "status": self.status, "stop_reason": self.reason}))]


def goto_nodes(goto: Any) -> Any:
    """`command.goto` from the wire: a node's name, `{node, input}` for a Send, or a list of these."""
    if isinstance(goto, list):
        return [goto_nodes(g) for g in goto]
    if isinstance(goto, dict):
        return Send(goto["node"], goto.get("input"))
    return goto or ()


def jsonb(value: Any) -> str:
    """JSON text that a jsonb column takes: the one escape that it refuses is removed."""
    data = dumps(value)
    if b"\\u0000" in data:
        data = dumps(clean(jsonable(value)))
    return data.decode()


def interrupts_by_task(pending: list[PendingInterrupt]) -> dict[str, list[dict[str, Any]]]:
    """Pending questions as a thread shows them: `{task_id: [{id, value}]}`."""
    shown: dict[str, list[dict[str, Any]]] = {}
    for p in pending:
        shown.setdefault(p.task_id, []).append({"id": p.interrupt_id, "value": p.value})
    return shown


def thread_status(outcome: Outcome) -> ThreadStatus:
    """Status of a thread whose last run ended so and that has nothing else to do."""
    if outcome.status is RunStatus.error:
        return ThreadStatus.error
    if outcome.pending or outcome.breakpoint_nodes or outcome.next:
        return ThreadStatus.interrupted
    return ThreadStatus.idle


async def settle_thread(
    tx: AsyncSession, thread: Thread, run: Run, outcome: Outcome, *, private: frozenset[str], busy: bool
) -> None:
    """Write what the run left behind to its (locked) thread."""
    values = outcome.values
    await tx.execute(
        SETTLE,
        {
            "id": thread.id,
            "status": ThreadStatus.busy if busy else thread_status(outcome),
            "interrupts": jsonb(interrupts_by_task(outcome.pending)),
            "error": jsonb(outcome.error) if outcome.error else None,
            "values": jsonb(public(values, private)) if values is not None else None,
            "assistant_id": run.assistant_id,
            "version": run.assistant_version,
            "graph_id": run.graph_id,
        },
    )
