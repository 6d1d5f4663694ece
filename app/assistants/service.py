"""Assistants: searches, creation, versions, deletion. A deleted assistant's versions stay, for what was started with them.

Knows no HTTP. What a configuration means is known by `app.graphs` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from langgraph.pregel import Pregel
from sqlalchemy import Select, func, insert, select, text
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncSession
from uuid_utils.compat import uuid7

from app.assistants.lookup import AssistantLookup
from app.assistants.lookup import Pinned as Pinned
from app.assistants.models import SYSTEM_TENANT, Assistant, AssistantVersion
from app.assistants.schemas import AssistantCreate, AssistantFilter, AssistantPatch, AssistantSearch, VersionSearch
from app.assistants.versions import VERSIONED, mirrored, versions_of, write_version
from app.auth import Principal
from app.db.engine import Database
from app.errors import Conflict, Forbidden, NotFound
from app.graphs.registry import Graphs, SystemAssistant


class AssistantService(AssistantLookup):
    """Reads and writes assistants. Each method works in the caller's transaction unless it says otherwise."""

    def __init__(self, database: Database, graphs: Graphs) -> None:
        super().__init__(database)
        self.graphs = graphs

    async def search(self, tx: AsyncSession, principal: Principal, query: AssistantSearch) -> tuple[list[Assistant], int]:
        """A page of assistants, newest first by default, and how many there are in all."""
        total = await self.count(tx, principal, query)
        column = {
            "assistant_id": Assistant.id,
            "created_at": Assistant.created_at,
            "updated_at": Assistant.updated_at,
            "name": Assistant.name,
            "graph_id": Assistant.graph_id,
        }[query.sort_by or "created_at"]
        order = (column.asc(), Assistant.id.asc()) if query.sort_order == "asc" else (column.desc(), Assistant.id.desc())
        page = self._matching(select(Assistant), principal, query).order_by(*order).limit(query.limit).offset(query.offset)
        return list((await tx.scalars(page)).all()), total

    async def count(self, tx: AsyncSession, principal: Principal, query: AssistantFilter) -> int:
        """How many assistants match."""
        if query.graph_id is not None:
            self._known_graph(query.graph_id)
        return await tx.scalar(self._matching(select(func.count()).select_from(Assistant), principal, query)) or 0

    async def versions(
        self, tx: AsyncSession, principal: Principal, ref: str | UUID, query: VersionSearch
    ) -> list[AssistantVersion]:
        """Versions of an assistant, newest first."""
        row = await self.get(tx, principal, ref)
        page = versions_of(row).order_by(AssistantVersion.version.desc()).limit(query.limit).offset(query.offset)
        if query.metadata:
            page = page.where(AssistantVersion.metadata_.contains(query.metadata))
        return list((await tx.scalars(page)).all())

    # Changes ------------------------------------------------------------------------------------------------------

    async def create(self, tx: AsyncSession, principal: Principal, body: AssistantCreate) -> Assistant:
        """Create an assistant; refuse a configuration that could not run."""
        config, context = mirrored(body.config.stored(), body.context)
        self.graphs.validate(body.graph_id, config, context)
        values = {
            "graph_id": body.graph_id,
            "name": body.name,
            "description": body.description,
            "config": config,
            "context": context,
            "metadata_": body.metadata,
        }
        assistant_id = body.assistant_id or uuid7()
        row: Assistant | None = await tx.scalar(
            pg_insert(Assistant)
            .values(id=assistant_id, tenant_id=principal.tenant, version=1, **values)
            .on_conflict_do_nothing(index_elements=[Assistant.id])
            .returning(Assistant)
        )
        if row is None:
            existing = await tx.scalar(select(Assistant).where(Assistant.id == assistant_id).with_for_update())
            if existing is None or existing.tenant_id != principal.tenant:
                raise _exists(assistant_id)
            if existing.deleted_at is None:
                if body.if_exists == "do_nothing":
                    return existing
                raise _exists(assistant_id)
            row = existing
            row.created_at = datetime.now(UTC)
            row.deleted_at = None
            await write_version(tx, row, values, at=row.created_at)
            return row
        await tx.execute(insert(AssistantVersion).values(assistant_id=row.id, version=1, created_at=row.created_at, **values))
        return row

    async def update(self, tx: AsyncSession, principal: Principal, ref: str | UUID, body: AssistantPatch) -> Assistant:
        """Make a new version, the current one from now on."""
        row = await self._writable(tx, principal, ref)
        config, context = row.config, row.context
        if body.config is not None:
            config, context = mirrored(body.config.stored(), body.context)
        elif body.context is not None:
            config, context = mirrored({k: v for k, v in row.config.items() if k != "configurable"}, body.context)
        graph_id = body.graph_id or row.graph_id
        if body.graph_id is not None or body.config is not None or body.context is not None:
            self.graphs.validate(graph_id, config, context)
        values = {
            "graph_id": graph_id,
            "name": row.name if body.name is None else body.name,
            "description": body.description if "description" in body.model_fields_set else row.description,
            "config": config,
            "context": context,
            "metadata_": {**row.metadata_, **(body.metadata or {})},
        }
        await write_version(tx, row, values, at=datetime.now(UTC))
        return row

    async def set_latest(self, tx: AsyncSession, principal: Principal, ref: str | UUID, version: int) -> Assistant:
        """Make an existing version the current one, with everything that belongs to it."""
        row = await self._writable(tx, principal, ref)
        chosen = await tx.scalar(versions_of(row).where(AssistantVersion.version == version))
        if chosen is None:
            raise NotFound(f"Version {version} of assistant {row.id} does not exist.", code="version_not_found")
        self.graphs.validate(chosen.graph_id, chosen.config, chosen.context)
        for field in VERSIONED:
            setattr(row, field, getattr(chosen, field))
        row.version = version
        row.updated_at = datetime.now(UTC)
        await tx.flush()
        return row

    async def delete(self, tx: AsyncSession, principal: Principal, ref: str | UUID) -> None:
        """Delete an assistant. Threads, runs and open questions that use one of its versions go on with it."""
        row = await self._writable(tx, principal, ref)
        row.deleted_at = datetime.now(UTC)
        await tx.flush()

    async def sync_system(self, tx: AsyncSession, assistants: Sequence[SystemAssistant]) -> None:
        """Bring the system assistants to what this process serves. Several processes may do this at once.

        A version is made only when something changed. Those that are gone keep their rows, for old runs, but are offered
        by this process no more.
        """
        await tx.execute(text("SELECT pg_advisory_xact_lock(hashtext('keyturn-system-assistants'))"))
        ids = [a.id for a in assistants]
        rows = {row.id: row for row in await tx.scalars(select(Assistant).where(Assistant.id.in_(ids)).with_for_update())}
        for wanted in assistants:
            config, context = mirrored(wanted.config, wanted.context)
            values = {
                "graph_id": wanted.graph_id,
                "name": wanted.name,
                "description": wanted.description,
                "config": config,
                "context": context,
                "metadata_": {"created_by": "system"},
            }
            row = rows.get(wanted.id)
            if row is None:
                row = Assistant(id=wanted.id, tenant_id=SYSTEM_TENANT, version=0, **values)
                tx.add(row)
                await tx.flush()
            elif row.tenant_id != SYSTEM_TENANT:
                raise RuntimeError(f"The id {row.id} of the system assistant {wanted.name} is taken by tenant {row.tenant_id}.")
            elif row.deleted_at is None and all(getattr(row, field) == values[field] for field in VERSIONED):
                continue
            row.deleted_at = None
            await write_version(tx, row, values, at=datetime.now(UTC))
        self.system = {a.name: a.id for a in assistants}

    # What the graph says ------------------------------------------------------------------------------------------

    def schemas(self, pinned: Pinned) -> dict[str, Any]:
        """JSON Schemas of the assistant's graph."""
        return self.graphs.schemas(pinned.graph_id, pinned.key, pinned.config)

    def drawing(self, pinned: Pinned, *, xray: bool | int) -> dict[str, Any]:
        """Nodes and edges of the assistant's graph."""
        return self.graphs.drawing(pinned.graph_id, pinned.key, pinned.config, xray=xray)

    def subgraphs(self, pinned: Pinned, *, namespace: str | None, recurse: bool) -> dict[str, Any]:
        """JSON Schemas of the graph's subgraphs by namespace."""
        graph = self.graphs.graph(pinned.graph_id, pinned.key, pinned.config)
        found = graph.get_subgraphs(namespace=namespace, recurse=recurse)
        return {
            name: {
                "input_schema": sub.get_input_jsonschema(),
                "output_schema": sub.get_output_jsonschema(),
                "state_schema": sub.get_output_jsonschema(),
                "config_schema": None,
                "context_schema": sub.get_context_jsonschema(),
            }
            for name, sub in found
            if isinstance(sub, Pregel)
        }

    # ---------------------------------------------------------------------------------------------------------------

    def _matching(self, statement: Select[Any], principal: Principal, query: AssistantFilter) -> Select[Any]:
        statement = statement.where(self.visible(principal))
        if query.graph_id is not None:
            statement = statement.where(Assistant.graph_id == query.graph_id)
        if query.metadata:
            statement = statement.where(Assistant.metadata_.contains(query.metadata))
        if query.name:
            statement = statement.where(Assistant.name.icontains(query.name, autoescape=True))
        return statement

    def _known_graph(self, graph_id: str) -> None:
        if graph_id not in self.graphs.graph_ids:
            known = ", ".join(self.graphs.graph_ids)
            raise NotFound(f"Graph '{graph_id}' does not exist. Known graphs: {known}.", code="graph_not_found")

    async def _writable(self, tx: AsyncSession, principal: Principal, ref: str | UUID) -> Assistant:
        """The row, locked. System assistants belong to nobody."""
        row = await self.get(tx, principal, ref)
        if row.tenant_id == SYSTEM_TENANT:
            raise Forbidden(
                f"Assistant {row.name} comes with the server and cannot be changed. Create your own from its configuration.",
                code="system_assistant",
            )
        await tx.refresh(row, with_for_update=True)
        if row.deleted_at is not None:
            raise NotFound.of("Assistant", ref)
        return row


def _exists(assistant_id: UUID) -> Conflict:
    return Conflict(f"Assistant {assistant_id} already exists.", code="assistant_exists")
