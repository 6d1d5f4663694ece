"""Bodies of the assistant routes, in the wire shapes of the LangGraph Agent Server."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from app.assistants.models import Assistant, AssistantVersion
from app.wire import WireModel

SortBy = Literal["assistant_id", "created_at", "updated_at", "name", "graph_id"]
Field_ = Literal[
    "assistant_id", "graph_id", "config", "context", "metadata", "name", "description", "created_at", "updated_at", "version"
]

REFUND_DESK: dict[str, Any] = {
    "graph_id": "react",
    "name": "Refund desk",
    "config": {
        "configurable": {
            "model": "openai:gpt-4.1-mini",
            "prompt": "You handle refunds.",
            "tools": ["refund"],
            "review": {"tools": {"refund": {"when": "amount > 100", "description": "Refund {{ amount }} on {{ order_id }}"}}},
        }
    },
}


class AssistantConfig(WireModel):
    """Configuration of a graph. `configurable` and the assistant's `context` are one thing under two names."""

    tags: list[str] | None = None
    recursion_limit: int | None = Field(None, ge=1, description="Supersteps after which a run ends in an error.")
    configurable: dict[str, Any] | None = Field(
        None, description="The agent's configuration: model, prompt, tools, review, memory."
    )

    def stored(self) -> dict[str, Any]:
        """What is kept: the fields that were given."""
        return self.model_dump(exclude_none=True)


class AssistantCreate(WireModel):
    """A new assistant: a named configuration of a graph."""

    model_config = ConfigDict(json_schema_extra={"examples": [REFUND_DESK]})

    graph_id: str = Field(description="`react`, or the id of a graph from `langgraph.json`.")
    assistant_id: UUID | None = Field(None, description="Chosen by the server when left out.")
    config: AssistantConfig = Field(default_factory=AssistantConfig)
    context: dict[str, Any] | None = Field(None, description="The same as `config.configurable`; set one of them.")
    metadata: dict[str, Any] = Field(default_factory=dict)
    if_exists: Literal["raise", "do_nothing"] = Field("raise", description="`do_nothing` answers with the assistant as it is.")
    name: str = Field("Untitled", max_length=500)
    description: str | None = Field(None, max_length=10_000)


class AssistantPatch(WireModel):
    """A new version of an assistant. What is left out stays; `metadata` is merged."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"config": {"configurable": {"model": "openai:gpt-4.1"}}}]})

    graph_id: str | None = None
    config: AssistantConfig | None = None
    context: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    name: str | None = Field(None, max_length=500)
    description: str | None = Field(None, max_length=10_000)


class AssistantFilter(WireModel):
    """Which assistants to count."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"graph_id": "react"}]})

    metadata: dict[str, Any] | None = Field(None, description="Metadata that must be contained.")
    graph_id: str | None = None
    name: str | None = Field(None, description="Part of the name, in any case.")


class AssistantSearch(AssistantFilter):
    """Which assistants to list, and how."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"graph_id": "react", "limit": 10}]})

    limit: int = Field(10, ge=1, le=1000)
    offset: int = Field(0, ge=0, le=2**31)
    sort_by: SortBy | None = None
    sort_order: Literal["asc", "desc"] | None = None
    select: list[Field_] | None = Field(None, description="Fields to return; all by default.")


class VersionSearch(WireModel):
    """Which versions to list."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"limit": 10}]})

    metadata: dict[str, Any] | None = None
    limit: int = Field(10, ge=1, le=1000)
    offset: int = Field(0, ge=0, le=2**31)


class SetLatest(WireModel):
    """The version to go back (or forward) to."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"version": 1}]})

    version: int = Field(ge=1, le=2**31 - 1)


class AssistantRead(BaseModel):
    """An assistant on the wire."""

    assistant_id: UUID
    graph_id: str
    config: dict[str, Any]
    context: dict[str, Any]
    metadata: dict[str, Any]
    name: str
    description: str | None
    created_at: datetime
    updated_at: datetime
    version: int


class VersionRead(BaseModel):
    """An assistant as it was at one version."""

    assistant_id: UUID
    version: int
    graph_id: str
    config: dict[str, Any]
    context: dict[str, Any]
    metadata: dict[str, Any]
    created_at: datetime
    name: str
    description: str | None


class AssistantSchemas(BaseModel):
    """JSON Schemas of a graph; null where it has none."""

    graph_id: str
    input_schema: dict[str, Any] | None
    output_schema: dict[str, Any] | None
    state_schema: dict[str, Any] | None
    config_schema: dict[str, Any] | None
    context_schema: dict[str, Any] | None


class Drawing(BaseModel):
    """Nodes and edges of a graph."""

    nodes: list[dict[str, Any]]
    edges: list[dict[str, Any]]


def read(row: Assistant, select: list[Field_] | None = None) -> dict[str, Any]:
    """An assistant's row on the wire."""
    body: dict[str, Any] = {
        "assistant_id": row.id,
        "graph_id": row.graph_id,
        "config": row.config,
        "context": row.context,
        "metadata": row.metadata_,
        "name": row.name,
        "description": row.description,
        "created_at": row.created_at,
        "updated_at": row.updated_at,
        "version": row.version,
    }
    return body if select is None else {field: body[field] for field in select}


def read_version(row: AssistantVersion) -> dict[str, Any]:
    """A version's row on the wire."""
    return {
        "assistant_id": row.assistant_id,
        "version": row.version,
        "graph_id": row.graph_id,
        "config": row.config,
        "context": row.context,
        "metadata": row.metadata_,
        "created_at": row.created_at,
        "name": row.name,
        "description": row.description,
    }
