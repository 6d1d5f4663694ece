"""The store: tenants do not see one another, users see their own, bad items harm nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from langgraph.graph import END, START, StateGraph
from langgraph.store.base import BaseStore
from langgraph.store.postgres.aio import AsyncPostgresStore

from app.auth import LOCAL, SCOPES, Principal
from app.db.engine import Database
from app.errors import Forbidden
from app.store.schemas import ItemSearch, NamespaceSearch
from app.store.service import StoreService
from app.store.tenant import tenant_label

ALICE = Principal("default", "alice", SCOPES - {"users:any"})
OTHER = Principal("other", "local", SCOPES)


@pytest_asyncio.fixture
async def store(database: Database) -> AsyncIterator[StoreService]:
    async with AsyncPostgresStore(database.pool) as inner:  # type: ignore[arg-type]
        yield StoreService(inner)


def names(items: Any) -> list[tuple[tuple[str, ...], str]]:
    return sorted((item.namespace, item.key) for item in items)


async def test_tenants_do_not_see_one_another(store: StoreService) -> None:
    for tenant in ("acme", "acme2", "acme.x", "ac%", "*"):
        await store.view(tenant).aput(("memories", "u"), "k", {"of": tenant})
    for tenant in ("acme", "acme2", "acme.x", "ac%", "*"):
        view = store.view(tenant)
        assert [i.value for i in await view.asearch(())] == [{"of": tenant}]
        assert names(await view.asearch(("memories",))) == [(("memories", "u"), "k")]
        assert await view.alist_namespaces() == [("memories", "u")]
        assert await view.alist_namespaces(max_depth=1) == [("memories",)]
    assert await store.view("ac_e").asearch(()) == []
    assert len({tenant_label(t) for t in ("a.b", "a%2Eb", "a%b", "a*b", "ab")}) == 5


async def test_prefixes_are_whole_labels(store: StoreService) -> None:
    view = store.view(LOCAL)
    for user in ("u", "u2", "u_"):
        await view.aput(("memories", user), "k", {})
    assert names(await view.asearch(("memories", "u"))) == [(("memories", "u"), "k")]
    assert await view.alist_namespaces(prefix=("memories", "u_")) == [("memories", "u_")]
    assert await view.alist_namespaces(suffix=("u2",)) == [("memories", "u2")]
    assert await view.alist_namespaces(suffix=("default", "memories", "u2")) == []
    assert await view.alist_namespaces(prefix=("*", "u2")) == [("memories", "u2")]


async def test_items_come_and_go(store: StoreService) -> None:
    await store.put(LOCAL, ["a", "b"], "k", {"n": 1})
    item = await store.get(LOCAL, ["a", "b"], "k")
    assert item is not None
    assert (item.namespace, item.key, item.value) == (("a", "b"), "k", {"n": 1})
    assert await store.get(OTHER, ["a", "b"], "k") is None
    await store.delete(LOCAL, ["a", "b"], "k")
    await store.delete(LOCAL, ["a", "b"], "k")
    assert await store.get(LOCAL, ["a", "b"], "k") is None


async def test_a_user_has_only_the_own_memories(store: StoreService) -> None:
    for user in ("alice", "bob"):
        await store.put(LOCAL, ["memories", user], "k", {"of": user})
    await store.put(LOCAL, ["notes"], "k", {})

    for prefix in ([], ["memories"], ["memories", "alice"]):
        found = await store.search(ALICE, ItemSearch(namespace_prefix=prefix))
        assert [i.value for i in found] == [{"of": "alice"}]
        assert await store.namespaces(ALICE, NamespaceSearch(prefix=prefix)) == [("memories", "alice")]
    await store.put(ALICE, ["memories", "alice", "deep"], "k", {})
    for namespace in (["memories", "bob"], ["memories"], ["notes"]):
        with pytest.raises(Forbidden):
            await store.get(ALICE, namespace, "k")
        with pytest.raises(Forbidden):
            await store.put(ALICE, namespace, "k", {})
        with pytest.raises(Forbidden):
            await store.delete(ALICE, namespace, "k")
    for prefix in (["memories", "bob"], ["notes"]):
        with pytest.raises(Forbidden):
            await store.search(ALICE, ItemSearch(namespace_prefix=prefix))


async def test_whatever_an_agent_stores_is_made_fit_for_postgres(store: StoreService) -> None:
    view = store.view(LOCAL)
    value = {"nul": "a\x00b", "lone": "a\ud800b", "nan": float("nan"), "big": 2**70, "k\x00ey": [1, {"x\x00": "\x00"}]}
    await view.aput(("m",), "k", value)
    item = await view.aget(("m",), "k")
    assert item is not None
    assert (item.value["nul"], item.value["lone"].replace("?", "")) == ("ab", "ab")
    assert item.value["nan"] is None
    assert item.value["key"] == [1, {"x": ""}]


async def test_one_bad_write_does_not_take_others_with_it(store: StoreService) -> None:
    view = store.view(LOCAL)
    writes = [view.aput(("m",), f"k{n}", {"n": n}) for n in range(10)]
    bad = [
        view.aput(("m",), "k\x00", {}),
        view.aput(("m\x00",), "k", {}),
        view.aput(("m",), "k" * 5000, {}),
        view.aput(("m" * 5000,), "k", {}),
    ]
    results = await asyncio.gather(*writes, *bad, return_exceptions=True)
    assert results[:10] == [None] * 10
    assert all(isinstance(r, ValueError) for r in results[10:])
    assert len(await view.asearch(("m",), limit=100)) == 10


async def test_a_graph_uses_the_store_of_its_run(store: StoreService) -> None:
    async def remember(state: dict[str, Any], *, store: BaseStore) -> dict[str, Any]:
        await store.aput(("memories",), "k", {"said": state["said"]})
        return {}

    def look(state: dict[str, Any], *, store: BaseStore) -> dict[str, Any]:
        return {"found": [i.value for i in store.search(("memories",))]}

    builder = StateGraph(dict).add_node("remember", remember).add_node("look", look)
    builder.add_edge(START, "remember").add_edge("remember", "look").add_edge("look", END)
    graph = builder.compile(store=store.for_graphs())
    for tenant in ("a", "b"):
        done = await graph.ainvoke({"said": tenant}, {"configurable": {"__keyturn_tenant": tenant}})
        assert done == {"found": [{"said": tenant}]}
        assert [i.value for i in await store.view(tenant).asearch(())] == [{"said": tenant}]
    with pytest.raises(RuntimeError):
        await store.for_graphs().aput(("m",), "k", {})
