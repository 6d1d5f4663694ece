"""What a graph or a tool does to its own run, it does to nobody else's: neither other runs, nor the API, nor the process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from processes import Server, Servers

PROJECT = Path(__file__).parent / "hostile" / "langgraph.json"
BLOCKED = 0.6
"""Seconds that the loop may be blocked, here."""
SOON = 3 * BLOCKED + 2.0
"""Seconds in which everything else must have been served, on a busy machine."""
ENDED = 20.0
STOP_WITHIN = 5.0

LOOP = ["sleep_in_loop", "wait_in_loop", "spin_in_loop", "block_in_task"]
EXIT = ["exit_process", "exit_from_thread", "exit_from_task", "press_ctrl_c"]
HANG = ["hang_thread", "hang"]
GO = {"messages": [{"role": "user", "content": "go"}]}


@pytest_asyncio.fixture(scope="module")
async def server(servers: Servers, module_database_url: str) -> AsyncIterator[Server]:
    """A server of hostile graphs and tools, with short leases."""
    started = await servers.start(module_database_url, config=PROJECT, blocked_seconds=BLOCKED, lease_seconds=4)
    yield started
    assert started.process is not None
    assert started.process.returncode is None, started.tail()
    await started.stop()


@pytest_asyncio.fixture
async def api(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        yield client


async def start(api: httpx.AsyncClient, hazard: str, *, as_tool: bool = False, **options: Any) -> tuple[str, str]:
    """Start a run of a hazard. Returns its thread and its id."""
    thread = (await api.post("/threads", json={})).json()["thread_id"]
    body: dict[str, Any] = {"assistant_id": "hostile", "input": {"mode": hazard, **options.pop("given", {})}, **options}
    if as_tool:
        body |= {"assistant_id": await agent(api, hazard), "input": GO}
    made = await api.post(f"/threads/{thread}/runs", json=body)
    assert made.status_code == 200, made.text
    return thread, made.json()["run_id"]


async def agent(api: httpx.AsyncClient, tool: str, **config: Any) -> str:
    """An agent that calls the tool once."""
    model = {"provider": "scripted", "params": {"rules": [{"if": "go", "tool_calls": [{"name": tool}]}], "else": "Done."}}
    body = {"graph_id": "react", "config": {"configurable": {"model": model, "tools": [tool], **config}}}
    made = await api.post("/assistants", json=body)
    assert made.status_code == 200, made.text
    return str(made.json()["assistant_id"])


async def others_are_served(api: httpx.AsyncClient) -> None:
    """A run on another thread and the health check, in time."""
    async with asyncio.timeout(SOON):
        thread = (await api.post("/threads", json={})).json()["thread_id"]
        body = {"assistant_id": "weather", "input": {"messages": [{"role": "user", "content": "weather in Oslo?"}]}}
        done = (await api.post(f"/threads/{thread}/runs/wait", json=body)).json()
        assert "Oslo" in done["messages"][-1]["content"]
        assert (await api.get("/ok", params={"check_db": 1})).status_code == 200


async def ended(api: httpx.AsyncClient, thread: str, run: str) -> tuple[str, Any]:
    """The status of a run once it has ended, and its error or values."""
    async with asyncio.timeout(ENDED):
        body = (await api.get(f"/threads/{thread}/runs/{run}/join")).json()
        status = (await api.get(f"/threads/{thread}/runs/{run}")).json()["status"]
    return status, body.get("__error__", body)


@pytest.mark.parametrize("hazard", LOOP)
async def test_a_node_that_blocks_the_loop_ends_in_an_error(api: httpx.AsyncClient, hazard: str) -> None:
    thread, run = await start(api, hazard)
    await others_are_served(api)
    status, error = await ended(api, thread, run)
    assert status == "error"
    assert error["code"] == "blocked_event_loop", error
    assert "blocked the server's event loop for" in error["message"]
    assert "plain `def`" in error["message"]


@pytest.mark.parametrize("hazard", LOOP)
async def test_a_tool_that_blocks_the_loop_has_an_error_as_its_result(api: httpx.AsyncClient, hazard: str) -> None:
    thread, run = await start(api, hazard, as_tool=True)
    await others_are_served(api)
    status, values = await ended(api, thread, run)
    assert status == "success", values
    result = values["messages"][-2]
    assert (result["type"], result["status"]) == ("tool", "error")
    assert "blocked the server's event loop for" in result["content"]
    assert values["messages"][-1]["content"] == "Done."


@pytest.mark.parametrize("hazard", [*EXIT, "end_generator"])
@pytest.mark.parametrize("as_tool", [False, True], ids=["node", "tool"])
async def test_no_code_of_a_run_ends_the_process(api: httpx.AsyncClient, hazard: str, as_tool: bool) -> None:
    thread, run = await start(api, hazard, as_tool=as_tool)
    status, outcome = await ended(api, thread, run)
    if as_tool:
        assert outcome["messages"][-2]["status"] == "error"
        assert outcome["messages"][-1]["content"] == "Done."
    else:
        assert (status, outcome["code"]) == ("error", "graph_error")
    await others_are_served(api)


@pytest.mark.parametrize("hazard", HANG)
@pytest.mark.parametrize("as_tool", [False, True], ids=["node", "tool"])
async def test_many_that_never_return_keep_nobody(api: httpx.AsyncClient, hazard: str, as_tool: bool) -> None:
    """More than there are threads by default; and each can be cancelled."""
    runs = await asyncio.gather(*(start(api, hazard, as_tool=as_tool) for _ in range(20)))
    await others_are_served(api)
    for thread, run in runs:
        cancelled = await api.post(f"/threads/{thread}/runs/{run}/cancel", params={"wait": 1})
        assert cancelled.status_code < 300, cancelled.text
    assert {(await ended(api, *pair))[0] for pair in runs} == {"interrupted"}


async def test_a_slow_thread_comes_to_its_end(api: httpx.AsyncClient) -> None:
    runs = [await start(api, "block_thread", as_tool=as_tool) for as_tool in (False, True)]
    await others_are_served(api)
    assert [(await ended(api, *pair))[0] for pair in runs] == ["success", "success"]


async def test_a_gated_call_that_blocks_the_loop_was_carried_out_once(api: httpx.AsyncClient) -> None:
    assistant = await agent(api, "sleep_in_loop", review={"tools": {"sleep_in_loop": {}}})
    thread = (await api.post("/threads", json={})).json()["thread_id"]
    await api.post(f"/threads/{thread}/runs/wait", json={"assistant_id": assistant, "input": GO})
    (item,) = (await api.get("/inbox", params={"thread_id": thread})).json()["items"]
    answered = await api.post(f"/inbox/{item['id']}/response", json={"type": "accept", "args": None})
    await others_are_served(api)
    status, values = await ended(api, thread, answered.json()["run_id"])
    assert status == "success", values
    assert "blocked the server's event loop" in values["messages"][-2]["content"]
    assert (await api.get("/inbox", params={"thread_id": thread})).json()["items"] == []


@pytest.mark.parametrize("mode", ["flood", "flood_from_thread"])
async def test_a_flood_of_events_drowns_nobody(api: httpx.AsyncClient, server: Server, mode: str) -> None:
    before = memory(server.pid)
    thread, run = await start(api, mode, given={"size": 200_000}, stream_mode=["custom"])
    status = "pending"
    async with asyncio.timeout(60):
        while status in ("pending", "running"):
            await others_are_served(api)
            status = (await api.get(f"/threads/{thread}/runs/{run}")).json()["status"]
    assert status == "success"
    assert memory(server.pid) - before < 400 * 2**20


def memory(pid: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


async def test_a_large_state_keeps_nobody(api: httpx.AsyncClient) -> None:
    thread, run = await start(api, "grow", given={"size": 50 * 2**20}, stream_mode=["values"])
    slowest = 0.0
    done = asyncio.create_task(ended(api, thread, run))
    while not done.done():
        began = time.monotonic()
        assert (await api.get("/ok")).status_code == 200
        slowest = max(slowest, time.monotonic() - began)
        await asyncio.sleep(0.01)
    status, values = await done
    assert status == "success", values
    assert len(values["result"]) == 50 * 2**20
    assert slowest < SOON / 2
    await others_are_served(api)


async def test_a_model_that_speaks_for_long_can_be_cancelled(api: httpx.AsyncClient) -> None:
    thread, run = await start(api, "talk", given={"size": 100_000}, stream_mode=["messages-tuple"])
    await others_are_served(api)
    async with asyncio.timeout(SOON):
        await api.post(f"/threads/{thread}/runs/{run}/cancel", params={"wait": 1})
    assert (await ended(api, thread, run))[0] == "interrupted"


@pytest.mark.parametrize("hazards", [LOOP, EXIT, HANG, ["flood", "flood_from_thread", "grow", "talk"]], ids=lambda h: h[0])
async def test_sigterm_ends_the_process_whatever_runs(servers: Servers, fresh_database_url: str, hazards: list[str]) -> None:
    server = await servers.start(fresh_database_url, config=PROJECT, blocked_seconds=BLOCKED)
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as api:
        for hazard in hazards:
            await start(api, hazard, given={"size": 10**6})
    began = time.monotonic()
    assert await server.stop() == 0, server.tail()
    assert time.monotonic() - began < STOP_WITHIN


async def test_a_state_beyond_what_the_database_takes_is_an_error_of_its_run(api: httpx.AsyncClient) -> None:
    thread, run = await start(api, "grow", given={"size": 300 * 2**20}, stream_mode=["values"])
    await others_are_served(api)
    status, error = await ended(api, thread, run)
    assert status == "error"
    assert error["code"] == "state_too_large", error
    await others_are_served(api)
