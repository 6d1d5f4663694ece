"""Everything behind PgBouncer in transaction mode, where no statement finds the session of the one before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psycopg
from processes import Servers, free_port
from programs import program
from psycopg.conninfo import conninfo_to_dict

from app.db.binaries import find_account
from app.db.engine import psycopg_url

PAYS = {
    "graph_id": "react",
    "config": {
        "configurable": {
            "model": {
                "provider": "scripted",
                "params": {
                    "rules": [
                        {"if": "pay", "tool_calls": [{"name": "refund", "args": {"order_id": "1", "amount": 5}}]},
                        {"after_tool": "refund", "reply": "Done: {result}"},
                    ],
                    "else": "{input}!",
                },
            },
            "tools": ["refund"],
            "review": {"tools": {"refund": {}}},
        }
    },
}
SLOW = {"graph_id": "react", "config": {"configurable": {"model": {"provider": "scripted", "params": {"latency_ms": 60_000}}}}}


@asynccontextmanager
async def pgbouncer(url: str, directory: Path) -> AsyncIterator[str]:
    """The address of a pooler in front of a database: three server connections for all."""
    path = program("pgbouncer", package="pgbouncer")
    behind, port = conninfo_to_dict(psycopg_url(url)), free_port()
    config = directory / "pgbouncer.ini"
    config.write_text(f"""
[databases]
* = host={behind["host"]} port={behind.get("port", 5432)} user={behind["user"]}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 3
max_client_conn = 500
server_reset_query_always = 1
""")
    config.chmod(0o644)
    account = find_account()  # PgBouncer does not run as root
    command = [path, *(["-u", account.name] if account is not None else []), str(config)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE)
    address = f"postgresql://{behind['user']}@127.0.0.1:{port}/{behind['dbname']}"
    try:
        async with asyncio.timeout(20):
            while True:
                try:
                    async with await psycopg.AsyncConnection.connect(address):
                        break
                except psycopg.OperationalError:
                    assert process.returncode is None, await process.communicate()
                    await asyncio.sleep(0.05)
        yield address
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_two_servers_work_behind_a_pooler(servers: Servers, fresh_database_url: str, open_directory: Path) -> None:
    async with pgbouncer(fresh_database_url, open_directory) as pooled:
        direct = {"KEYTURN_DATABASE_DIRECT_URL": fresh_database_url}
        one = await servers.start(pooled, environment=direct, heartbeat_seconds=1)
        two = await servers.start(pooled, environment=direct, heartbeat_seconds=1)
        async with (
            httpx.AsyncClient(base_url=one.url, timeout=30) as here,
            httpx.AsyncClient(base_url=two.url, timeout=30) as there,
        ):
            agent = (await here.post("/assistants", json=PAYS)).json()["assistant_id"]
            slow = (await here.post("/assistants", json=SLOW)).json()["assistant_id"]

            async def conversation(i: int) -> None:
                thread = (await here.post("/threads", json={})).json()["thread_id"]
                says = {"assistant_id": agent, "input": {"messages": [{"role": "user", "content": f"hi {i}"}]}}
                streamed = await here.post(f"/threads/{thread}/runs/stream", json=says)
                assert f"hi {i}!" in streamed.text
                says["input"]["messages"][0]["content"] = "pay"
                await there.post(f"/threads/{thread}/runs/wait", json=says)
                [item] = (await here.get("/inbox", params={"thread_id": thread})).json()["items"]
                decided = await there.post(f"/inbox/{item['id']}/response", json={"type": "accept"})
                assert decided.status_code == 202, decided.text
                run = f"/threads/{thread}/runs/{decided.json()['run_id']}"
                replayed = (await here.get(f"{run}/stream", headers={"Last-Event-ID": "-1"})).text
                assert "Done: " in replayed

            async with asyncio.timeout(60):
                await asyncio.gather(*(conversation(i) for i in range(12)))

            thread = (await here.post("/threads", json={})).json()["thread_id"]
            says = {"assistant_id": slow, "input": {"messages": [{"role": "user", "content": "hi"}]}}
            run = (await here.post(f"/threads/{thread}/runs", json=says)).json()["run_id"]
            # The cancel comes to the other process by NOTIFY, over its own session.
            async with asyncio.timeout(20):
                cancelled = await there.post(f"/threads/{thread}/runs/{run}/cancel", params={"wait": True})
            assert cancelled.status_code == 200
            delayed = {**says, "assistant_id": agent, "after_seconds": 0.1}
            later = (await there.post(f"/threads/{thread}/runs", json=delayed)).json()["run_id"]
            async with asyncio.timeout(30):
                assert (await here.get(f"/threads/{thread}/runs/{later}/join")).status_code == 200
            assert (await here.get("/ok", params={"check_db": 1})).status_code == 200
        for server in (one, two):
            assert await server.stop() == 0
            for trouble in ("prepared statement", "Traceback"):
                assert trouble not in server.tail(1000)
