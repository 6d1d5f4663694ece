"""From LangGraph's snapshots to what clients see: ThreadState, pending questions, the thread's own row."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from langgraph.types import Interrupt, StateSnapshot

from app.codec import clean, jsonable
from app.threads.models import Thread, ThreadStatus
from app.threads.ports import PendingInterrupt

EMPTY: dict[str, Any] = {
    "values": {},
    "next": [],
    "tasks": [],
    "metadata": None,
    "created_at": None,
    "checkpoint": None,
    "parent_checkpoint": None,
    "interrupts": [],
    "checkpoint_id": None,
    "parent_checkpoint_id": None,
}
"""State of a thread that never ran."""

HIDDEN_METADATA = ("__", "langgraph_auth_")


def public(value: Any, private: frozenset[str]) -> Any:
    """Values, or an update, without the keys that are the graph's own business."""
    if not isinstance(value, Mapping):
        return value
    return {k: v for k, v in value.items() if k not in private and (k == "__root__" or not str(k).startswith("__"))}


def pending_interrupts(snapshot: StateSnapshot) -> list[PendingInterrupt]:
    """Questions that have no answer yet: those of tasks without a result."""
    return [
        PendingInterrupt(
            interrupt_id=interrupt.id,
            value=jsonable(interrupt.value),
            task_id=task.id,
            node=task.name,
            response_schema=jsonable(interrupt.response_schema),
        )
        for task in snapshot.tasks
        if task.result is None
        for interrupt in task.interrupts
    ]


def sync_from_snapshot(thread: Thread, snapshot: StateSnapshot, private: frozenset[str]) -> list[PendingInterrupt]:
    """Make the (locked) thread's row say what its newest checkpoint says. Returns the questions that wait in it.

    The status is that of a thread with nothing running or queued.
    """
    pending = pending_interrupts(snapshot)
    shown: dict[str, list[dict[str, Any]]] = {}
    for p in pending:
        shown.setdefault(p.task_id, []).append({"id": p.interrupt_id, "value": clean(p.value)})
    values = public(snapshot.values, private)
    thread.values = clean(jsonable(values if isinstance(values, dict) else {"__root__": values}))
    thread.interrupts = shown
    thread.error = None
    thread.status = ThreadStatus.interrupted if snapshot.next else ThreadStatus.idle
    thread.updated_at = thread.state_updated_at = datetime.now(UTC)
    return pending


def thread_state(snapshot: StateSnapshot, private: frozenset[str]) -> dict[str, Any]:
    """A ThreadState on the wire. The last two fields repeat others for old clients."""
    if snapshot.metadata is None:
        return EMPTY
    checkpoint = checkpoint_of(snapshot.config)
    parent = checkpoint_of(snapshot.parent_config)
    return {
        "values": public(snapshot.values, private),
        "next": list(snapshot.next),
        "tasks": [_task(task, private) for task in snapshot.tasks],
        "metadata": {k: v for k, v in snapshot.metadata.items() if not k.startswith(HIDDEN_METADATA)},
        "created_at": snapshot.created_at,
        "checkpoint": checkpoint,
        "parent_checkpoint": parent,
        "interrupts": [_interrupt(i) for i in snapshot.interrupts],
        "checkpoint_id": checkpoint["checkpoint_id"] if checkpoint else None,
        "parent_checkpoint_id": parent["checkpoint_id"] if parent else None,
    }


def checkpoint_of(config: Any) -> dict[str, Any] | None:
    """The Checkpoint object for a LangGraph config."""
    if not config:
        return None
    configurable = config["configurable"]
    found = {
        "checkpoint_id": configurable.get("checkpoint_id"),
        "thread_id": configurable["thread_id"],
        "checkpoint_ns": configurable.get("checkpoint_ns", ""),
    }
    if "checkpoint_map" in configurable:
        found["checkpoint_map"] = configurable["checkpoint_map"]
    return found


def _interrupt(interrupt: Interrupt) -> dict[str, Any]:
    shown = {"id": interrupt.id, "value": interrupt.value}
    return shown if interrupt.response_schema is None else {**shown, "response_schema": interrupt.response_schema}


def _task(task: Any, private: frozenset[str]) -> dict[str, Any]:
    state = task.state
    nested = isinstance(state, StateSnapshot)
    return {
        "id": task.id,
        "name": task.name,
        "path": list(task.path),
        "error": repr(task.error) if isinstance(task.error, BaseException) else task.error and str(task.error),
        "interrupts": [_interrupt(i) for i in task.interrupts],
        "checkpoint": None
        if nested or not state
        else {k: v for k, v in state["configurable"].items() if k in ("thread_id", "checkpoint_ns")},
        "state": thread_state(state, private) if nested else None,
        "result": public(task.result, private),
    }
