"""Carries out one tool call and makes its one tool message. Gated calls spend a permit first, whoever sent them here."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, ToolCall, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.errors import GraphInterrupt
from langgraph.types import Command

from app.codec import clean, jsonable
from app.graphs.review import UNKNOWN_OUTCOME, EffectGate, GatedCall, Receipt, Rule, args_hash, edit_note, with_calls
from app.graphs.toolrun import ToolRunner
from app.graphs.tools import ToolSpec

KEPT = ("content", "status", "artifact", "additional_kwargs")
"""Fields of a tool message that a receipt keeps."""


@dataclass(frozen=True, slots=True)
class Job:
    """One call, by the message it stands in and its place there."""

    message_id: str
    index: int
    call: ToolCall
    reviewed: bool = False
    edited_from: dict[str, Any] | None = None
    error: str | None = None

    @property
    def key(self) -> str:
        """Names the call in the state, and its tool message."""
        return f"{self.message_id}:{self.index}"

    def payload(self) -> dict[str, Any]:
        """Plain data for a Send."""
        extra = {"reviewed": self.reviewed or None, "edited_from": self.edited_from, "error": self.error}
        return {
            "message_id": self.message_id,
            "index": self.index,
            "call": dict(self.call),
            **{k: v for k, v in extra.items() if v is not None},
        }

    @classmethod
    def parse(cls, payload: Any) -> Job:
        """A Send's payload, which a client may have written."""
        match payload:
            case {"message_id": str(message_id), "index": int(index), "call": {"name": str(name), "args": dict(args)} as call}:
                before, error = payload.get("edited_from"), payload.get("error")
                return cls(
                    message_id,
                    index,
                    ToolCall(name=name, args=args, id=str(call.get("id") or ""), type="tool_call"),
                    bool(payload.get("reviewed")),
                    before if isinstance(before, dict) else None,
                    str(error) if error is not None else None,
                )
        raise ValueError("A call is sent to a node as {message_id, index, call: {name, args, id}}.")


def jobs_of(message: AIMessage) -> list[Job]:
    """All calls of a message, in order: the valid ones, then those whose arguments could not be read."""
    message_id = message.id or ""
    jobs = [Job(message_id, i, call) for i, call in enumerate(message.tool_calls)]
    for i, bad in enumerate(message.invalid_tool_calls, len(jobs)):
        call = ToolCall(name=bad["name"] or "", args={}, id=bad["id"], type="tool_call")
        jobs.append(Job(message_id, i, call, error="its arguments are not a JSON object"))
    return jobs


def settled(reply: AIMessage, history: list[AnyMessage], name: str | None) -> AIMessage:
    """A model's message that can be told apart: an id that the thread does not have yet, and an id for each of its calls.

    Arguments lose what Postgres cannot hold, so that what a reviewer sees is what runs.
    """
    update: dict[str, Any] = {"name": name} if name else {}
    if not reply.id or any(m.id == reply.id for m in history):
        update["id"] = f"run-{uuid4()}"
    if update:
        reply = reply.model_copy(update=update)
    changes: dict[int, dict[str, Any]] = {}
    seen: set[str] = set()
    for job in jobs_of(reply):
        change: dict[str, Any] = {}
        if not job.call["id"] or job.call["id"] in seen:
            change["id"] = f"call_{uuid4().hex[:24]}"
        seen.add(change.get("id") or job.call["id"] or "")
        if job.error is None and (args := clean(storable(job.call["args"]))) != job.call["args"]:
            change["args"] = args
        if change:
            changes[job.index] = change
    return with_calls(reply, changes) if changes else reply


def storable(value: Any) -> Any:
    """Numbers as JSON and Postgres can hold them: no NaN, no infinity, no integer beyond 64 bits."""
    if isinstance(value, dict):
        return {k: storable(v) for k, v in value.items()}
    if isinstance(value, list):
        return [storable(v) for v in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        value = float(value) if abs(value) < 10**300 else None
    return None if isinstance(value, float) and not math.isfinite(value) else value


def answered(messages: list[AnyMessage], message: AIMessage) -> set[str]:
    """Provider ids of the message's calls that have a result."""
    ids: set[str] = set()
    for m in reversed(messages):
        if m.id == message.id:
            break
        if isinstance(m, ToolMessage):
            ids.add(m.tool_call_id)
    return ids


def last_ai(messages: list[AnyMessage]) -> AIMessage | None:
    """The newest message of the model."""
    return next((m for m in reversed(messages) if isinstance(m, AIMessage)), None)


class Caller:
    """Runs calls of one agent's tools."""

    def __init__(
        self, tools: Mapping[str, ToolSpec], rules: Mapping[str, Rule], gate: EffectGate, timeout: float | None = None
    ) -> None:
        self.tools = tools
        self.rules = rules
        self._gate = gate
        self._runner = ToolRunner(tools, timeout)

    def flaw(self, job: Job) -> str | None:
        """Why a call can never run, as the model is told. Such a call needs no review."""
        name = job.call["name"]
        if job.error is not None:
            return f"Error: {name} was not run: {job.error}. Send the call again with valid arguments."
        spec = self.tools.get(name)
        if spec is None:
            return f"Error: there is no tool {name!r}. Use one of: {', '.join(self.tools) or 'none'}."
        if wrong := spec.problem(job.call["args"]):
            return f"Error: {name} was not run: its arguments are not valid ({wrong}). Fix them and call it again."
        return None

    def gated(self, job: Job) -> bool:
        """Whether the call needs a human."""
        rule = self.rules.get(job.call["name"])
        return rule is not None and rule.gates(job.call["args"]) and self.flaw(job) is None

    async def run(self, job: Job, config: RunnableConfig) -> Any:
        """The update of the state with the call's tool message; None for a gated call without a permit."""
        if flaw := self.flaw(job):
            return {"messages": [message_for(job, flaw, status="error")]}
        # An edit may take a call below its rule's condition; it still runs on the permit, once.
        if not self.gated(job) and not (job.reviewed and job.call["name"] in self.rules):
            return self._complete(job, await self._runner.run(job.call, config))
        call = _gated_call(job, config)
        spent = await self._gate.spend(call)
        if spent == "absent":
            return None
        if spent == "unknown":
            return {"messages": [message_for(job, UNKNOWN_OUTCOME, status="error")]}
        if isinstance(spent, Receipt):
            return {"messages": [message_for(job, **{k: v for k, v in spent.message.items() if k in KEPT})]}
        try:
            result = self._complete(job, await self._runner.run(job.call, config))
        except GraphInterrupt:
            await asyncio.shield(self._gate.release(call))
            raise
        message = next(
            (m for m in _messages(result) if isinstance(m, ToolMessage) and m.tool_call_id == job.call["id"]),
            message_for(job, "This call was carried out."),
        )
        # The effect is there: its receipt must be too, even if the run is cancelled right now.
        await asyncio.shield(self._gate.receipt(call, jsonable({k: getattr(message, k) for k in KEPT})))
        return result

    @staticmethod
    def _complete(job: Job, result: Any) -> Any:
        """Give the tool message its name and, after an edit, the note about it."""
        note = edit_note(job.edited_from, job.call["args"]) if job.edited_from is not None else ""
        for message in _messages(result):
            if isinstance(message, ToolMessage) and message.tool_call_id == job.call["id"]:
                message.id = job.key if job.message_id else None
                if note and isinstance(message.content, str):
                    message.content = f"{message.content}\n\n{note}"
                elif note:
                    message.content = [*message.content, {"type": "text", "text": note}]
        return result


def message_for(job: Job, content: Any, *, status: str = "success", **fields: Any) -> ToolMessage:
    """The call's one tool message. Its id follows from the call, so that a second one would take the first's place."""
    return ToolMessage(
        content=content,
        name=job.call["name"],
        tool_call_id=job.call["id"] or "",
        id=job.key if job.message_id else None,
        status="error" if status == "error" else "success",
        **fields,
    )


def _messages(result: Any) -> list[BaseMessage]:
    """The messages in what a ToolNode returned: an update, or a list of updates and commands."""
    found: list[BaseMessage] = []
    for part in result if isinstance(result, list) else [result]:
        update = part.update if isinstance(part, Command) else part
        if isinstance(update, dict):
            found += update.get("messages") or []
    return found


def _gated_call(job: Job, config: RunnableConfig) -> GatedCall:
    configurable = config.get("configurable", {})
    action, args = job.call["name"], job.call["args"]
    run_id, epoch = configurable.get("run_id"), configurable.get("__keyturn_epoch")
    return GatedCall(
        thread_id=str(configurable.get("thread_id") or ""),
        message_id=job.message_id,
        index=job.index,
        action=action,
        args=args,
        args_hash=args_hash(action, args),
        run_id=str(run_id) if run_id else None,
        epoch=int(epoch) if epoch is not None else None,
    )
