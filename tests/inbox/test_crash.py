"""What was decided survives the death of the process: answered once, and no effect twice."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import httpx
import psycopg
from desk import PROJECT, Desk
from processes import Servers

CALLS = [{"name": "hang", "args": {"name": "x"}}, {"name": "transfer", "args": {"to": "Ada", "amount": 1}}]


async def until(desk: Desk, item: dict[str, Any], status: str) -> dict[str, Any]:
    """The item once it has the status."""
    async with asyncio.timeout(40):
        while True:
            try:
                now = await desk.item(item["id"])
                if now["status"] == status:
                    return now
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)


async def test_kill_after_the_decision_and_in_the_middle_of_the_effect(servers: Servers, fresh_database_url: str) -> None:
    server = await servers.start(fresh_database_url, config=PROJECT, max_concurrent_runs=5)
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as api:
        desk = Desk(api)
        agent = await desk.agent(*CALLS, review={"hang": {}, "transfer": {}})
        thread, items = await desk.asked(agent)
        hang, transfer = sorted(items, key=lambda i: i["tool"] != "hang")

        # Decided by a process that executes nothing and then dies.
        server.settings["max_concurrent_runs"] = "0"
        await server.restart(signal.SIGKILL)
        assert (await desk.answer(transfer, "response", "No.")).status_code == 202
        run = (await desk.answer(hang, "accept")).json()["run_id"]
        assert [i["status"] for i in await desk.items(thread, "decided")] == ["decided"] * 2
        server.settings["max_concurrent_runs"] = "5"
        await server.restart(signal.SIGKILL)

        # Its successor starts the call, and dies in the middle of it.
        async with (
            await psycopg.AsyncConnection.connect(fresh_database_url, autocommit=True) as connection,
            asyncio.timeout(40),
        ):
            spent = "SELECT 1 FROM effect_permits WHERE spent_at IS NOT NULL"
            while await (await connection.execute(spent)).fetchone() is None:
                await asyncio.sleep(0.02)
        await server.restart(signal.SIGKILL)

        # The next one knows that it does not know, and says so.
        now = await until(desk, hang, "settled")
        assert now["outcome"]["state"] == "unknown_outcome"
        assert (await until(desk, transfer, "settled"))["outcome"]["state"] == "settled"
        values = await desk.join(thread, run)
        told = {m["tool_call_id"]: m["content"] for m in values["messages"] if m["type"] == "tool"}
        assert told[transfer["tool_call_id"]] == "No."
        assert "not known" in told[hang["tool_call_id"]]
        assert len(told) == 2
        await server.stop()
