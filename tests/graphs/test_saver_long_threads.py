"""Long threads: a turn saves what it adds, and every state of the thread reads as if each had been saved whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID, uuid4

import pytest
import pytest_asyncio
from asgi import new_thread, serving
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Overwrite

from app.db.engine import Database
from app.graphs import saver_messages
from app.graphs.saver import Saver
from app.graphs.saver_messages import append_only
from app.threads.checkpoints import copy_checkpoints, undo_run


async def agent(state: MessagesState) -> dict[str, Any]:
    said = state["messages"][-1]
    if isinstance(said, ToolMessage):
        return {"messages": [AIMessage(f"It is {said.content}.", id=f"a{len(state['messages'])}")]}
    if said.content == "forget":
        return {"messages": [RemoveMessage(m.id or "") for m in state["messages"][:-1]]}
    if said.content == "summarise":
        return {"messages": Overwrite([HumanMessage("all of it", id="sum")])}
    if said.content == "chat":
        return {"messages": ["as text", ("ai", "as a pair")]}
    call = {"name": "weather", "args": {"city": said.content}, "id": f"call_{len(state['messages'])}"}
    return {"messages": AIMessage("", tool_calls=[call], id=f"c{len(state['messages'])}")}


async def tools(state: MessagesState) -> dict[str, Any]:
    call = state["messages"][-1].tool_calls[0]  # type: ignore[union-attr]
    return {"messages": [ToolMessage("sunny", tool_call_id=call["id"], id=f"t{len(state['messages'])}")]}


def plain(saver: Any) -> Any:
    builder = StateGraph(MessagesState)
    builder.add_node("agent", agent)
    builder.add_node("tools", tools)
    builder.add_edge(START, "agent").add_edge("tools", "agent")
    builder.add_conditional_edges(
        "agent", lambda s: "tools" if getattr(s["messages"][-1], "tool_calls", None) else "__end__", ["tools", "__end__"]
    )
    return builder.compile(checkpointer=saver)


def thread() -> RunnableConfig:
    return {"configurable": {"thread_id": str(uuid4())}}


def said(text: str, n: int = 0) -> dict[str, Any]:
    return {"messages": [HumanMessage(text, id=f"h{n}")]}


async def turns(graph: Any, config: RunnableConfig, numbers: range, **kwargs: Any) -> None:
    for n in numbers:
        await graph.ainvoke(said("Lisbon", n), config, **kwargs)


async def messages(graph: Any, config: RunnableConfig) -> list[Any]:
    return list((await graph.aget_state(config)).values.get("messages", []))


async def states(graph: Any, config: RunnableConfig) -> list[tuple[str, Any]]:
    """All states of a thread, by checkpoint."""
    found = [s async for s in graph.aget_state_history(config)]
    return [(s.config["configurable"]["checkpoint_id"], s.values.get("messages"), s.next) for s in found]


async def stored_bytes(database: Database, config: RunnableConfig) -> int:
    async with database.pool.connection() as connection:
        cursor = await connection.execute(
            """SELECT (SELECT coalesce(sum(octet_length(blob)), 0) FROM checkpoint_blobs WHERE thread_id = %(id)s)
                    + (SELECT coalesce(sum(octet_length(blob)), 0) FROM checkpoint_writes WHERE thread_id = %(id)s)
                    + (SELECT coalesce(sum(octet_length(checkpoint::text)), 0) FROM checkpoints WHERE thread_id = %(id)s)
                      AS size""",
            {"id": config["configurable"]["thread_id"]},
        )
        row = await cursor.fetchone()
        assert row is not None
        return int(row["size"])


@pytest_asyncio.fixture
async def saver(database: Database) -> AsyncIterator[Saver]:
    async with Saver.open(database.pool) as opened:
        yield opened


async def test_what_a_turn_saves_does_not_grow(saver: Saver, database: Database) -> None:
    graph, config = append_only(plain(saver)), thread()
    sizes: dict[int, int] = {}
    for n in range(1, 61):
        before = await stored_bytes(database, config) if n in (10, 60) else 0
        await turns(graph, config, range(n, n + 1))
        if n in (10, 60):
            sizes[n] = await stored_bytes(database, config) - before
    assert len(await messages(graph, config)) == 240
    assert sizes[60] <= 1.5 * sizes[10]


async def test_all_copies_together_stay_linear(saver: Saver, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_messages, "FEWEST_UPDATES", 8)
    graph, config, sizes = append_only(plain(saver)), thread(), []
    for n in (0, 20, 40, 60):
        await turns(graph, config, range(n, n + 20))
        sizes.append(await stored_bytes(database, config))
    assert sizes[3] < 4.8 * sizes[0]
    reference, other = plain(InMemorySaver()), thread()
    await turns(reference, other, range(80))
    assert await messages(append_only(plain(saver)), config) == await messages(reference, other)


async def test_every_state_reads_as_if_it_had_been_saved_whole(saver: Saver, database: Database) -> None:
    """The same story, on the stock graph and the stock saver, and on ours: what both tell of it must be the same."""
    stock = AsyncPostgresSaver(database.pool)  # type: ignore[arg-type]

    async def story(graph: Any, config: RunnableConfig) -> None:
        await turns(graph, config, range(4))
        history = [s async for s in graph.aget_state_history(config)]
        await graph.ainvoke(said("forget", 90), config)
        await turns(graph, config, range(5, 6))
        await graph.aupdate_state(config, {"messages": [AIMessage("edited", id="a24"), HumanMessage("more", id="m")]}, "agent")
        await turns(graph, config, range(6, 7))
        # Two branches from the middle: one with words of its own, one that goes over the same step again.
        await graph.ainvoke(said("Porto", 91), history[6].config)
        await graph.ainvoke(None, history[8].config)
        await graph.aupdate_state(history[3].config, {"messages": [RemoveMessage("h0")]}, "agent")
        await turns(graph, config, range(7, 9), durability="exit")
        await graph.ainvoke(said("summarise", 92), config)
        await turns(graph, config, range(9, 11))

    ours, config = append_only(plain(saver)), thread()
    reference, other = plain(stock), thread()
    await story(ours, config)
    await story(reference, other)
    told = await states(ours, config)
    assert [s[1:] for s in told] == [s[1:] for s in await states(reference, other)]
    assert len(told) > 50
    # Read by nothing of ours, and by one of us that has read nothing yet.
    assert await states(plain(stock), config) == told
    assert await states(append_only(plain(stock)), config) == told
    async with Saver.open(database.pool) as fresh:
        assert await states(append_only(plain(fresh)), config) == told


async def test_a_thread_of_before_goes_on(saver: Saver, database: Database) -> None:
    stock = plain(AsyncPostgresSaver(database.pool))  # type: ignore[arg-type]
    config, reference, other = thread(), plain(InMemorySaver()), thread()
    await turns(stock, config, range(3))
    await turns(append_only(plain(saver)), config, range(3, 6))
    await turns(stock, config, range(6, 8))  # and back
    await turns(append_only(plain(saver)), config, range(8, 10))
    await turns(reference, other, range(10))
    expected = [s[1:] for s in await states(reference, other)]
    for graph in (append_only(plain(saver)), stock):
        assert [s[1:] for s in await states(graph, config)] == expected


async def test_processes_that_take_turns_see_what_the_other_did(database: Database) -> None:
    config, reference, other = thread(), plain(InMemorySaver()), thread()
    async with Saver.open(database.pool) as first, Saver.open(database.pool) as second:
        graphs = [append_only(plain(first)), append_only(plain(second))]
        for n in range(12):
            await turns(graphs[(n // 3) % 2], config, range(n, n + 1))
        await turns(reference, other, range(12))
        for graph in graphs:
            assert await messages(graph, config) == await messages(reference, other)


async def test_what_a_reader_does_with_his_list_is_his_own_affair(saver: Saver) -> None:
    graph, config = append_only(plain(saver)), thread()
    await turns(graph, config, range(3))
    found = await messages(graph, config)
    (await graph.aget_state(config)).values["messages"].clear()
    assert await messages(graph, config) == found


async def test_messages_written_as_text_keep_their_ids(saver: Saver) -> None:
    graph, config = append_only(plain(saver)), thread()
    await graph.ainvoke({"messages": "hello"}, config)
    result = await graph.ainvoke({"messages": [{"role": "user", "content": "chat"}]}, config)
    ids = [m.id for m in result["messages"]]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    assert [m.id for m in await messages(graph, config)] == ids
    assert [m.content for m in result["messages"][-2:]] == ["as text", "as a pair"]


async def test_a_copy_has_all_states_and_a_life_of_its_own(saver: Saver, database: Database) -> None:
    graph, config = append_only(plain(saver)), thread()
    await turns(graph, config, range(5))
    told = await states(graph, config)
    for by_saver in (True, False):
        target = uuid4()
        if by_saver:
            await saver.acopy_thread(config["configurable"]["thread_id"], str(target))
        else:
            async with database.transaction() as tx:
                await copy_checkpoints(tx, UUID(config["configurable"]["thread_id"]), target)
        copy: RunnableConfig = {"configurable": {"thread_id": str(target)}}
        assert await states(graph, copy) == told
        await turns(graph, copy, range(5, 7))
        assert len(await messages(graph, copy)) == 28
    assert await states(graph, config) == told


@pytest.mark.parametrize("copies_every", [3, 1000])
async def test_pruning_keeps_the_newest_state_and_what_it_is_made_of(
    saver: Saver, database: Database, monkeypatch: pytest.MonkeyPatch, copies_every: int
) -> None:
    monkeypatch.setattr(saver_messages, "FEWEST_UPDATES", copies_every)
    graph, config = append_only(plain(saver)), thread()
    await turns(graph, config, range(10))
    newest, size = await messages(graph, config), await stored_bytes(database, config)
    await saver.aprune([config["configurable"]["thread_id"]])
    await saver.aprune([config["configurable"]["thread_id"]])  # nothing is left to do
    async with Saver.open(database.pool) as fresh:
        assert await messages(append_only(plain(fresh)), config) == newest
    if copies_every == 3:
        assert await stored_bytes(database, config) < 0.7 * size
    await turns(graph, config, range(10, 12))
    assert len(await messages(graph, config)) == 48
    assert await messages(graph, config) == await messages(plain(AsyncPostgresSaver(database.pool)), config)  # type: ignore[arg-type]


async def test_deleting_runs_leaves_later_ones_whole(saver: Saver) -> None:
    graph, config = append_only(plain(saver)), thread()
    runs = [str(uuid4()) for _ in range(4)]
    for n, run in enumerate(runs):
        await turns(graph, {**config, "metadata": {"run_id": run}}, range(n, n + 1))
    found = await messages(graph, config)
    await saver.adelete_for_runs(runs[1:2])
    assert await messages(graph, config) == found
    await saver.adelete_for_runs(runs)
    assert await saver.aget_tuple(config) is None


async def test_a_run_that_is_undone_leaves_nothing_behind(saver: Saver, database: Database) -> None:
    graph, config = append_only(plain(saver)), thread()
    for n in range(3):
        await turns(graph, {**config, "metadata": {"run_id": str(uuid4())}}, range(n, n + 1))
    told, run = await states(graph, config), uuid4()
    await turns(graph, {**config, "metadata": {"run_id": str(run)}}, range(3, 4))
    async with database.transaction() as tx:
        await undo_run(tx, UUID(config["configurable"]["thread_id"]), run, None)
    assert await states(graph, config) == told
    for n in (8, 9):
        await turns(graph, {**config, "metadata": {"run_id": str(uuid4())}}, range(n, n + 1))
    reference, other = plain(InMemorySaver()), thread()
    await turns(reference, other, range(3))
    await turns(reference, other, range(8, 10))
    async with Saver.open(database.pool) as fresh:
        for reader in (graph, append_only(plain(fresh))):
            assert [s[1:] for s in await states(reader, config)] == [s[1:] for s in await states(reference, other)]


async def test_readers_at_once_read_the_same(saver: Saver) -> None:
    graph, config = append_only(plain(saver)), thread()
    await turns(graph, config, range(5))
    found = await asyncio.gather(*(states(graph, config) for _ in range(8)))
    assert all(told == found[0] for told in found)


async def test_the_server_saves_its_threads_so(database: Database) -> None:
    async with serving(database.url) as (api, _):
        thread_id = await new_thread(api)
        for n in range(3):
            body = {"assistant_id": "react", "input": {"messages": [{"type": "human", "content": "hi", "id": f"h{n}"}]}}
            assert (await api.post(f"/threads/{thread_id}/runs/wait", json=body)).status_code == 200
        history = (await api.get(f"/threads/{thread_id}/history", params={"limit": 100})).json()
        assert [len(s["values"].get("messages", [])) for s in history] == [6, 5, 4, 4, 3, 2, 2, 1, 0]
        # A branch from the second turn, and a state written by hand on top of it.
        body = {**body, "checkpoint": history[3]["checkpoint"]}
        assert (await api.post(f"/threads/{thread_id}/runs/wait", json=body)).status_code == 200
        written = {"values": {"messages": [{"type": "ai", "content": "by hand"}]}, "as_node": "agent"}
        assert (await api.post(f"/threads/{thread_id}/state", json=written)).status_code == 200
        state = (await api.get(f"/threads/{thread_id}/state")).json()
        assert len(state["values"]["messages"]) == 7
        copy = (await api.post(f"/threads/{thread_id}/copy")).json()
        assert (await api.get(f"/threads/{copy['thread_id']}/state")).json()["values"] == state["values"]
    async with database.pool.connection() as connection:
        cursor = await connection.execute("SELECT count(*) AS whole FROM checkpoint_blobs WHERE channel = 'messages'")
        row = await cursor.fetchone()
        assert row is not None
        assert row["whole"] <= 2  # where the branch begins, in both threads
