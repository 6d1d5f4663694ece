"""The database goes away for longer than a lease and comes back: everything waits, says so, and goes on by itself."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
from asgi import serving
from commands import HI, STOP_WITHIN, keyturn
from processes import Servers, free_port
from sqlalchemy import text

from app.db.embedded import EmbeddedPostgres
from app.db.migrate import migrate

LEASE = 1.0
SLOWLY = {"else": "{input}!", "latency_ms": 1500}
AGENT = {"graph_id": "react", "config": {"configurable": {"model": {"provider": "scripted", "params": SLOWLY}}}}


async def answers(api: httpx.AsyncClient, path: str, status: int) -> dict[str, str]:
    """What a route says, once it says it with a status."""
    async with asyncio.timeout(30):
        while (response := await api.get(path)).status_code != status:
            await asyncio.sleep(0.02)
    body: dict[str, str] = response.json()
    return body


async def test_a_server_and_a_worker_outlive_an_outage_longer_than_their_leases(
    servers: Servers, open_directory: Path, postgres: EmbeddedPostgres
) -> None:
    home, settings, port = open_directory / "outage", {"fsync": "off"}, free_port()
    with EmbeddedPostgres(home, settings) as database:
        await migrate(database.url())
        env = {"DATABASE_URL": database.url(), "KEYTURN_EXAMPLES": "0", "KEYTURN_LEASE_SECONDS": str(LEASE)}
        server = await servers.start(database.url(), examples=0, worker=0)
        async with (
            keyturn("worker", "--health-port", str(port), **env) as worker,
            httpx.AsyncClient(base_url=server.url, timeout=30) as api,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as health,
        ):
            await worker.says("worker_ready")
            agent = (await api.post("/assistants", json=AGENT)).json()["assistant_id"]
            thread = (await api.post("/threads", json={})).json()["thread_id"]
            body = {"assistant_id": agent, "input": HI}
            one, two = [(await api.post(f"/threads/{thread}/runs", json=body)).json()["run_id"] for _ in range(2)]
            async with asyncio.timeout(30):
                while (await api.get(f"/threads/{thread}/runs/{one}")).json()["status"] != "running":
                    await asyncio.sleep(0.02)

            assert database.postmaster_pid is not None
            os.kill(database.postmaster_pid, signal.SIGQUIT)
            for each in (api, health):
                assert (await answers(each, "/ok?check_db=1", 503))["code"] == "database_unavailable"
                assert (await each.get("/ok")).status_code == 200, "it lives"
            refused = await api.post("/threads", json={})
            assert (refused.status_code, refused.json()["code"]) == (503, "database_unavailable")
            await worker.says("leases_not_renewed")
            await asyncio.sleep(2 * LEASE)  # as long as an outage of a minute is for leases of half a minute

            with EmbeddedPostgres(home, settings):
                for each in (api, health):
                    await answers(each, "/ok?check_db=1", 200)
                async with asyncio.timeout(60):
                    for run in (one, two):
                        await api.get(f"/threads/{thread}/runs/{run}/join")
                        assert (await api.get(f"/threads/{thread}/runs/{run}")).json()["status"] == "success"
                    later = await api.post(f"/threads/{thread}/runs", json={**body, "after_seconds": 0.1})
                    values = (await api.get(f"/threads/{thread}/runs/{later.json()['run_id']}/join")).json()
                assert [m["content"] for m in values["messages"]] == ["hi", "hi!"] * 3
                worker.process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(STOP_WITHIN):
                    assert await worker.ends() == 0
                assert await server.stop() == 0


async def test_a_database_of_an_older_version_is_not_ready_and_one_of_a_newer_is(fresh_database_url: str) -> None:
    async with serving(fresh_database_url, examples=False) as (api, resources):

        async def ready(revision: str) -> httpx.Response:
            async with resources.database.transaction() as tx:
                await tx.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
            return await api.get("/ok", params={"check_db": 1})

        assert (await api.get("/ok", params={"check_db": 1})).status_code == 200
        behind = await ready("0001")
        assert (behind.status_code, behind.json()["code"]) == (503, "database_outdated")
        assert (await api.get("/ok")).status_code == 200
        # While a cluster is upgraded, processes of the old version go on until they are replaced.
        assert (await ready("9999")).status_code == 200
        async with resources.database.transaction() as tx:
            await tx.execute(text("DROP TABLE alembic_version"))
        assert (await api.get("/ok", params={"check_db": 1})).json()["code"] == "database_outdated"
