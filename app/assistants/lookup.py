"""Finding assistants: by id, by name, at a version. A version never changes, so it is remembered."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, and_, bindparam, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.assistants.models import SYSTEM_TENANT, Assistant, AssistantVersion
from app.auth import Principal
from app.db.engine import Database
from app.errors import Invalid, NotFound

CACHED_REVISIONS = 1024

RESOLVE = select(
    Assistant.tenant_id,
    Assistant.version,
    Assistant.graph_id,
    Assistant.name,
    Assistant.config,
    Assistant.context,
    Assistant.metadata_,
).where(
    Assistant.id == bindparam("id"),
    Assistant.tenant_id.in_([bindparam("tenant"), SYSTEM_TENANT]),
    Assistant.deleted_at.is_(None),
)
"""Before every run: built once, and without the cost of a mapped object."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """One version of an assistant: what a run needs to know of it."""

    assistant_id: UUID
    version: int
    graph_id: str
    name: str
    config: dict[str, Any]
    context: dict[str, Any]
    metadata: dict[str, Any]

    @property
    def key(self) -> tuple[UUID, int]:
        """Names the version; compiled graphs are cached under it."""
        return self.assistant_id, self.version


class AssistantLookup:
    """Who may see which assistant. `system` names those that come with the server and that this process serves."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.system: dict[str, UUID] = {}
        self._revisions: OrderedDict[tuple[UUID, int], Pinned] = OrderedDict()
        self._newest: OrderedDict[tuple[str, UUID], Pinned] = OrderedDict()

    async def resolve(self, tx: AsyncSession, principal: Principal, ref: str) -> Pinned:
        """The newest version of an assistant, by its UUID or by the name of a graph or example. One statement."""
        assistant_id = self._id_of(ref)
        row = (await tx.execute(RESOLVE, {"id": assistant_id, "tenant": principal.tenant})).first()
        if row is None or (row.tenant_id == SYSTEM_TENANT and assistant_id not in self.system.values()):
            raise NotFound.of("Assistant", ref)
        pinned = Pinned(assistant_id, row.version, row.graph_id, row.name, row.config, row.context, row.metadata_)
        self._newest[principal.tenant, assistant_id] = pinned
        if len(self._newest) > CACHED_REVISIONS:
            self._newest.popitem(last=False)
        return pinned

    def remembered(self, principal: Principal, ref: str) -> Pinned | None:
        """The version that was the newest when the tenant last resolved it. Whoever uses it must check that it still is."""
        return self._newest.get((principal.tenant, self._id_of(ref)))

    async def get(self, tx: AsyncSession, principal: Principal, ref: str | UUID) -> Assistant:
        """An assistant that the principal may read, or NotFound; a name that is not known is Invalid."""
        assistant_id = ref if isinstance(ref, UUID) else self._id_of(ref)
        row = await tx.scalar(select(Assistant).where(Assistant.id == assistant_id, self.visible(principal)))
        if row is None:
            raise NotFound.of("Assistant", ref)
        return row

    async def revision(self, assistant_id: UUID, version: int, tx: AsyncSession | None = None) -> Pinned:
        """A version by its number, also of an assistant deleted since. Without `tx` it takes its own, if it is not cached.

        For work that a principal was allowed to start before: it checks no owner.
        """
        key = (assistant_id, version)
        known = self._revisions.get(key)
        if known is not None:
            self._revisions.move_to_end(key)
            return known
        if tx is not None:
            row = await tx.get(AssistantVersion, key)
        else:
            async with self.database.transaction() as own:
                row = await own.get(AssistantVersion, key)
        if row is None:
            raise NotFound(f"Version {version} of assistant {assistant_id} does not exist.", code="version_not_found")
        pinned = Pinned(assistant_id, version, row.graph_id, row.name, row.config, row.context, row.metadata_)
        self._revisions[key] = pinned
        if len(self._revisions) > CACHED_REVISIONS:
            self._revisions.popitem(last=False)
        return pinned

    def visible(self, principal: Principal) -> ColumnElement[bool]:
        """The principal's own assistants and the system's that this process serves."""
        return and_(
            Assistant.deleted_at.is_(None),
            or_(
                Assistant.tenant_id == principal.tenant,
                and_(Assistant.tenant_id == SYSTEM_TENANT, Assistant.id.in_(self.system.values())),
            ),
        )

    def _id_of(self, ref: str) -> UUID:
        try:
            return UUID(ref)
        except ValueError:
            pass
        known = self.system.get(ref)
        if known is None:
            names = ", ".join(sorted(self.system)) or "none"
            raise Invalid.field("assistant_id", f"'{ref}' is neither a UUID nor the name of a served graph. Served: {names}.")
        return known
