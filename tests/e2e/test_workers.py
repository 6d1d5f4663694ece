"""Processes side by side: several behind one port, servers that only serve, workers that only work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import httpx
import psycopg
import pytest
from commands import HI, STOP_WITHIN, endless, keyturn, runs
from processes import Servers, free_port

ECHO = {"graph_id": "react", "config": {"configurable": {"model": {"provider": "scripted", "params": {"else": "{input}!"}}}}}


def children(pid: int) -> set[int]:
    """Processes that a process has started and that live."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == pid and fields[0] != "Z":
                    found.add(int(entry.name))
    return found


def processes() -> set[int]:
    """All processes of this machine."""
    return {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}


async def alive(api: httpx.AsyncClient) -> bool:
    try:
        return (await api.get("/ok", headers={"Connection": "close"})).status_code == 200
    except httpx.HTTPError:
        return False


async def spoken(api: httpx.AsyncClient, thread: str | None = None) -> str:
    """What the agent says to one more run."""
    agent = (await api.post("/assistants", json=ECHO)).json()["assistant_id"]
    thread = thread or (await api.post("/threads", json={})).json()["thread_id"]
    values = (await api.post(f"/threads/{thread}/runs/wait", json={"assistant_id": agent, "input": HI})).json()
    said: str = values["messages"][-1]["content"]
    return said


async def test_two_processes_serve_one_port_and_one_that_dies_is_started_again(fresh_database_url: str) -> None:
    port = str(free_port())
    env = {"DATABASE_URL": fresh_database_url, "KEYTURN_EXAMPLES": "0"}
    async with (
        keyturn("serve", "--workers", "2", "--port", port, **env) as parent,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as api,
    ):
        await parent.says("Keyturn is ready")
        pid = parent.process.pid
        both = children(pid)
        assert len(both) == 2
        assert await spoken(api) == "hi!"
        victim = min(both)
        os.kill(victim, signal.SIGKILL)
        async with asyncio.timeout(30):
            while not (len(now := children(pid)) == 2 and victim not in now and await alive(api)):
                await asyncio.sleep(0.05)
        await parent.says("server_process_died")
        await api.aclose()
        began = time.monotonic()
        assert await parent.ends(signal.SIGTERM) == 0
        assert time.monotonic() - began < STOP_WITHIN
        assert not now & processes()
        assert sum("Keyturn is ready" in line for line in parent.out) == 1


def connections(pid: int, port: int) -> int:
    """Connections to a port of loopback that a process serves."""
    inodes = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(f":{port:04X}") and fields[3] == "01":
            inodes.add(f"socket:[{fields[9]}]")
    held = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            held += str(descriptor.readlink()) in inodes
    return held


async def test_all_get_the_same_share_of_connections_and_none_waits_for_one_that_died(fresh_database_url: str) -> None:
    port = free_port()
    env = {"DATABASE_URL": fresh_database_url, "KEYTURN_EXAMPLES": "0"}
    async with (
        keyturn("serve", "--workers", "2", "--port", str(port), **env) as parent,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10, limits=httpx.Limits(max_connections=20)) as api,
    ):
        await parent.says("Keyturn is ready")
        both = sorted(children(parent.process.pid))
        async with endless(api, 20):
            assert [connections(pid, port) for pid in both] == [10, 10]
            killed, other = both
            os.kill(killed, signal.SIGKILL)
            async with asyncio.timeout(10):
                while killed in children(parent.process.pid):
                    await asyncio.sleep(0.01)
            async with asyncio.timeout(5):  # long before another has started
                for _ in range(4):
                    assert await alive(api)
            os.kill(other, signal.SIGKILL)
        await parent.says("server_process_restarted")
        assert await alive(api)
        assert await parent.ends(signal.SIGINT) == 0


async def test_none_is_left_behind_by_a_supervisor_that_is_killed(fresh_database_url: str) -> None:
    env = {"DATABASE_URL": fresh_database_url, "KEYTURN_EXAMPLES": "0"}
    async with keyturn("serve", "--workers", "2", "--port", "0", **env) as parent:
        await parent.says("Keyturn is ready")
        both = children(parent.process.pid)
        assert len(both) == 2
        parent.process.kill()
        async with asyncio.timeout(20):
            while both & processes():
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_port_that_somebody_has_is_refused(fresh_database_url: str, servers: Servers, workers: str) -> None:
    server = await servers.start(fresh_database_url, examples=0)
    async with keyturn("serve", "--workers", workers, "--port", str(server.port), DATABASE_URL=fresh_database_url) as other:
        assert await other.ends() == 1
        assert any(f"Port {server.port} of 127.0.0.1 is in use" in line for line in other.err)


async def test_a_server_without_a_worker_leaves_runs_to_workers(servers: Servers, fresh_database_url: str) -> None:
    server = await servers.start(fresh_database_url, examples=0, worker=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as api:
        waiting = asyncio.create_task(spoken(api))
        async with await psycopg.AsyncConnection.connect(fresh_database_url, autocommit=True) as connection:
            async with asyncio.timeout(10):
                while await (await connection.execute("SELECT 1 FROM runs WHERE status = 'pending'")).fetchone() is None:
                    await asyncio.sleep(0.02)
            async with keyturn("worker", DATABASE_URL=fresh_database_url, KEYTURN_EXAMPLES="0") as worker:
                await worker.says("worker_ready")
                async with asyncio.timeout(30):
                    assert await waiting == "hi!"
                assert await spoken(api) == "hi!"
                owners = "SELECT count(*) FROM runs WHERE status = 'success'"
                assert await (await connection.execute(owners)).fetchone() == (2,)
                async with endless(api, 2):
                    began = time.monotonic()
                    assert await worker.ends(signal.SIGTERM) == 0
                    assert time.monotonic() - began < STOP_WITHIN
                    row = await (await connection.execute("SELECT status FROM runs ORDER BY created_at DESC")).fetchone()
                    assert row == ("pending",), "it was given back at once"
                    await server.stop()


@pytest.mark.parametrize("first", ["server", "worker"])
async def test_a_worker_joins_the_embedded_postgres_of_a_server(open_directory: Path, first: str) -> None:
    home = open_directory / "data"
    options = {"KEYTURN_EXAMPLES": "0", "KEYTURN_PORT": "0", "KEYTURN_DATA_DIR": str(home)}
    async with keyturn("serve", "--no-worker", **options) as server:
        url = (await server.says("Keyturn is ready")).split()[-1].removesuffix("/inbox")
        async with httpx.AsyncClient(base_url=url, timeout=30) as api, keyturn("worker", **options) as worker:
            await worker.says("worker_ready")
            assert await spoken(api) == "hi!"
            leaves, stays = (server, worker) if first == "server" else (worker, server)
            await api.aclose()
            assert await leaves.ends(signal.SIGTERM) == 0
            assert runs(home), "the other needs it"
            assert await stays.ends(signal.SIGTERM) == 0
            assert not runs(home)
