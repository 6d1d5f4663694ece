"""What the saver has acknowledged is there after a kill -9, and nothing half of it."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import interrupt

from app.db.engine import Database
from app.graphs.review import LeaseLost
from app.graphs.saver import Saver
from app.graphs.saver_messages import append_only

ROOT = Path(__file__).parents[2]

DIES = """
    import asyncio, os, signal, sys
    from langchain_core.messages import AIMessage
    from langgraph.checkpoint.base import empty_checkpoint
    from app.db.engine import open_database
    from app.graphs.saver import Saver

    async def main(url, thread_id, trailing, upto):
        async with open_database(url) as database, Saver.open(database.pool) as saver:
            saver = saver.trailing() if trailing == "trailing" else saver
            config = {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}
            first = {**empty_checkpoint(), "channel_versions": {"messages": "1"}}
            config = await saver.aput(config, first, {"step": -1}, {})
            await saver.aput_writes(config, [("messages", [AIMessage("one", id="a")])], "t1", "~1")
            if upto == "writes":
                os.kill(os.getpid(), signal.SIGKILL)
            if upto == "question":
                await saver.aput_writes(config, [("__interrupt__", ("what?",))], "t2", "~2")
                os.kill(os.getpid(), signal.SIGKILL)
            second = {**empty_checkpoint(), "channel_versions": {"messages": "2"}}
            await saver.aput(config, second, {"step": 0}, {})
            os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(main(*sys.argv[1:]))
"""


async def die(database: Database, thread_id: str, *args: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        textwrap.dedent(DIES),
        database.url,
        thread_id,
        *args,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert await asyncio.wait_for(process.wait(), 60) == -9


@pytest.mark.parametrize(
    ("mode", "upto", "checkpoints"),
    [
        ("plain", "writes", 1),
        ("plain", "checkpoint", 2),
        ("trailing", "question", 1),
        ("trailing", "checkpoint", 2),
    ],
)
async def test_what_was_acknowledged_is_there(database: Database, mode: str, upto: str, checkpoints: int) -> None:
    thread_id = str(uuid4())
    await die(database, thread_id, mode, upto)
    stock = AsyncPostgresSaver(database.pool)  # type: ignore[arg-type]
    found = [t async for t in stock.alist({"configurable": {"thread_id": thread_id}})]
    assert len(found) == checkpoints
    written = [(channel, getattr(value[0], "content", value[0])) for _, channel, value in found[-1].pending_writes or ()]
    assert written == [("messages", "one"), *([("__interrupt__", "what?")] if upto == "question" else [])]


def sleepy(saver: Any, woken: asyncio.Event, *, ends: bool = True) -> Any:
    """Two tasks of one superstep: one is done at once, the other waits, and then asks or ends."""

    async def quick(state: MessagesState) -> dict[str, Any]:
        return {"messages": [HumanMessage("quick", id="quick")]}

    async def slow(state: MessagesState) -> dict[str, Any]:
        await woken.wait()
        return {"messages": [HumanMessage("slow" if ends else interrupt("go on?"), id="slow")]}

    builder = StateGraph(MessagesState).add_node("quick", quick).add_node("slow", slow)
    builder.add_edge(START, "quick").add_edge(START, "slow")
    return append_only(builder.compile(checkpointer=saver))


async def eventually(condition: Any, seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("ends", [True, False])
async def test_a_task_that_is_done_is_saved_while_others_still_run(database: Database, ends: bool) -> None:
    config: RunnableConfig = {"configurable": {"thread_id": str(uuid4())}}
    stock, woken = AsyncPostgresSaver(database.pool), asyncio.Event()  # type: ignore[arg-type]

    async def saved() -> bool:
        found = await stock.aget_tuple(config)
        return found is not None and "quick" in str(found.pending_writes)

    async with Saver.open(database.pool) as saver:
        graph = sleepy(saver, woken, ends=ends)
        run = asyncio.create_task(graph.ainvoke({"messages": [HumanMessage("in", id="in")]}, config, durability="sync"))
        await eventually(saved)
        woken.set()
        await run
        state = await graph.aget_state(config)
        assert [m.id for m in state.values["messages"]] == (["in", "quick", "slow"] if ends else ["in", "quick"])
        assert state.next == (() if ends else ("slow",))


async def test_no_checkpoint_follows_writes_that_could_not_be_saved(database: Database) -> None:
    config: RunnableConfig = {"configurable": {"thread_id": str(uuid4())}}
    valid, woken = True, asyncio.Event()
    async with Saver.open(database.pool, may_write=lambda: valid) as saver:
        graph = sleepy(saver, woken)
        trail = saver._queue.trail

        def late(thread_id: str, rows: Any) -> None:
            nonlocal valid
            trail(thread_id, rows)
            valid = not any(row[6] == "messages" and b"quick" in row[8] for row in rows)

        saver._queue.trail = late  # type: ignore[method-assign]
        run = asyncio.create_task(graph.ainvoke({"messages": [HumanMessage("in", id="in")]}, config, durability="sync"))
        await eventually(lambda: _is(lambda: bool(saver._queue._left)))
        saver._queue.trail = trail  # type: ignore[method-assign]
        valid = True  # the lease is back, and what went missing meanwhile stays missing
        woken.set()
        with pytest.raises(LeaseLost):
            await run
        state = await graph.aget_state(config)
        assert state.next == ("quick",)
        # Nothing is lost by that: who takes the run over does again what is missing.
        result = await graph.ainvoke(None, config)
        assert [m.id for m in result["messages"]] == ["in", "quick", "slow"]


async def _is(condition: Any) -> bool:
    return bool(condition())
