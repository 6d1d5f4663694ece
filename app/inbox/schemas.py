"""Bodies of the inbox routes. Our own routes refuse fields that they do not know."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.inbox.payloads import Answer
from app.wire import received

Status = Literal["pending", "decided", "resuming", "settled", "failed", "expired", "superseded", "withdrawn"]

ITEM: dict[str, Any] = {
    "id": "0190a8f0-3c1e-7d2a-9a51-6f0c2a9b1e44",
    "version": 1,
    "status": "pending",
    "kind": "tool",
    "thread_id": "0190a8ef-0000-7d2a-9a51-6f0c2a9b1e44",
    "run_id": "0190a8f0-1111-7d2a-9a51-6f0c2a9b1e44",
    "assistant_id": "5e2b7a3c-1c1f-5d0b-9b2f-0c7a7f9f3a10",
    "assistant_version": 1,
    "graph_id": "react",
    "interrupt_id": "3f2c9b7e5d1a4c6f8e0b2d4a6c8e0f12",
    "tool": "audit",
    "tool_call_id": "call_1",
    "path": ["review"],
    "action_request": {"action": "audit", "args": {"order_id": "12345", "amount": 1500}},
    "config": {"allow_accept": True, "allow_edit": True, "allow_respond": True, "allow_ignore": True},
    "description": "Refund of 1500 for order 12345",
    "args_schema": {"type": "object", "properties": {"order_id": {"type": "string"}, "amount": {"type": "number"}}},
    "args_hash": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "bound": True,
    "value": [{"action_request": {"action": "audit", "args": {"order_id": "12345", "amount": 1500}}}],
    "copied_from": None,
    "created_at": "2026-12-01T12:00:00Z",
    "updated_at": "2026-12-01T12:00:00Z",
    "decided_at": None,
    "settled_at": None,
    "decision": None,
    "outcome": None,
    "resume_run_id": None,
    "links": {"self": "/inbox/0190a8f0-3c1e-7d2a-9a51-6f0c2a9b1e44"},
}

DECISION: dict[str, Any] = {
    "type": "accept",
    "args": None,
    "by": "alice",
    "via": "inbox",
    "at": "2026-12-01T12:01:00+00:00",
    "cause": "human",
    "diff": [],
    "args_hash": ITEM["args_hash"],
}


class Decision(BaseModel):
    """What a reviewer (or a rule) decided."""

    type: Literal["accept", "edit", "response", "ignore"]
    args: Any
    by: str = Field(description="Subject of the credential.")
    via: str = Field(description="`inbox`, or `run` for LangGraph's command.resume.")
    at: datetime
    cause: Literal["human", "rule", "expiry", "system"]
    diff: list[dict[str, Any]] = Field(description="With an edit, what was changed: `{path, before, after}`.")
    args_hash: str | None = Field(description="Hash of the call that may run.")


class Outcome(BaseModel):
    """What became of a decision."""

    state: Literal["queued", "running", "settled", "failed", "unknown_outcome"]
    error: dict[str, Any] | None = None
    tool_message_id: str | None = None


class ItemRead(BaseModel):
    """A question that an agent asks a human."""

    model_config = ConfigDict(title="InboxItem", json_schema_extra={"examples": [ITEM]})

    id: UUID
    version: int = Field(description="Rises with every change of status; send it as `If-Match`.")
    status: Status
    kind: Literal["tool", "question", "breakpoint", "raw"]
    thread_id: UUID
    run_id: UUID | None = Field(description="The run that asked.")
    assistant_id: UUID
    assistant_version: int
    graph_id: str
    interrupt_id: str = Field(description="LangGraph's id of the question.")
    tool: str | None
    tool_call_id: str | None
    path: list[str] = Field(description="The nodes, from the outermost graph inwards.")
    action_request: dict[str, Any] | None
    config: dict[str, bool] = Field(description="Which verbs are allowed.")
    description: str | None
    args_schema: dict[str, Any] | None = Field(description="JSON Schema of the call's arguments, or of a free answer.")
    args_hash: str | None = Field(description="Hash of the call as shown; quote it to be sure.")
    bound: bool = Field(description="Whether the call can only run by this decision.")
    value: Any = Field(description="The interrupt's value, unchanged.")
    copied_from: UUID | None = Field(description="The thread that this one is a copy of.")
    created_at: datetime
    updated_at: datetime
    decided_at: datetime | None
    settled_at: datetime | None
    decision: Decision | None
    outcome: Outcome | None
    resume_run_id: UUID | None = Field(description="The run that carries the answer.")
    links: dict[str, str]


class ItemPage(BaseModel):
    """A page of items."""

    items: list[ItemRead]
    next_cursor: str | None = Field(description="Send it as `cursor` to go on; null at the end.")


class Counts(BaseModel):
    """How many questions wait, and how many items there are in each status."""

    total: int = Field(description="Pending items.", examples=[3])
    by_tool: dict[str, int] = Field(description="Pending items.", examples=[{"refund": 2, "audit": 1}])
    by_assistant: dict[str, int] = Field(description="Pending items.")
    by_status: dict[str, int] = Field(description="All items.", examples=[{"pending": 3, "settled": 40}])


class AuditRecord(BaseModel):
    """One thing that happened to an item."""

    id: int
    event: str = Field(description="created, decided, resuming, settled, failed, revoked, superseded, withdrawn, expired")
    item_version: int
    actor: str
    via: str
    cause: str
    args_hash: str | None = Field(description="Hash of what was shown.")
    detail: dict[str, Any]
    at: datetime


class Response(BaseModel):
    """A HumanResponse. A list of one is taken as well."""

    model_config = ConfigDict(
        title="HumanResponse",
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"type": "accept", "args": None},
                {"type": "edit", "args": {"action": "audit", "args": {"order_id": "12345", "amount": 900}}},
                {"type": "response", "args": "Ask for a photo of the damage first."},
                {"type": "ignore", "args": None},
            ]
        },
    )

    type: Literal["accept", "edit", "response", "respond", "ignore"]
    args: Any = Field(None, description="null, the edited action request, a text, or any JSON for a free question.")
    args_hash: str | None = Field(None, description="The item's `args_hash`, as it was read.")
    allow_duplicate: bool = Field(False, description="Carry out a call that the copied thread has carried out already.")

    @model_validator(mode="before")
    @classmethod
    def _one(cls, data: Any) -> Any:
        if isinstance(data, list):
            if len(data) != 1:
                raise ValueError("send one answer; several questions are answered one by one")
            data = data[0]
        return received(data)

    def answer(self) -> Answer:
        """The answer itself."""
        return Answer(self.type, self.args, "args" in self.model_fields_set)


class Accepted(BaseModel):
    """A decision that was stored."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"item": ITEM | {"status": "decided", "version": 2, "decision": DECISION}, "run_id": ITEM["run_id"]}]
        }
    )

    item: ItemRead
    run_id: UUID = Field(description="The run that carries the answer; follow it at /threads/{thread_id}/runs/{run_id}/stream.")


class DryRun(BaseModel):
    """What a decision would be. Nothing was stored."""

    item: ItemRead
    run_id: None
    decision: dict[str, Any] = Field(description="`type`, `args`, `diff` and `args_hash` as they would be stored.")


class ItemQuery(BaseModel):
    """Filters of the list."""

    model_config = ConfigDict(extra="forbid")

    status: list[Literal[Status, "all"]] = Field(["pending"], description="May be repeated; `all` for every status.")
    tool: str | None = Field(None, description="Name of the tool (or action).")
    assistant_id: UUID | None = None
    thread_id: UUID | None = None
    cursor: str | None = Field(None, description="`next_cursor` of the page before.")
    limit: int = Field(50, ge=1, le=200)

    @model_validator(mode="before")
    @classmethod
    def _clean(cls, data: Any) -> Any:
        return received(data)
