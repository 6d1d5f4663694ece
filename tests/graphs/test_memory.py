"""Memories: tools, search, and the block in the prompt."""

from __future__ import annotations

from typing import Any

import pytest
from graphs.harness import Agent, Agents, results
from langgraph.store.postgres.aio import AsyncPostgresStore

from app.db.engine import Database
from app.graphs.memory import memory_label, recall, search

REMEMBER: dict[str, Any] = {
    "provider": "scripted",
    "params": {
        "rules": [
            {"if": "remember (?P<fact>.+)", "tool_calls": [{"name": "save_memory", "args": {"memory": "{fact}"}}]},
            {"if": "find (?P<words>.+)", "tool_calls": [{"name": "search_memory", "args": {"query": "{words}"}}]},
            {"if": "forget (?P<key>.+)", "tool_calls": [{"name": "delete_memory", "args": {"key": "{key}"}}]},
            {"after_tool": "search_memory", "reply": "{result}"},
            {"if": "system", "reply": "{system}"},
        ],
        "else": "ok",
    },
}
NS = ("memories", "alice")


@pytest.fixture
async def store(database: Database) -> AsyncPostgresStore:
    return AsyncPostgresStore(database.pool)  # type: ignore[arg-type]


def remembering(agents: Agents, **more: Any) -> Agent:
    return agents.agent(**{"model": REMEMBER, "memory": {}, **more})


async def test_memories_outlive_the_thread(agents: Agents, store: AsyncPostgresStore) -> None:
    await remembering(agents).say("remember I like tea")
    (item,) = await store.asearch(NS)
    assert item.value == {"memory": "I like tea"}
    other = remembering(agents)
    assert (await other.say("find tea"))[-1].text == f"I like tea (key {item.key})"
    assert "- I like tea" in (await other.say("system"))[-1].text
    await other.say(f"forget {item.key}")
    assert await store.asearch(NS) == []
    assert results(await other.say("forget me-not"))[-1].text == "There is no memory me-not."
    assert (await other.say("find tea"))[-1].text == "Nothing is remembered about that."


async def test_each_user_has_their_own(agents: Agents) -> None:
    agent = remembering(agents)
    await agent.say("remember I like tea")
    other = remembering(agents)
    config = other.config(user_id="bob")
    result = await other.graph.ainvoke({"messages": [{"type": "human", "content": "find tea"}]}, config)  # type: ignore[arg-type]
    assert result["messages"][-1].text == "Nothing is remembered about that."


async def test_many_saves_at_once_are_all_kept(agents: Agents, store: AsyncPostgresStore) -> None:
    calls = [{"name": "save_memory", "args": {"memory": f"Fact {i}"}} for i in range(8)]
    model = {"provider": "scripted", "params": {"rules": [{"if": "go", "tool_calls": calls}]}}
    await remembering(agents, model=model).say()
    assert len(await store.asearch(NS, limit=100)) == 8


async def test_a_search_finds_words_and_nothing_else(store: AsyncPostgresStore) -> None:
    for key, text in {"1": "My favourite colour is blue", "2": "Has a dog named Rex", "3": "Lives in Lisbon"}.items():
        await store.aput(NS, key, {"memory": text}, index=False)
    await store.aput((*NS, "deeper"), "4", {"memory": "dog dog dog"}, index=False)
    await store.aput(("memories", "alice2"), "5", {"memory": "dog"}, index=False)

    async def found(query: str, limit: int = 10) -> list[str]:
        return [m.key for m in await search(store, NS, query, limit)]

    assert await found("What is the name of my dog?") == ["2"]
    assert await found("colours") == ["1"]
    assert await found("DOG colour") == ["2", "1"] or await found("DOG colour") == ["1", "2"]
    assert await found("what is my") == []
    assert await found("cat") == []
    assert await found("dogs") == ["2"], "in any of their usual endings"
    assert await found("named dogma") == ["2"]
    assert await found("dogma") == [], "but not as the beginning of another word"
    assert await found("") == ["3", "2", "1"]
    assert await found("favourite blue dog", limit=1) == ["1"]


async def test_the_block_shows_what_matters_first_then_the_newest(agents: Agents, store: AsyncPostgresStore) -> None:
    for i in range(5):
        await store.aput(NS, str(i), {"memory": f"Fact {i} about {'tea' if i == 0 else 'life'}"}, index=False)
    assert [m.key for m in await recall(store, NS, "tea?", 2)] == ["0", "4"]
    text = (await remembering(agents, prompt="Be kind.", memory={"limit": 2}).say("system"))[-1].text
    assert (
        text
        == "Be kind.\n\nWhat you remember of the user from earlier conversations:\n- Fact 4 about life\n- Fact 3 about life"
    )
    assert (await remembering(agents, memory={"block": False}).say("system"))[-1].text == ""
    template = {"type": "template", "text": "{% for m in memories %}[{{ m.text }}]{% endfor %}"}
    assert (await remembering(agents, prompt=template, memory={"limit": 1}).say("system"))[-1].text == "[Fact 4 about life]"


async def test_an_own_namespace(agents: Agents, store: AsyncPostgresStore) -> None:
    await remembering(agents, memory={"namespace": ["pets"]}).say("remember Rex")
    assert [i.namespace for i in await store.asearch(("pets",))] == [("pets", "alice")]


async def test_nul_bytes_do_not_reach_postgres(agents: Agents, store: AsyncPostgresStore) -> None:
    await remembering(agents).say("remember a\0b\ud800c")
    (item,) = await store.asearch(NS)
    assert "\0" not in item.value["memory"]


@pytest.mark.parametrize(
    "owner", ["a.b@c.d", "langgraph", "langgraph.x", "", "%", "%2E", ".", "*", "ü\0\ud800", "Ada Lovelace"]
)
async def test_any_owner_has_a_label_of_their_own(owner: str, store: AsyncPostgresStore) -> None:
    label = memory_label(owner)
    await store.aput(("memories", label), "1", {"memory": "x"}, index=False)
    assert len(await store.asearch(("memories", label))) == 1
    others = ["a%2Eb@c.d", "%6Canggraph", "%25", "%252E", "%2E%", "x"]
    assert label not in {memory_label(o) for o in others if o != owner}
