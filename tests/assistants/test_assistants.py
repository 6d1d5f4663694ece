"""Assistants over HTTP: creation, versions, look-up by name; the ones that come with the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID, uuid4, uuid5

import httpx
import pytest
import pytest_asyncio
from asgi import serving

from app.auth import LOCAL, SCOPES, Principal, create_key
from app.db.engine import Database
from app.errors import Invalid, NotFound
from app.graphs.registry import SystemAssistant
from app.resources import Resources

ASSISTANT = "11111111-1111-4111-8111-111111111111"
OTHER = Principal("other", "somebody", SCOPES)


def agent(reply: str = "Hm.", **more: Any) -> dict[str, Any]:
    return {"configurable": {"model": {"provider": "scripted", "params": {"rules": [], "else": reply}}, **more}}


@pytest_asyncio.fixture
async def served(database: Database) -> AsyncIterator[tuple[httpx.AsyncClient, Resources]]:
    async with serving(database.url) as both:
        yield both


@pytest_asyncio.fixture
async def api(served: tuple[httpx.AsyncClient, Resources]) -> httpx.AsyncClient:
    return served[0]


@pytest_asyncio.fixture
async def resources(served: tuple[httpx.AsyncClient, Resources]) -> Resources:
    return served[1]


async def make(api: httpx.AsyncClient, **body: Any) -> Any:
    made = await api.post("/assistants", json={"graph_id": "react", "config": agent(), **body})
    assert made.status_code == 200, made.text
    return made.json()


async def test_an_assistant_has_the_shape_of_the_wire(api: httpx.AsyncClient) -> None:
    made = await make(api, assistant_id=ASSISTANT, name="My A", metadata={"k": 1}, description="d", unknown=1)
    assert made.pop("created_at") == made.pop("updated_at")
    assert made == {
        "assistant_id": ASSISTANT,
        "graph_id": "react",
        "config": agent(),
        "context": agent()["configurable"],
        "metadata": {"k": 1},
        "name": "My A",
        "description": "d",
        "version": 1,
    }
    assert (await make(api))["name"] == "Untitled"


async def test_config_and_context_mirror_each_other(api: httpx.AsyncClient) -> None:
    by_context = await make(api, config={"tags": ["t"]}, context=agent()["configurable"])
    assert by_context["config"] == {"tags": ["t"], **agent()}
    both = await make(api, context=agent()["configurable"])
    assert both["config"] == agent()
    refused = await api.post("/assistants", json={"graph_id": "react", "config": agent(), "context": {"x": 1}})
    assert (refused.status_code, refused.json()["code"]) == (400, "config_and_context")


async def test_an_existing_id_is_a_conflict_or_the_same_assistant(api: httpx.AsyncClient) -> None:
    first = await make(api, assistant_id=ASSISTANT)
    again = await api.post("/assistants", json={"graph_id": "react", "config": agent(), "assistant_id": ASSISTANT})
    assert (again.status_code, again.json()["code"]) == (409, "assistant_exists")
    assert await make(api, assistant_id=ASSISTANT, if_exists="do_nothing", name="other") == first


async def test_what_could_not_run_is_refused_by_field(api: httpx.AsyncClient) -> None:
    unknown = await api.post("/assistants", json={"graph_id": "nograph"})
    assert unknown.status_code == 404
    assert "react" in unknown.json()["message"]
    for body, path in (
        ({}, "graph_id"),
        ({"graph_id": "react", "assistant_id": "nope"}, "assistant_id"),
        ({"graph_id": "react", "config": agent(tools=["nosuchtool"])}, "config.configurable.tools"),
        ({"graph_id": "react", "config": {"configurable": {"model": 5}}}, "config.configurable.model"),
        ({"graph_id": "react", "config": {"recursion_limit": 0}}, "config.recursion_limit"),
    ):
        refused = await api.post("/assistants", json=body)
        assert refused.status_code == 422, refused.text
        assert refused.json()["errors"][0]["path"].startswith(path)
    made = await make(api)
    refused = await api.patch(f"/assistants/{made['assistant_id']}", json={"config": agent(tools=["nosuchtool"])})
    assert refused.status_code == 422
    assert (await api.get(f"/assistants/{made['assistant_id']}")).json() == made


async def test_each_change_is_a_version_and_all_of_it_can_come_back(api: httpx.AsyncClient) -> None:
    first = await make(api, assistant_id=ASSISTANT, name="one", metadata={"a": 1}, description="d")
    second = (
        await api.patch(f"/assistants/{ASSISTANT}", json={"name": "two", "metadata": {"b": 2}, "config": agent("new")})
    ).json()
    assert (second["version"], second["name"], second["description"]) == (2, "two", "d")
    assert second["metadata"] == {"a": 1, "b": 2}
    assert second["context"] == agent("new")["configurable"]
    assert second["updated_at"] > second["created_at"] == first["created_at"]

    versions = (await api.post(f"/assistants/{ASSISTANT}/versions", json={"limit": 10})).json()
    assert [v["version"] for v in versions] == [2, 1]
    assert "updated_at" not in versions[0]
    assert (await api.post(f"/assistants/{ASSISTANT}/versions", json={"metadata": {"b": 2}})).json() == versions[:1]

    back = (await api.post(f"/assistants/{ASSISTANT}/latest", json={"version": 1})).json()
    assert {**back, "updated_at": None} == {**first, "updated_at": None}
    third = (await api.patch(f"/assistants/{ASSISTANT}", json={"description": None})).json()
    assert (third["version"], third["description"], third["name"]) == (3, None, "one")
    missing = await api.post(f"/assistants/{ASSISTANT}/latest", json={"version": 99})
    assert (missing.status_code, missing.json()["code"]) == (404, "version_not_found")


async def test_changes_at_once_make_versions_one_after_the_other(api: httpx.AsyncClient) -> None:
    await make(api, assistant_id=ASSISTANT)
    names = [f"n{n}" for n in range(8)]
    made = await asyncio.gather(*(api.patch(f"/assistants/{ASSISTANT}", json={"name": name}) for name in names))
    assert sorted(m.json()["version"] for m in made) == list(range(2, 10))


async def test_a_deleted_assistant_is_gone_but_old_runs_keep_its_version(api: httpx.AsyncClient, resources: Resources) -> None:
    await make(api, assistant_id=ASSISTANT, config=agent("old"))
    assert (await api.delete(f"/assistants/{ASSISTANT}")).status_code == 204
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/schemas"), ("GET", "/graph")):
        assert (await api.request(method, f"/assistants/{ASSISTANT}{path}")).status_code == 404
    assert ASSISTANT not in [a["assistant_id"] for a in (await api.post("/assistants/search", json={})).json()]
    old = await resources.assistants.revision(UUID(ASSISTANT), 1)
    assert old.config == agent("old")

    new = await make(api, assistant_id=ASSISTANT, config=agent("new"))
    assert new["version"] == 2
    assert [v["version"] for v in (await api.post(f"/assistants/{ASSISTANT}/versions")).json()] == [2]
    assert (await api.post(f"/assistants/{ASSISTANT}/latest", json={"version": 1})).status_code == 404


async def test_search_filters_sorts_selects_and_counts_truly(api: httpx.AsyncClient) -> None:
    made = [await make(api, name=f"Zug_{n}", metadata={"group": "g"}) for n in range(4)]
    await make(api, name="Zug%")
    page = await api.post("/assistants/search", json={"metadata": {"group": "g"}, "limit": 3})
    assert [a["name"] for a in page.json()] == ["Zug_3", "Zug_2", "Zug_1"]
    assert (page.headers["x-pagination-total"], page.headers["x-pagination-next"]) == ("4", "3")
    named = await api.post(
        "/assistants/search", json={"name": "zug_", "sort_by": "name", "sort_order": "asc", "select": ["name"]}
    )
    assert named.json() == [{"name": a["name"]} for a in made]
    assert "x-pagination-next" not in named.headers
    assert (await api.post("/assistants/count", json={"name": "zUg"})).json() == 5
    for path in ("search", "count"):
        assert (await api.post(f"/assistants/{path}", json={"graph_id": "nograph"})).status_code == 404
    for body in ({"sort_by": "x"}, {"limit": 1001}, {"select": ["x"]}):
        assert (await api.post("/assistants/search", json=body)).status_code == 422


async def test_examples_are_addressed_by_name_and_belong_to_nobody(api: httpx.AsyncClient) -> None:
    example = (await api.get("/assistants/refund_desk")).json()
    assert example["metadata"] == {"created_by": "system"}
    assert (await api.get(f"/assistants/{example['assistant_id']}")).json() == example
    for method, path, body in (
        ("PATCH", "", {"name": "mine"}),
        ("DELETE", "", None),
        ("POST", "/latest", {"version": 1}),
    ):
        refused = await api.request(method, f"/assistants/refund_desk{path}", json=body)
        assert (refused.status_code, refused.json()["code"]) == (403, "system_assistant")
    unknown = await api.get("/assistants/nosuchthing")
    assert unknown.status_code == 422
    assert "refund_desk" in unknown.json()["message"]


async def test_schemas_and_drawing_come_from_the_graph(api: httpx.AsyncClient) -> None:
    schemas = (await api.get("/assistants/refund_desk/schemas")).json()
    assert schemas["graph_id"] == "react"
    assert "messages" in schemas["input_schema"]["properties"]
    assert schemas.keys() == {"graph_id", "input_schema", "output_schema", "state_schema", "config_schema", "context_schema"}
    for xray in ("true", "false", "2"):
        drawing = (await api.get("/assistants/refund_desk/graph", params={"xray": xray})).json()
        assert {"agent", "tools", "review"} <= {node["id"] for node in drawing["nodes"]}
        assert all({"source", "target"} <= edge.keys() for edge in drawing["edges"])
    for xray in ("-1", "0", "x"):
        assert (await api.get("/assistants/refund_desk/graph", params={"xray": xray})).status_code == 422
    assert (await api.get("/assistants/refund_desk/subgraphs")).json() == {}


async def test_assistants_belong_to_their_tenant(api: httpx.AsyncClient, resources: Resources) -> None:
    await make(api, assistant_id=ASSISTANT)
    async with resources.database.transaction() as tx:
        _, key = await create_key(tx, tenant="other", subject="they")
    resources.authenticator.forget()
    headers = {"X-Api-Key": key}
    for method, path, body in (
        ("GET", "", None),
        ("PATCH", "", {"name": "x"}),
        ("DELETE", "", None),
        ("POST", "/versions", {}),
        ("POST", "/latest", {"version": 1}),
        ("GET", "/schemas", None),
        ("GET", "/graph", None),
    ):
        answer = await api.request(method, f"/assistants/{ASSISTANT}{path}", json=body, headers=headers)
        assert answer.status_code == 404, (method, path)
    taken = await api.post(
        "/assistants", json={"graph_id": "react", "config": agent(), "assistant_id": ASSISTANT}, headers=headers
    )
    assert taken.status_code == 409
    found = (await api.post("/assistants/search", json={"limit": 100}, headers=headers)).json()
    assert {a["metadata"].get("created_by") for a in found} == {"system"}


async def test_resolve_sees_changes_of_other_processes(resources: Resources, api: httpx.AsyncClient) -> None:
    await make(api, assistant_id=ASSISTANT)
    assistants, database = resources.assistants, resources.database
    async with database.transaction() as tx:
        assert (await assistants.resolve(tx, LOCAL, ASSISTANT)).version == 1
        for ref, error in (("nosuchthing", Invalid), (str(uuid4()), NotFound)):
            with pytest.raises(error):
                await assistants.resolve(tx, LOCAL, ref)
        with pytest.raises(NotFound):
            await assistants.resolve(tx, OTHER, ASSISTANT)
    await api.patch(f"/assistants/{ASSISTANT}", json={"name": "two"})
    async with database.transaction() as tx:
        newest = await assistants.resolve(tx, LOCAL, ASSISTANT)
        assert (newest.version, newest.name) == (2, "two")
        assert (await assistants.revision(UUID(ASSISTANT), 1, tx)).name == "Untitled"
        with pytest.raises(NotFound):
            await assistants.revision(UUID(ASSISTANT), 3, tx)


async def test_system_assistants_follow_what_is_served(resources: Resources) -> None:
    assistants, database = resources.assistants, resources.database

    def served(name: str, reply: str) -> SystemAssistant:
        return SystemAssistant(
            id=uuid5(UUID(int=0), name), graph_id="react", name=name, description="d", config=agent(reply), context={}
        )

    async def sync(*wanted: SystemAssistant) -> None:
        async with database.transaction() as tx:
            await assistants.sync_system(tx, wanted)

    async def version(name: str) -> int:
        async with database.transaction() as tx:
            return (await assistants.resolve(tx, LOCAL, name)).version

    await asyncio.gather(*(sync(served("one", "a"), served("two", "a")) for _ in range(5)))
    assert (await version("one"), await version("two")) == (1, 1)
    await sync(served("one", "b"), served("two", "a"))
    assert (await version("one"), await version("two")) == (2, 1)
    await sync(served("two", "a"))
    with pytest.raises(Invalid):
        await version("one")
    with pytest.raises(NotFound):
        await version(str(uuid5(UUID(int=0), "one")))
    assert (await assistants.revision(uuid5(UUID(int=0), "one"), 1)).config == agent("a")
