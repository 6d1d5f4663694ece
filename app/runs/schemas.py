"""Bodies of the run routes, in the wire shapes of the LangGraph Agent Server."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from app.runs.models import Run
from app.wire import WireModel

StreamMode = Literal[
    "values", "updates", "messages", "messages-tuple", "custom", "events", "debug", "tasks", "checkpoints", "tools"
]


def _as_list(value: Any) -> Any:
    """A single mode stands for a list of one."""
    return [value] if isinstance(value, str) else value


def _or_none(value: Any) -> Any:
    """RemoteGraph sends all fields of a Command, those that were not given empty."""
    return value or None


def _values_mode() -> list[StreamMode]:
    return ["values"]


class Command(WireModel):
    """How to go on from a pause, or how to change state before going on."""

    resume: Any = Field(None, description="An answer, or a map of interrupt id to answer.")
    update: Annotated[dict[str, Any] | list[Any] | None, BeforeValidator(_or_none)] = Field(
        None, description="Values to write into the state first."
    )
    goto: Annotated[Any, BeforeValidator(_or_none)] = Field(
        None, description="Node, or list of nodes or `{node, input}`, to run next."
    )


class RunConfig(WireModel):
    """Run-time configuration, as LangGraph knows it."""

    tags: list[str] = Field(default_factory=list)
    recursion_limit: int | None = Field(None, ge=1, description="Supersteps after which the run ends in an error.")
    configurable: dict[str, Any] = Field(default_factory=dict)


class RunCreate(WireModel):
    """What to run on a thread. Unknown fields are ignored: newer clients send more than this server knows."""

    model_config = ConfigDict(
        extra="ignore",
        json_schema_extra={
            "examples": [
                {
                    "assistant_id": "weather",
                    "input": {"messages": [{"role": "user", "content": "What is the weather in Lisbon?"}]},
                    "stream_mode": ["values", "messages-tuple"],
                }
            ]
        },
    )

    assistant_id: str = Field(description="An assistant's UUID, or the name of a graph or of a shipped example.")
    input: Any = Field(None, description="Input of the graph. Null goes on from the current state.")
    command: Command | None = None
    checkpoint: dict[str, Any] | None = Field(None, description="Checkpoint to start from instead of the newest.")
    checkpoint_id: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    config: RunConfig = Field(default_factory=RunConfig)
    context: dict[str, Any] = Field(default_factory=dict)
    stream_mode: Annotated[list[StreamMode], BeforeValidator(_as_list)] = Field(default_factory=_values_mode)
    stream_subgraphs: bool = False
    stream_resumable: bool = False
    interrupt_before: Literal["*"] | list[str] | None = None
    interrupt_after: Literal["*"] | list[str] | None = None
    multitask_strategy: Literal["enqueue", "reject", "interrupt", "rollback"] = "enqueue"
    on_disconnect: Literal["continue", "cancel"] = "continue"
    if_not_exists: Literal["reject", "create"] = "reject"
    after_seconds: float | None = Field(None, ge=0)
    durability: Literal["sync", "async", "exit"] | None = None
    webhook: str | None = Field(None, description="URL that is sent the run, with its values or error, when it has ended.")

    @property
    def resumes(self) -> bool:
        """Whether this asks to answer a question rather than to put in something new."""
        return self.command is not None and "resume" in self.command.model_fields_set


class RunsCancel(WireModel):
    """Which runs to cancel: some of a thread, all of a thread, or all in a status."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "pending"}]})

    thread_id: UUID | None = None
    run_ids: list[UUID] | None = Field(None, min_length=1, max_length=1000, description="Runs of `thread_id`.")
    status: Literal["pending", "running", "all"] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> RunsCancel:
        if self.run_ids is not None and (self.thread_id is None or self.status is not None):
            raise ValueError("run_ids go with thread_id, and not with status")
        if self.run_ids is None and self.thread_id is None and self.status is None:
            raise ValueError("name thread_id with or without run_ids, or a status")
        return self


class RunRead(BaseModel):
    """A run on the wire."""

    model_config = ConfigDict(extra="forbid")

    run_id: UUID
    thread_id: UUID
    assistant_id: UUID
    created_at: datetime
    updated_at: datetime
    status: str
    stop_reason: str | None = Field(None, description="Why the run stopped: `human_input` when it asked a question.")
    metadata: dict[str, Any]
    kwargs: dict[str, Any]
    multitask_strategy: str
    error: dict[str, Any] | None = None

    @classmethod
    def of(cls, run: Run) -> RunRead:
        """A run as the wire shows it. Who it acts for stays inside."""
        return cls(
            run_id=run.id,
            thread_id=run.thread_id,
            assistant_id=run.assistant_id,
            created_at=run.created_at,
            updated_at=run.updated_at,
            status=run.status,
            stop_reason=run.stop_reason,
            metadata=run.metadata_,
            kwargs={k: v for k, v in run.kwargs.items() if k not in ("owner", "watchers", "traceparent")},
            multitask_strategy=run.multitask_strategy,
            error=run.error,
        )
