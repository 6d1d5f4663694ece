"""The official client against a real server process: what works there must work here, unchanged."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest
from langgraph import types
from langgraph.pregel.remote import RemoteGraph
from langgraph_sdk import get_client, get_sync_client
from langgraph_sdk.client import LangGraphClient
from langgraph_sdk.errors import BadRequestError, ConflictError, NotFoundError, UnprocessableEntityError
from langgraph_sdk.schema import Command

WEATHER = {"messages": [{"role": "user", "content": "What is the weather in Lisbon?"}]}
REFUND = {"messages": [{"role": "user", "content": "Please refund 1500 for order 12345."}]}
ACCEPT = {"type": "accept", "args": None}

TWO_CALLS = {
    "model": {
        "provider": "scripted",
        "params": {
            "rules": [
                {
                    "if": "both",
                    "tool_calls": [
                        {"name": "refund", "args": {"order_id": "A1", "amount": 10}},
                        {"name": "refund", "args": {"order_id": "B2", "amount": 20}},
                    ],
                },
                {"after_tool": "refund", "reply": "Both are settled."},
            ]
        },
    },
    "tools": ["refund"],
    "review": {"tools": {"refund": {}}},
}


@pytest.fixture
async def client(live_server: Any) -> AsyncIterator[LangGraphClient]:
    """The asynchronous client."""
    async with get_client(url=live_server.url) as client:
        yield client


async def new_thread(client: LangGraphClient) -> str:
    return (await client.threads.create())["thread_id"]


async def collect(stream: AsyncIterator[Any]) -> list[Any]:
    return [part async for part in stream]


async def test_assistants(client: LangGraphClient) -> None:
    made = await client.assistants.create("react", config={"configurable": TWO_CALLS}, name="two", metadata={"team": "a"})
    assistant_id = made["assistant_id"]
    assert made["version"] == 1
    assert made["config"]["configurable"]["tools"] == ["refund"]
    assert await client.assistants.get(assistant_id) == made
    assert made in await client.assistants.search(metadata={"team": "a"}, limit=100)
    assert await client.assistants.count(graph_id="react") >= 1

    changed = await client.assistants.update(assistant_id, name="three", metadata={"team": "b"})
    assert (changed["version"], changed["name"]) == (2, "three")
    assert [v["version"] for v in await client.assistants.get_versions(assistant_id)] == [2, 1]
    assert (await client.assistants.set_latest(assistant_id, 1))["name"] == "two"

    assert "messages" in str(await client.assistants.get_schemas(assistant_id))
    assert {"agent", "review", "tools"} <= {node["id"] for node in (await client.assistants.get_graph(assistant_id))["nodes"]}

    await client.assistants.delete(assistant_id)
    with pytest.raises(NotFoundError, match="does not exist"):
        await client.assistants.get(assistant_id)


async def test_a_wrong_configuration_is_named(client: LangGraphClient) -> None:
    with pytest.raises(UnprocessableEntityError, match=r"config\.configurable\.tools") as caught:
        await client.assistants.create("react", config={"configurable": {**TWO_CALLS, "tools": ["no_such_tool"]}})
    assert caught.value.body["errors"][0]["path"].startswith("config.configurable.tools")
    with pytest.raises(NotFoundError, match="react"):
        await client.assistants.create("no_such_graph")


async def test_stream_modes(client: LangGraphClient) -> None:
    thread = await new_thread(client)
    created: list[Any] = []
    parts = await collect(
        client.runs.stream(
            thread,
            "weather",
            input=WEATHER,
            stream_mode=["values", "updates", "messages-tuple"],
            on_run_created=created.append,
        )
    )
    assert parts[0].event == "metadata"
    assert parts[0].data["run_id"] == created[0]["run_id"]
    assert created[0]["thread_id"] == thread
    by_event: dict[str, list[Any]] = {}
    for part in parts:
        by_event.setdefault(part.event, []).append(part.data)
    assert [next(iter(data)) for data in by_event["updates"]] == ["agent", "tools", "agent"]
    answer = by_event["values"][-1]["messages"][-1]
    pieces = [chunk for chunk, _ in by_event["messages"] if chunk["id"] == answer["id"]]
    assert len(pieces) > 1
    assert "".join(chunk["content"] for chunk in pieces) == answer["content"]
    assert {metadata["langgraph_node"] for _, metadata in by_event["messages"]} == {"agent", "tools"}
    assert (await client.runs.get(thread, created[0]["run_id"]))["status"] == "success"


async def test_custom_events_of_a_graph_from_langgraph_json(client: LangGraphClient) -> None:
    thread = await new_thread(client)
    parts = await collect(client.runs.stream(thread, "poem", input={"topic": "rain"}, stream_mode=["custom", "values"]))
    assert any("rain" in part.data["line"] for part in parts if part.event == "custom")
    assert parts[-1].event != "error"
    [question] = (await client.threads.get_state(thread))["interrupts"]
    assert question["value"]["action_request"]["action"] == "publish"
    final = await client.runs.wait(thread, "poem", command=Command(resume=ACCEPT))
    assert final["published"] is True


async def test_interrupt_and_bare_resume(client: LangGraphClient) -> None:
    thread = await new_thread(client)
    asked = await client.runs.wait(thread, "refund_desk", input=REFUND)
    [question] = asked["__interrupt__"]
    [request] = question["value"]
    assert request["action_request"] == {"action": "audit", "args": {"order_id": "12345", "amount": 1500}}
    assert set(request["config"]) == {"allow_accept", "allow_edit", "allow_respond", "allow_ignore"}

    waiting = await client.threads.get(thread)
    assert waiting["status"] == "interrupted"
    assert [i["id"] for interrupts in waiting["interrupts"].values() for i in interrupts] == [question["id"]]
    assert thread in {t["thread_id"] for t in await client.threads.search(status="interrupted", limit=1000)}
    state = await client.threads.get_state(thread)
    assert state["next"] == ["review"]
    assert state["tasks"][0]["interrupts"][0]["id"] == question["id"]

    parts = await collect(
        client.runs.stream(thread, "refund_desk", command=Command(resume=[ACCEPT]), stream_mode=["values", "messages-tuple"])
    )
    assert {part.event for part in parts} >= {"metadata", "values", "messages"}
    final = await client.threads.get_state(thread)
    assert final["next"] == []
    assert [m["type"] for m in final["values"]["messages"]] == ["human", "ai", "tool", "ai"]
    assert (await client.threads.get(thread))["status"] == "idle"


async def test_resume_by_id_map(client: LangGraphClient) -> None:
    assistant = (await client.assistants.create("react", config={"configurable": TWO_CALLS}))["assistant_id"]
    thread = await new_thread(client)
    asked = await client.runs.wait(thread, assistant, input={"messages": [{"role": "user", "content": "both"}]})
    first, second = asked["__interrupt__"]

    with pytest.raises(ConflictError) as several:
        await client.runs.create(thread, assistant, command=Command(resume=ACCEPT))
    assert {i["interrupt_id"] for i in several.value.body["items"]} == {first["id"], second["id"]}
    half = await client.runs.wait(thread, assistant, command=Command(resume={first["id"]: ACCEPT}))
    assert [i["id"] for i in half["__interrupt__"]] == [second["id"]]
    refusal = {"type": "response", "args": "This order was returned."}
    final = await client.runs.wait(thread, assistant, command=Command(resume={second["id"]: refusal}))
    told = sorted(m["content"] for m in final["messages"] if m["type"] == "tool")
    assert told == ["Refunded 10.00 on order A1.", "This order was returned."]
    assert final["messages"][-1]["content"] == "Both are settled."

    with pytest.raises(ConflictError, match="first and decided: accept"):
        await client.runs.create(thread, assistant, command=Command(resume={first["id"]: {"type": "ignore", "args": None}}))


async def test_errors_reach_the_client(client: LangGraphClient) -> None:
    with pytest.raises(NotFoundError, match="not found"):
        await client.threads.get(str(uuid4()))
    thread = await new_thread(client)
    with pytest.raises(NotFoundError):
        await client.runs.create(thread, str(uuid4()), input=WEATHER)
    with pytest.raises(UnprocessableEntityError, match="no_such_assistant"):
        await client.runs.create(thread, "no_such_assistant", input=WEATHER)
    with pytest.raises(ConflictError, match="already exists"):
        await client.threads.create(thread_id=thread)
    assert (await client.threads.create(thread_id=thread, if_exists="do_nothing"))["thread_id"] == thread

    await client.runs.wait(thread, "refund_desk", input=REFUND)
    with pytest.raises(ConflictError, match="wait") as caught:
        await client.runs.create(thread, "refund_desk", input=REFUND)
    assert caught.value.body["code"] == "thread_waiting"
    assert len(caught.value.body["items"]) == 1

    made = await client.assistants.create("react", config={"configurable": TWO_CALLS})
    with pytest.raises(BadRequestError):
        await client.assistants.update(
            made["assistant_id"], config={"configurable": TWO_CALLS}, context={"model": "openai:gpt-4.1"}
        )


async def test_background_run_join_and_replay(client: LangGraphClient) -> None:
    thread = await new_thread(client)
    run = await client.runs.create(thread, "weather", input=WEATHER, stream_mode=["values", "updates"])
    joined = await client.runs.join(thread, run["run_id"])
    assert joined["messages"][-1]["type"] == "ai"
    assert run["run_id"] in {r["run_id"] for r in await client.runs.list(thread)}

    everything = await collect(client.runs.join_stream(thread, run["run_id"], last_event_id="-1"))
    assert everything[0].event == "metadata"
    assert [p.event for p in everything].count("updates") == 3
    for at, part in enumerate(everything):
        rest = await collect(client.runs.join_stream(thread, run["run_id"], last_event_id=part.id))
        assert [p.id for p in rest] == [p.id for p in everything[at + 1 :]]
    only = await collect(client.runs.join_stream(thread, run["run_id"], stream_mode="updates", last_event_id="-1"))
    assert {"updates"} <= {p.event for p in only} <= {"metadata", "updates", "end"}
    await client.runs.delete(thread, run["run_id"])
    with pytest.raises(NotFoundError):
        await client.runs.get(thread, run["run_id"])


async def test_state_and_history(client: LangGraphClient) -> None:
    thread = await new_thread(client)
    empty = await client.threads.get_state(thread)
    assert (empty["values"], empty["next"]) == ({}, [])
    await client.runs.wait(thread, "weather", input=WEATHER)
    state = await client.threads.get_state(thread)
    history = await client.threads.get_history(thread, limit=50)
    assert history[0]["checkpoint"]["checkpoint_id"] == state["checkpoint"]["checkpoint_id"]
    assert [s["metadata"]["step"] for s in history] == sorted((s["metadata"]["step"] for s in history), reverse=True)
    old = await client.threads.get_state(thread, checkpoint_id=history[-1]["checkpoint"]["checkpoint_id"])
    assert len(old["values"].get("messages", [])) < len(state["values"]["messages"])

    await client.threads.update_state(thread, {"messages": [{"role": "user", "content": "And in Porto?"}]})
    assert (await client.threads.get_state(thread))["values"]["messages"][-1]["content"] == "And in Porto?"
    await client.threads.update(thread, metadata={"topic": "weather"})
    assert (await client.threads.get(thread))["metadata"]["topic"] == "weather"
    assert [t["thread_id"] for t in await client.threads.search(ids=[thread])] == [thread]
    await client.threads.delete(thread)
    with pytest.raises(NotFoundError):
        await client.threads.get_state(thread)


async def test_memories_outlive_the_thread(client: LangGraphClient) -> None:
    user = {"user_id": f"user-{uuid4()}"}

    async def say(text: str) -> str:
        message = {"messages": [{"role": "user", "content": text}]}
        final: Any = await client.runs.wait(await new_thread(client), "memory", input=message, context=user)
        return str(final["messages"][-1]["content"])

    await say("Remember that I live in Lisbon.")
    assert "Lisbon" in await say("Where do I live?")
    found = await client.store.search_items(["memories", user["user_id"]])
    assert len(found["items"]) == 1


async def test_store(client: LangGraphClient) -> None:
    namespace = ["compat", str(uuid4())]
    await client.store.put_item(namespace, key="k", value={"colour": "blue"})
    item = await client.store.get_item(namespace, key="k")
    assert (item["namespace"], item["key"], item["value"]) == (namespace, "k", {"colour": "blue"})
    found = await client.store.search_items(namespace, filter={"colour": "blue"})
    assert [i["key"] for i in found["items"]] == ["k"]
    assert namespace in (await client.store.list_namespaces(prefix=namespace))["namespaces"]
    await client.store.delete_item(namespace, key="k")
    assert (await client.store.search_items(namespace))["items"] == []


async def test_remote_graph(live_server: Any) -> None:
    async with get_client(url=live_server.url) as client:
        graph = RemoteGraph("refund_desk", client=client)
        config: Any = {"configurable": {"thread_id": str(uuid4())}}
        await client.threads.create(thread_id=config["configurable"]["thread_id"])
        asked = await graph.ainvoke(REFUND, config)
        [question] = asked["__interrupt__"]
        assert (await graph.aget_state(config)).next == ("review",)
        final = await graph.ainvoke(types.Command(resume={question["id"]: ACCEPT}), config)
        assert final["messages"][-1]["type"] == "ai"


def test_synchronous_client(live_server: Any) -> None:
    with get_sync_client(url=live_server.url) as client:
        thread = client.threads.create()["thread_id"]
        parts = list(client.runs.stream(thread, "refund_desk", input=REFUND, stream_mode=["updates", "messages-tuple"]))
        [question] = [p.data["__interrupt__"][0] for p in parts if p.event == "updates" and "__interrupt__" in p.data]
        ignored = {question["id"]: {"type": "ignore", "args": None}}
        final: Any = client.runs.wait(thread, "refund_desk", command=Command(resume=ignored))
        assert [m["type"] for m in final["messages"]] == ["human", "ai", "tool"]
        with pytest.raises(ConflictError, match="first and decided: ignore"):
            client.runs.create(thread, "refund_desk", command=Command(resume=ignored))
