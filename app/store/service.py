"""Long-term memory over the API: whose namespaces a caller may see, and the store that agents write to.

Knows no HTTP. The tenant's prefix is put on by `TenantStore`, here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langgraph.config import get_config
from langgraph.store.base import BaseStore, Item

from app.auth import Principal
from app.errors import Forbidden, Invalid
from app.graphs.memory import memory_label
from app.store.schemas import ItemSearch, NamespaceSearch
from app.store.tenant import TenantStore

MEMORIES = "memories"
OPERATORS = frozenset({"$eq", "$ne", "$gt", "$gte", "$lt", "$lte"})
TENANT_KEY = "__keyturn_tenant"


class StoreService:
    """The store of one process, seen through a tenant."""

    def __init__(self, store: BaseStore) -> None:
        self._store = store

    def view(self, tenant: Principal | str) -> TenantStore:
        """The store of one tenant."""
        return TenantStore(self._store, tenant if isinstance(tenant, str) else tenant.tenant)

    def for_graphs(self) -> TenantStore:
        """The store that graphs are compiled with: it belongs to the tenant of the run that uses it."""
        return TenantStore(self._store, _tenant_of_run)

    async def put(self, principal: Principal, namespace: Sequence[str], key: str, value: dict[str, Any]) -> None:
        """Store an item, in place of one of the same name."""
        await self.view(principal).aput(self._own(principal, namespace), key, value)

    async def get(self, principal: Principal, namespace: Sequence[str], key: str) -> Item | None:
        """An item, if there is one."""
        return await self.view(principal).aget(self._own(principal, namespace), key)

    async def delete(self, principal: Principal, namespace: Sequence[str], key: str) -> None:
        """Delete an item, if there is one."""
        await self.view(principal).adelete(self._own(principal, namespace), key)

    async def search(self, principal: Principal, query: ItemSearch) -> Sequence[Item]:
        """Items under a prefix, last changed first. Who may see only their own memories finds only those."""
        _check_filter(query.filter)
        prefix = self._narrowed(principal, query.namespace_prefix)
        return await self.view(principal).asearch(
            prefix, query=query.query, filter=query.filter, limit=query.limit, offset=query.offset
        )

    async def namespaces(self, principal: Principal, query: NamespaceSearch) -> list[tuple[str, ...]]:
        """Namespaces that hold something."""
        prefix = self._narrowed(principal, query.prefix or [])
        return await self.view(principal).alist_namespaces(
            prefix=prefix or None,
            suffix=tuple(query.suffix) if query.suffix else None,
            max_depth=query.max_depth,
            limit=query.limit,
            offset=query.offset,
        )

    def _own(self, principal: Principal, namespace: Sequence[str]) -> tuple[str, ...]:
        """A full namespace that the principal may use."""
        if namespace[0] == "langgraph":
            raise Invalid.field("namespace", "the first label cannot be langgraph")
        own = (MEMORIES, memory_label(principal.subject))
        if not principal.can("users:any") and tuple(namespace[:2]) != own:
            raise _foreign(own)
        return tuple(namespace)

    def _narrowed(self, principal: Principal, prefix: Sequence[str]) -> tuple[str, ...]:
        """A prefix, made as narrow as the principal's rights are."""
        own = (MEMORIES, memory_label(principal.subject))
        if principal.can("users:any") or tuple(prefix[:2]) == own:
            return tuple(prefix)
        if tuple(prefix) == own[: len(prefix)]:
            return own
        raise _foreign(own)


def _tenant_of_run() -> str:
    tenant = get_config().get("configurable", {}).get(TENANT_KEY)
    if not isinstance(tenant, str):
        raise RuntimeError("the store can only be used inside a run")
    return tenant


def _foreign(own: tuple[str, str]) -> Forbidden:
    return Forbidden(
        f"Without the scope users:any only the namespace {list(own)} can be used.", code="foreign_namespace", scope="users:any"
    )


def _check_filter(wanted: dict[str, Any] | None) -> None:
    for field, value in (wanted or {}).items():
        if isinstance(value, dict) and (unknown := [k for k in value if k not in OPERATORS]):
            known = ", ".join(sorted(OPERATORS))
            raise Invalid.field(f"filter.{field}", f"unknown operator {unknown[0]}; use one of {known}")
