"""Which messages a thread has already, so that an input cannot take their place by bringing their ids."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any
from uuid import UUID

from langgraph.types import StateSnapshot
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from app.codec import jsonable
from app.errors import Invalid
from app.threads.messages import MESSAGES

STORED = text(
    """
    SELECT m FROM threads,
        jsonb_array_elements(CASE jsonb_typeof("values"->'messages') WHEN 'array' THEN "values"->'messages'
                             ELSE '[]'::jsonb END) AS m
    WHERE id = :id AND m->>'id' = ANY(:ids)
    """
)


async def stored_messages(tx: AsyncSession, thread_id: UUID, ids: Collection[str]) -> list[dict[str, Any]]:
    """Messages of the thread's newest values with one of the ids, without loading the others."""
    return list((await tx.scalars(STORED, {"id": thread_id, "ids": list(ids)})).all())


def messages_in(snapshot: StateSnapshot) -> list[dict[str, Any]]:
    """The messages of a state, as JSON."""
    values = snapshot.values if isinstance(snapshot.values, dict) else {}
    messages = jsonable(values.get(MESSAGES))
    return [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []


def refuse_others(brought: Mapping[str, dict[str, Any]], there: Iterable[dict[str, Any]], path: str) -> None:
    """Refuse a message with the id of another one. The same message again is let through: clients repeat themselves."""
    for known in there:
        new = brought.get(str(known.get("id")))
        if new is not None and (new.get("type"), new.get("content")) != (known.get("type"), known.get("content")):
            raise Invalid.field(
                f"{path}.{MESSAGES}", f"the id {known['id']} is that of another message; leave it out", code="message_exists"
            )
