"""The server as a process: how it starts, refuses to start, and stops."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from commands import HI, STOP_WITHIN, endless, keyturn, runs
from processes import Servers, free_port

from app.db.embedded import EmbeddedPostgres

BLOCKING_TOOL = """
import pathlib, threading
from langchain_core.tools import tool

@tool
def block(path: str) -> str:
    \"\"\"Begin, and never end.\"\"\"
    pathlib.Path(path).touch()
    threading.Event().wait()
"""


async def test_sigterm_ends_ten_endless_streams_in_order(servers: Servers, fresh_database_url: str) -> None:
    server = await servers.start(fresh_database_url, examples=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as api, endless(api, 10) as streams:
        assert server.process is not None
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_WITHIN):
            while (await api.get("/ok")).status_code == 200:
                await asyncio.sleep(0.01)
        assert (await api.get("/ok")).json()["code"] == "stopping"
        assert await server.process.wait() == 0
        assert time.monotonic() - began < STOP_WITHIN
        for body in await asyncio.gather(*streams):  # each ended as a stream does, not torn
            assert b"event: error" not in body
    async with await psycopg.AsyncConnection.connect(fresh_database_url) as connection:
        row = await (await connection.execute("SELECT status, lease_until FROM runs")).fetchone()
    assert row is not None
    assert row[0] in ("pending", "running"), "the run is left for the next process"


async def test_a_second_signal_stops_at_once(servers: Servers, fresh_database_url: str) -> None:
    server = await servers.start(fresh_database_url, examples=0, shutdown_seconds=600)
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as api, endless(api, 2):
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)
        while (await api.get("/ok")).status_code == 200:
            await asyncio.sleep(0.01)
        began = time.monotonic()
        assert await server.stop(signal.SIGINT) == 0
        assert time.monotonic() - began < 2


async def test_a_database_that_is_gone_does_not_keep_the_process(
    servers: Servers, open_directory: Path, postgres: EmbeddedPostgres
) -> None:
    with EmbeddedPostgres(open_directory / "gone", {"fsync": "off"}) as database:
        async with keyturn("migrate", DATABASE_URL=database.url()) as migration:
            assert await migration.ends() == 0
        server = await servers.start(database.url(), examples=0)
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as api, endless(api, 2):
            assert database.postmaster_pid is not None
            os.kill(database.postmaster_pid, signal.SIGQUIT)
            while (await api.get("/ok?check_db=1")).status_code == 200:
                await asyncio.sleep(0.01)
            began = time.monotonic()
            assert await server.stop() == 0, server.tail()
            assert time.monotonic() - began < STOP_WITHIN + 1


async def test_a_tool_that_hangs_in_a_thread_does_not_keep_the_process(
    servers: Servers, fresh_database_url: str, tmp_path: Path
) -> None:
    (tmp_path / "tools.py").write_text(BLOCKING_TOOL)
    (tmp_path / "langgraph.json").write_text('{"tools": {"block": "./tools.py:block"}}')
    server = await servers.start(fresh_database_url, examples=0, shutdown_seconds=0.5, config=tmp_path / "langgraph.json")
    call = {"if": ".", "tool_calls": [{"name": "block", "args": {"path": str(tmp_path / "begun")}}]}
    model = {"provider": "scripted", "params": {"rules": [call]}}
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as api:
        body = {"graph_id": "react", "config": {"configurable": {"model": model, "tools": ["block"]}}}
        assistant = (await api.post("/assistants", json=body)).json()["assistant_id"]
        thread = (await api.post("/threads", json={})).json()["thread_id"]
        await api.post(f"/threads/{thread}/runs", json={"assistant_id": assistant, "input": HI})
        async with asyncio.timeout(30):
            while not (tmp_path / "begun").exists():
                await asyncio.sleep(0.01)
    began = time.monotonic()
    assert await server.stop() == 0
    assert time.monotonic() - began < STOP_WITHIN


async def test_the_embedded_server_from_first_start_to_stop(open_directory: Path) -> None:
    home = open_directory / "key turn"
    async with keyturn("serve", "--port", "0", "--data-dir", home) as server:
        line = await server.says("ready")
        url = line.removeprefix("Keyturn is ready: ").removesuffix("/inbox")
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
        assert server.out == [line], "one line of output, the address"
        assert server.err[0] == f"Starting Postgres in {home}"
        assert server.err[1] == "Migrating the database"
        async with httpx.AsyncClient(base_url=url) as api:
            assert (await api.get("/ok")).json() == {"ok": True}
            kept = (await api.post("/threads", json={})).json()["thread_id"]
        server.process.kill()  # Postgres goes on; the next server joins it, and stops it in the end
        await server.ends()
    assert runs(home)
    async with keyturn(KEYTURN_PORT="0", KEYTURN_DATA_DIR=str(home)) as server:
        url = (await server.says("ready")).split()[-1].removesuffix("/inbox")
        async with httpx.AsyncClient(base_url=url) as api:
            assert (await api.get(f"/threads/{kept}")).status_code == 200
        # A command joins the server's Postgres, and leaves it running.
        async with keyturn("keys", "create", "--name", "first", "--data-dir", home) as keys:
            assert await keys.ends() == 0, keys.err
        assert runs(home)
        assert await server.ends(signal.SIGINT) == 0
    assert not runs(home)
    # With a key, the door may be open; and a socket on all addresses is shown as one that a person can open.
    async with keyturn("serve", "--port", "0", "--host", "0.0.0.0", "--data-dir", home) as server:
        assert re.search(r" http://127\.0\.0\.1:\d+/inbox$", await server.says("ready"))
        assert await server.ends(signal.SIGTERM) == 0


@pytest.mark.parametrize("moment", ["Starting Postgres", "Migrating the database"])
async def test_sigterm_while_it_starts_leaves_nothing_running(open_directory: Path, moment: str) -> None:
    home = open_directory / moment
    async with keyturn("serve", "--port", "0", "--data-dir", home) as server:
        await server.says(moment)
        assert await server.ends(signal.SIGTERM) in (0, 128 + signal.SIGTERM)
    async with asyncio.timeout(10):
        while runs(home):
            await asyncio.sleep(0.05)
    assert not any("Traceback" in line for line in server.err)


async def test_a_worker_executes_what_a_server_takes(servers: Servers, fresh_database_url: str) -> None:
    server = await servers.start(fresh_database_url, max_concurrent_runs=0)
    async with (
        keyturn("worker", DATABASE_URL=fresh_database_url, KEYTURN_EXAMPLES="1") as worker,
        httpx.AsyncClient(base_url=server.url, timeout=60) as api,
    ):
        await worker.says("worker_ready")
        thread = (await api.post("/threads", json={})).json()["thread_id"]
        body = {"assistant_id": "weather", "input": {"messages": [{"role": "user", "content": "weather in Oslo?"}]}}
        done: Any = (await api.post(f"/threads/{thread}/runs/wait", json=body)).json()
        assert "Oslo" in done["messages"][-1]["content"]
        assert await worker.ends(signal.SIGTERM) == 0
    assert await server.stop() == 0


async def test_servers_that_start_at_once_on_a_fresh_home(open_directory: Path) -> None:
    """Each is told that the port is taken but one; nobody breaks the set-up of another."""
    home = open_directory / "together"
    port = free_port()
    async with (
        keyturn("serve", "--port", "0", "--data-dir", home) as one,
        keyturn("serve", "--port", str(port), "--data-dir", home) as two,
        keyturn("serve", "--port", str(port), "--data-dir", home) as three,
    ):
        await one.says("ready")
        async with asyncio.timeout(60):
            while two.process.returncode is None and three.process.returncode is None:
                await asyncio.sleep(0.05)
        loser, winner = (two, three) if two.process.returncode is not None else (three, two)
        assert await loser.ends() == 1
        assert loser.err == [
            f"keyturn: Port {port} of 127.0.0.1 is in use. Stop what listens there, or choose another: --port {port + 1}."
        ]
        await winner.says("ready")
        assert await one.ends(signal.SIGTERM) == 0
        assert runs(home)
        assert await winner.ends(signal.SIGTERM) == 0
    assert not runs(home)
