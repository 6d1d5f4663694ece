"""What agents remember of their users, in LangGraph's store: three tools and the memories for the prompt.

The owner comes from the server, never from the model. Without embeddings a search matches words, and what matches none is
not found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any
from uuid import uuid4

from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, tool
from langgraph.prebuilt import ToolRuntime
from langgraph.store.base import BaseStore, SearchItem
from pydantic import Field

from app.codec import clean

NAMESPACE = ("memories",)
SEARCHED = 1000
"""How many memories a search looks through, newest first."""

RECALLED = 200
"""The same for the prompt, which is made anew for every call of the model."""

COMMON_WORDS = (
    "a an and any are at be by can could did do does for from had has have he her his how i if in is it its know me my of on "
    "or our she so tell that the their them they this to us was we were what when where which who why will with would you "
    "your about remember"
)
ENDINGS = frozenset(("s", "es", "d", "ed", "ing", "ly", "er", "ers", "n", "en"))
STOPWORDS = frozenset(COMMON_WORDS.split())


@dataclass(frozen=True, slots=True)
class Remembered:
    """One memory."""

    key: str
    text: str
    created_at: datetime


def memory_label(owner: str) -> str:
    """An owner's name as one label of a namespace, where dots and some beginnings are not allowed. No two share one."""
    label = re.sub(
        r"[%.*\x00\ud800-\udfff]", lambda m: "".join(f"%{b:02X}" for b in m[0].encode("utf-8", "surrogatepass")), owner
    )
    if not label:
        return "%"
    return "%6C" + label[1:] if label.startswith("langgraph") else label


def namespace_of(config: RunnableConfig, prefix: Sequence[str] = NAMESPACE) -> tuple[str, ...]:
    """The namespace of the memories of whoever this run is for."""
    owner = config.get("configurable", {}).get("user_id")
    if not owner:
        raise ValueError("This run has no user, so there is nobody to remember things of.")
    return (*prefix, memory_label(str(owner)))


async def recall(store: BaseStore, namespace: tuple[str, ...], query: str, limit: int) -> list[Remembered]:
    """Memories for the prompt: those that share words with the query first, then the newest."""
    items = await _newest(store, namespace, RECALLED)
    scores = {item.key: _score(_words(query), item) for item in items}
    return [_remembered(i) for i in sorted(items, key=lambda i: -scores[i.key])[:limit]]


async def search(store: BaseStore, namespace: tuple[str, ...], query: str, limit: int) -> list[Remembered]:
    """Memories that share a word with the query, best first. A query without words finds the newest."""
    words = _words(query)
    items = await _newest(store, namespace, SEARCHED)
    if not re.search(r"\w", query):
        return [_remembered(i) for i in items[:limit]]
    scored = sorted(((_score(words, item), item) for item in items), key=lambda pair: -pair[0])
    return [_remembered(item) for score, item in scored if score > 0][:limit]


async def _newest(store: BaseStore, namespace: tuple[str, ...], limit: int) -> list[SearchItem]:
    items = await store.asearch(namespace, limit=limit)
    # A search by prefix finds deeper namespaces too, which are not this owner's.
    return sorted((i for i in items if tuple(i.namespace) == namespace), key=lambda i: i.updated_at, reverse=True)


def _words(text: str) -> frozenset[str]:
    words = frozenset(re.findall(r"\w+", text.casefold()))
    return words - STOPWORDS or words


def _score(words: frozenset[str], item: SearchItem) -> int:
    """How many of the words a memory has, in any of their usual endings."""
    has = _words(_text(item.value))
    return sum(word in has or any(_same(word, other) for other in has) for word in words)


def _same(a: str, b: str) -> bool:
    short, long = sorted((a, b), key=len)
    return len(short) > 2 and long.startswith(short) and long[len(short) :] in ENDINGS


def _text(value: Mapping[str, Any]) -> str:
    found = next((value[k] for k in ("memory", "text", "content") if isinstance(value.get(k), str)), None)
    return found if found is not None else json.dumps(value, ensure_ascii=False, default=str)


def _remembered(item: SearchItem) -> Remembered:
    return Remembered(item.key, _text(item.value), item.created_at)


def _store(runtime: ToolRuntime[Any, Any]) -> BaseStore:
    if runtime.store is None:
        raise ValueError("This graph has no store, so nothing can be remembered.")
    return runtime.store


def memory_tools(prefix: Sequence[str] = NAMESPACE) -> list[BaseTool]:
    """The three tools, on the namespace under `prefix`."""
    prefix = tuple(prefix)

    @tool
    async def save_memory(
        memory: Annotated[str, Field(min_length=1, max_length=10_000)], runtime: ToolRuntime[Any, Any]
    ) -> str:
        """Remember a lasting fact about the user, in one self-contained sentence."""
        key = str(uuid4())
        await _store(runtime).aput(namespace_of(runtime.config, prefix), key, {"memory": clean(memory)}, index=False)
        return f"Remembered as {key}."

    @tool
    async def search_memory(
        query: Annotated[str, Field(description="Words to look for.")],
        runtime: ToolRuntime[Any, Any],
        limit: Annotated[int, Field(ge=1, le=100)] = 10,
    ) -> str:
        """Look up what was remembered about the user."""
        found = await search(_store(runtime), namespace_of(runtime.config, prefix), query, limit)
        return "\n".join(f"{m.text} (key {m.key})" for m in found) or "Nothing is remembered about that."

    @tool
    async def delete_memory(key: Annotated[str, Field(min_length=1, max_length=200)], runtime: ToolRuntime[Any, Any]) -> str:
        """Forget one memory, by the key that search_memory shows."""
        store, namespace = _store(runtime), namespace_of(runtime.config, prefix)
        if await store.aget(namespace, clean(key)) is None:
            return f"There is no memory {key}."
        await store.adelete(namespace, clean(key))
        return f"Forgot {key}."

    return [save_memory, search_memory, delete_memory]
