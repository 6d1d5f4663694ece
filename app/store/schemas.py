"""Bodies of the store routes, in the wire shapes of the LangGraph Agent Server."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from langgraph.store.base import Item, SearchItem
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from app.wire import WireModel, storable

MAX_PATH = 1000
"""Bytes of a namespace and of a key: Postgres' index takes no longer entries."""

MEMORY: dict[str, Any] = {"namespace": ["memories", "local"], "key": "1", "value": {"memory": "Likes tea."}}


def check_label(label: str) -> str:
    """A part of a namespace, as LangGraph demands it."""
    if not label or "." in label:
        raise PydanticCustomError("label", "a label must be a non-empty text without periods")
    return check_text(label)


def check_text(text: str) -> str:
    """A text that names something: cleaning it would make it the name of something else."""
    if "\x00" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise PydanticCustomError("text", "must not contain NUL or lone surrogates")
    return text


def check_namespace(labels: list[str]) -> list[str]:
    """A namespace that the index takes."""
    if len(".".join(labels).encode()) > MAX_PATH:
        raise PydanticCustomError("namespace", f"must not be longer than {MAX_PATH} bytes in all")
    return labels


def check_key(key: str) -> str:
    """A key that the index takes."""
    if len(check_text(key).encode()) > MAX_PATH:
        raise PydanticCustomError("key", f"must not be longer than {MAX_PATH} bytes")
    return key


Label = Annotated[str, AfterValidator(check_label)]
Prefix = Annotated[list[Label], AfterValidator(check_namespace), Field(max_length=50)]
Namespace = Annotated[list[Label], AfterValidator(check_namespace), Field(min_length=1, max_length=50)]
Key = Annotated[str, AfterValidator(check_key), Field(min_length=1)]


class Named(BaseModel):
    """Body that names an item. Names are refused rather than cleaned."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"examples": [{k: MEMORY[k] for k in ("namespace", "key")}]})

    namespace: Namespace
    key: Key


class ItemPut(Named):
    """An item to store."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"examples": [MEMORY]})

    value: Annotated[dict[str, Any], AfterValidator(storable)]


class ItemSearch(WireModel):
    """Which items to list, last changed first."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"namespace_prefix": ["memories"], "limit": 10}]})

    namespace_prefix: Prefix = Field(default_factory=list)
    filter: dict[str, Any] | None = Field(
        None, description="Fields of the value: plain, or `{$eq,$ne,$gt,$gte,$lt,$lte: ...}`."
    )
    limit: int = Field(10, ge=1, le=1000)
    offset: int = Field(0, ge=0, le=2**31)
    query: str | None = Field(None, max_length=10_000, description="Used when the server has an embedding index.")


class NamespaceSearch(WireModel):
    """Which namespaces to list."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prefix": ["memories"], "max_depth": 2}]})

    prefix: Prefix | None = Field(None, description="`*` stands for any one label.")
    suffix: Prefix | None = None
    max_depth: int | None = Field(None, ge=1, le=100)
    limit: int = Field(100, ge=1, le=1000)
    offset: int = Field(0, ge=0, le=2**31)


class ItemRead(BaseModel):
    """A stored item."""

    namespace: list[str]
    key: str
    value: dict[str, Any]
    created_at: datetime
    updated_at: datetime


class FoundItem(ItemRead):
    """An item with its score, which is null without an embedding index."""

    score: float | None = None


class ItemsRead(BaseModel):
    """What a search found."""

    items: list[FoundItem]


class NamespacesRead(BaseModel):
    """What a search for namespaces found."""

    namespaces: list[list[str]]


def read(item: Item) -> dict[str, Any]:
    """An item on the wire; a found one with its score."""
    body = {
        "namespace": list(item.namespace),
        "key": item.key,
        "value": item.value,
        "created_at": item.created_at,
        "updated_at": item.updated_at,
    }
    return {**body, "score": item.score} if isinstance(item, SearchItem) else body
