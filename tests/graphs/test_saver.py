"""The batching saver: the stock tables and reads, writes of many runs in few statements, nobody harmed by a neighbour."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncIterator
from typing import Annotated, Any, TypedDict
from uuid import uuid4

import pytest
import pytest_asyncio
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send, interrupt

from app.db.engine import Database
from app.graphs.review import LeaseLost
from app.graphs.saver import NEW_THREAD, Saver
from app.graphs.saver_queue import WriteQueue


class State(TypedDict):
    log: Annotated[list[Any], operator.add]


def graph(saver: Any) -> Any:
    builder = StateGraph(State)
    builder.add_node("ask", lambda n: {"log": [interrupt({"n": n})]})
    builder.add_node("free", lambda n: {"log": [n, {"text": "x" * 100_000}]})
    builder.add_node("done", lambda _: {"log": ["done"]})
    builder.add_conditional_edges(START, lambda _: [Send("ask", 1), Send("ask", 2), Send("free", 3)], ["ask", "free"])
    return builder.add_edge("ask", "done").add_edge("done", END).compile(checkpointer=saver)


def thread() -> RunnableConfig:
    return {"configurable": {"thread_id": str(uuid4())}}


@pytest_asyncio.fixture
async def saver(database: Database) -> AsyncIterator[Saver]:
    async with Saver.open(database.pool) as opened:
        yield opened


async def history(saver: Any, config: RunnableConfig) -> list[Any]:
    """All that a saver reads of a thread."""
    found = [t async for t in saver.alist(config)]
    return [(t.config, t.checkpoint, t.metadata, t.parent_config, sorted(map(repr, t.pending_writes or ()))) for t in found]


async def test_the_stock_saver_reads_the_same(saver: Saver, database: Database) -> None:
    stock = AsyncPostgresSaver(database.pool)  # type: ignore[arg-type]
    config = thread()
    ours = graph(saver)
    await ours.ainvoke({"log": ["in"]}, config)
    first, second = (await ours.aget_state(config)).interrupts
    assert await history(saver, config) == await history(stock, config)
    await ours.ainvoke(Command(resume={first.id: "one"}), config)
    # The stock saver goes on where ours stopped, and the other way round.
    assert [i.id for i in (await graph(stock).aget_state(config)).interrupts] == [second.id]
    result = await graph(stock).ainvoke(Command(resume={second.id: "two"}), config)
    assert [entry for entry in result["log"] if isinstance(entry, str | int)] == ["in", "one", "two", 3, "done"]
    assert (await ours.aget_state(config)).values == result
    assert await history(saver, config) == await history(stock, config)


async def test_writes_of_many_runs_go_out_together(saver: Saver) -> None:
    async def put() -> None:
        config: RunnableConfig = {"configurable": {"thread_id": str(uuid4()), "checkpoint_ns": ""}}
        await saver.aput(config, empty_checkpoint(), {}, {})

    batches: list[int] = []
    execute = saver._queue._execute

    async def counted(batch: list[Any]) -> None:
        batches.append(len(batch))
        await execute(batch)

    saver._queue._execute = counted  # type: ignore[method-assign]
    await asyncio.gather(*(put() for _ in range(200)))
    assert sum(batches) == 200
    assert len(batches) < 20


async def test_an_operation_that_fails_harms_no_other(saver: Saver) -> None:
    async def put(thread_id: str) -> str:
        config: RunnableConfig = {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}
        await saver.aput(config, empty_checkpoint(), {}, {})
        return thread_id

    good = [str(uuid4()) for _ in range(10)]
    results = await asyncio.gather(*(put(t) for t in [*good[:5], "with a \0", *good[5:]]), return_exceptions=True)
    assert [r for r in results if isinstance(r, str)] == good
    assert len([r for r in results if isinstance(r, Exception)]) == 1
    for thread_id in good:
        assert await saver.aget_tuple({"configurable": {"thread_id": thread_id}}) is not None


async def test_a_caller_that_is_cancelled_harms_no_other(saver: Saver) -> None:
    config = thread()
    waiting = asyncio.create_task(graph(saver).ainvoke({"log": ["in"]}, thread()))
    await asyncio.sleep(0)
    waiting.cancel()
    await graph(saver).ainvoke({"log": ["in"]}, config)
    assert len((await graph(saver).aget_state(config)).interrupts) == 2


async def test_a_thread_that_is_known_to_be_new_is_not_read_once(saver: Saver) -> None:
    config = thread()
    NEW_THREAD.set(config["configurable"]["thread_id"])
    await graph(saver).ainvoke({"log": ["in"]}, config)
    assert len((await graph(saver).aget_state(config)).interrupts) == 2


async def test_what_is_on_its_way_is_read_though_its_caller_was_cancelled(saver: Saver) -> None:
    config: RunnableConfig = {"configurable": {"thread_id": str(uuid4()), "checkpoint_ns": ""}}
    execute, sent, may_go = saver._queue._execute, asyncio.Event(), asyncio.Event()

    async def held_up(batch: list[Any]) -> None:
        sent.set()
        await may_go.wait()
        await execute(batch)

    saver._queue._execute = held_up  # type: ignore[method-assign]
    writing = asyncio.create_task(saver.aput(config, empty_checkpoint(), {}, {}))
    await sent.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    reading = asyncio.create_task(saver.aget_tuple(config))
    for _ in range(3):  # time enough for a read that waits for nothing
        await saver.aget_tuple(thread())
    assert not reading.done()
    may_go.set()
    assert await reading is not None


async def test_a_process_that_lost_its_leases_writes_nothing(database: Database) -> None:
    valid = True
    async with Saver.open(database.pool, may_write=lambda: valid) as fenced:
        config = thread()
        await graph(fenced).ainvoke({"log": ["in"]}, config)
        before = await history(fenced, config)
        valid = False
        interrupts = (await graph(fenced).aget_state(config)).interrupts
        with pytest.raises(LeaseLost):
            await graph(fenced).ainvoke(Command(resume={interrupts[0].id: "late"}), config)
        assert await history(fenced, config) == before


async def test_deleting_a_thread_leaves_nothing_of_it(saver: Saver) -> None:
    config = thread()
    await graph(saver).ainvoke({"log": ["in"]}, config)
    await saver.adelete_thread(config["configurable"]["thread_id"])
    assert await saver.aget_tuple(config) is None


async def test_a_write_that_is_answered_while_its_caller_is_cancelled_is_not_waited_for(database: Database) -> None:
    """The caller hears of the cancellation a turn of the loop later, when nobody will answer any more."""
    queue = WriteQueue(database.pool, lambda: True)
    operation = queue.operation()
    caller = asyncio.create_task(queue.write("thread", operation))
    await asyncio.sleep(0)
    caller.cancel()
    await queue._isolate([operation], ValueError("as the flusher does, with what it took before"))
    with pytest.raises(asyncio.CancelledError):
        await caller
    async with asyncio.timeout(5):
        await queue.settle("thread")
