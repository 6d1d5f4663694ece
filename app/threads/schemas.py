"""Bodies of the thread routes, in the wire shapes of the LangGraph Agent Server."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from app.threads.models import Thread, ThreadStatus
from app.wire import WireModel

ThreadField = Literal[
    "thread_id",
    "created_at",
    "updated_at",
    "state_updated_at",
    "metadata",
    "config",
    "status",
    "values",
    "interrupts",
    "error",
]


class Checkpoint(WireModel):
    """Names a checkpoint of a thread, or with `checkpoint_ns` of one of its subgraphs."""

    checkpoint_id: UUID | None = None
    checkpoint_ns: str = ""

    def configurable(self) -> dict[str, Any]:
        """The same in LangGraph's configuration."""
        named = {"checkpoint_ns": self.checkpoint_ns} if self.checkpoint_ns else {}
        return named if self.checkpoint_id is None else {**named, "checkpoint_id": str(self.checkpoint_id)}


def _as_checkpoint(value: Any) -> Any:
    """Clients may name a checkpoint by its id alone, and send null for its parts."""
    if isinstance(value, str):
        return {"checkpoint_id": value}
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


AnyCheckpoint = Annotated[Checkpoint, BeforeValidator(_as_checkpoint)]


class Update(WireModel):
    """Values written as if a node had returned them."""

    values: dict[str, Any] | list[Any] | None = None
    command: dict[str, Any] | None = Field(None, description="Only `update` is used, as `values`.")
    as_node: str | None = Field(None, description="The node; `__input__` stands for the thread's input.")

    @property
    def written(self) -> dict[str, Any] | list[Any] | None:
        """The values, wherever they were given."""
        return self.values if self.values is not None or self.command is None else self.command.get("update")


class Superstep(WireModel):
    """Updates that are applied together."""

    updates: list[Update] = Field(min_length=1, max_length=100)


class ThreadCreate(WireModel):
    """A new thread."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"metadata": {"customer": "c-42"}}]})

    thread_id: UUID | None = Field(None, description="Chosen by the server when left out.")
    metadata: dict[str, Any] = Field(default_factory=dict)
    if_exists: Literal["raise", "do_nothing"] = Field("raise", description="`do_nothing` answers with the thread as it is.")
    supersteps: list[Superstep] | None = Field(
        None, max_length=1000, description="State to start with; needs `metadata.graph_id` or `metadata.assistant_id`."
    )


class ThreadPatch(WireModel):
    """What to change of a thread."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"metadata": {"tag": "urgent"}}]})

    metadata: dict[str, Any] | None = Field(None, description="Merged into what is there.")


class ThreadFilter(WireModel):
    """Which threads to count."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "interrupted"}]})

    metadata: dict[str, Any] | None = Field(None, description="Metadata that must be contained.")
    values: dict[str, Any] | None = Field(None, description="State values that must be contained.")
    status: ThreadStatus | None = None


class ThreadSearch(ThreadFilter):
    """Which threads to list, and how."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "interrupted", "limit": 10}]})

    ids: list[UUID] | None = Field(None, max_length=10_000)
    limit: int = Field(10, ge=1, le=1000)
    offset: int = Field(0, ge=0, le=2**31)
    sort_by: Literal["thread_id", "status", "created_at", "updated_at", "state_updated_at"] | None = None
    sort_order: Literal["asc", "desc"] | None = None
    select: list[ThreadField] | None = Field(None, description="Fields to return; all by default.")


class StateUpdate(WireModel):
    """Values to write into a thread's state, from outside any run."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"values": {"answer": "edited"}, "as_node": "agent"}]})

    values: dict[str, Any] | list[Any] | None = None
    as_node: str | None = Field(
        None, description="The node that is taken to have written; `__end__` without values ends the turn."
    )
    checkpoint: AnyCheckpoint | None = Field(None, description="Checkpoint to go on from instead of the newest.")
    checkpoint_id: UUID | None = Field(None, description="The same, from older clients.")

    @property
    def base(self) -> Checkpoint:
        """The checkpoint to go on from."""
        return self.checkpoint or Checkpoint(checkpoint_id=self.checkpoint_id)


class StateAt(WireModel):
    """Which checkpoint to read."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"checkpoint": {"checkpoint_id": "1f1ed198-d88f-6dfa-8001-660060b4ae24"}}]}
    )

    checkpoint: AnyCheckpoint
    subgraphs: bool = False


class HistorySearch(WireModel):
    """Which checkpoints to list, newest first."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"limit": 10}]})

    limit: int = Field(1, ge=1, le=1000)
    before: AnyCheckpoint | None = None
    metadata: dict[str, Any] | None = None
    checkpoint: AnyCheckpoint | None = Field(None, description="`checkpoint_ns` chooses a subgraph.")


class ThreadRead(BaseModel):
    """A thread on the wire. `error` and `interrupts` appear with its first run."""

    thread_id: UUID
    created_at: datetime
    updated_at: datetime
    state_updated_at: datetime
    metadata: dict[str, Any]
    status: ThreadStatus
    config: dict[str, Any]
    values: dict[str, Any] | None
    error: dict[str, Any] | None = None
    interrupts: dict[str, list[dict[str, Any]]] | None = Field(None, description="Pending questions by task.")


class TaskRead(BaseModel):
    """A task of a step: what is to run, or why it does not."""

    id: str
    name: str
    path: list[Any]
    error: str | None
    interrupts: list[dict[str, Any]]
    checkpoint: dict[str, Any] | None
    state: dict[str, Any] | None
    result: Any


class ThreadState(BaseModel):
    """State of a thread at one checkpoint."""

    values: Any
    next: list[str]
    tasks: list[TaskRead]
    metadata: dict[str, Any] | None
    created_at: str | None
    checkpoint: dict[str, Any] | None
    parent_checkpoint: dict[str, Any] | None
    interrupts: list[dict[str, Any]]
    checkpoint_id: str | None
    parent_checkpoint_id: str | None


class StateUpdated(BaseModel):
    """The checkpoint that a state update made, in the three forms that clients look for it."""

    checkpoint: dict[str, Any]
    configurable: dict[str, Any]
    checkpoint_id: str


ATTRIBUTES = {"thread_id": "id", "metadata": "metadata_"}
"""Wire fields whose column has another name."""


def read(thread: Thread, select: list[ThreadField] | None = None) -> dict[str, Any]:
    """A thread on the wire; with `select` only those fields, the others need not be loaded."""
    if select is not None:
        return {field: getattr(thread, ATTRIBUTES.get(field, field)) for field in select}
    body = {
        "thread_id": thread.id,
        "created_at": thread.created_at,
        "updated_at": thread.updated_at,
        "state_updated_at": thread.state_updated_at,
        "metadata": thread.metadata_,
        "status": thread.status,
        "config": thread.config,
        "values": thread.values,
    }
    if thread.interrupts is not None or thread.error is not None:
        body |= {"error": thread.error, "interrupts": thread.interrupts or {}}
    return body
