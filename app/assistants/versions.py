"""Versions of an assistant: numbered, complete, never changed."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.assistants.models import Assistant, AssistantVersion
from app.errors import BadRequest

VERSIONED = ("graph_id", "name", "description", "config", "context", "metadata_")
"""What a version keeps, and the assistant's row repeats."""


def mirrored(config: dict[str, Any], context: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """`config.configurable` and `context` are one thing: whichever is set fills the other."""
    configurable = config.get("configurable") or {}
    context = context or {}
    if configurable and context and configurable != context:
        raise BadRequest("config.configurable and context are the same thing: set one of them.", code="config_and_context")
    both = configurable or context
    return ({**config, "configurable": both} if both or "configurable" in config else config), both


def versions_of(row: Assistant) -> Select[AssistantVersion]:
    """The versions since the assistant was created; a re-used id does not bring back those of its predecessor."""
    return select(AssistantVersion).where(
        AssistantVersion.assistant_id == row.id, AssistantVersion.created_at >= row.created_at
    )


async def write_version(tx: AsyncSession, row: Assistant, values: dict[str, Any], *, at: datetime) -> None:
    """Give a locked row its next version. Numbers are never used twice, or a cached graph would be the wrong one."""
    newest = await tx.scalar(
        select(func.coalesce(func.max(AssistantVersion.version), 0)).where(AssistantVersion.assistant_id == row.id)
    )
    for field, value in values.items():
        setattr(row, field, value)
    row.version = (newest or 0) + 1
    row.updated_at = at
    tx.add(AssistantVersion(assistant_id=row.id, version=row.version, created_at=at, **values))
    await tx.flush()
