"""A LangGraph store in which each tenant sees only its own namespaces, for agents and for the API alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from langgraph.store.base import (
    BaseStore,
    GetOp,
    Item,
    ListNamespacesOp,
    MatchCondition,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
)

from app.codec import clean, jsonable
from app.store.schemas import MAX_PATH, check_text

ROOT = "tenants"


def tenant_label(tenant: str) -> str:
    """A tenant's name as one label of a namespace: no two tenants share one."""
    return tenant.replace("%", "%25").replace(".", "%2E").replace("*", "%2A")


class TenantStore(BaseStore):
    """Puts a tenant's prefix before every namespace on the way in, and takes it off on the way out.

    What Postgres would refuse is refused or cleaned here: the store below writes in batches, and one bad item would take
    the others with it.
    """

    def __init__(self, store: BaseStore, tenant: str | Callable[[], str]) -> None:
        self._store = store
        self._tenant = tenant

    @property
    def supports_ttl(self) -> bool:  # type: ignore[override]
        """As the store below."""
        return self._store.supports_ttl

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """For sync tools, on their own threads."""
        prefix = self._prefix()
        ops = list(ops)
        return [_outer(prefix, op, r) for op, r in zip(ops, self._store.batch([_inner(prefix, o) for o in ops]), strict=True)]

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """Each call is a batch of its own, so that calls cannot fail one another."""
        prefix = self._prefix()
        ops = list(ops)
        results = await self._store.abatch([_inner(prefix, o) for o in ops])
        return [_outer(prefix, op, r) for op, r in zip(ops, results, strict=True)]

    def _prefix(self) -> tuple[str, str]:
        return ROOT, tenant_label(self._tenant if isinstance(self._tenant, str) else self._tenant())


def _inner(prefix: tuple[str, ...], op: Op) -> Op:
    if isinstance(op, PutOp):
        value = None if op.value is None else clean(jsonable(op.value))
        return op._replace(namespace=_named(prefix, op.namespace), key=_name(op.key), value=value)
    if isinstance(op, GetOp):
        return op._replace(namespace=_named(prefix, op.namespace), key=_name(op.key))
    if isinstance(op, SearchOp):
        filter_ = None if op.filter is None else clean(jsonable(op.filter))
        return op._replace(namespace_prefix=_named(prefix, op.namespace_prefix), filter=filter_)
    conditions: list[MatchCondition] = []
    for condition in op.match_conditions or ():
        path = _named((), tuple(condition.path))
        if condition.match_type == "prefix":
            conditions.append(MatchCondition(match_type="prefix", path=(*prefix, *path)))
        else:
            # As many labels behind the tenant's prefix as the suffix has, so that it does not reach into the prefix.
            conditions.append(MatchCondition(match_type="prefix", path=(*prefix, *("*" for _ in path))))
            conditions.append(MatchCondition(match_type="suffix", path=path))
    conditions = conditions or [MatchCondition(match_type="prefix", path=prefix)]
    depth = None if op.max_depth is None else op.max_depth + len(prefix)
    return op._replace(match_conditions=tuple(conditions), max_depth=depth)


def _outer(prefix: tuple[str, ...], op: Op, result: Result) -> Result:
    if isinstance(op, ListNamespacesOp):
        assert isinstance(result, list)
        return [_without(prefix, namespace) for namespace in result]  # type: ignore[arg-type]
    if isinstance(result, list):
        return [_item(prefix, item) for item in result]  # type: ignore[arg-type]
    return _item(prefix, result) if isinstance(result, Item) else result


def _item(prefix: tuple[str, ...], item: Item) -> Item:
    fields: dict[str, Any] = {
        "value": item.value,
        "key": item.key,
        "namespace": _without(prefix, item.namespace),
        "created_at": item.created_at,
        "updated_at": item.updated_at,
    }
    return SearchItem(score=item.score, **fields) if isinstance(item, SearchItem) else Item(**fields)


def _without(prefix: tuple[str, ...], namespace: tuple[str, ...]) -> tuple[str, ...]:
    assert tuple(namespace[: len(prefix)]) == prefix, "an item of another tenant"
    return tuple(namespace[len(prefix) :])


def _named(prefix: tuple[str, ...], namespace: tuple[str, ...]) -> tuple[str, ...]:
    for label in namespace:
        check_text(label)
    if len(".".join(namespace).encode()) > MAX_PATH:
        raise ValueError(f"a namespace must not be longer than {MAX_PATH} bytes")
    return (*prefix, *namespace)


def _name(key: str) -> str:
    if len(check_text(key).encode()) > MAX_PATH:
        raise ValueError(f"a key must not be longer than {MAX_PATH} bytes")
    return key
