"""An upgrade in the middle of everything: a database of the first migration, with runs that run, wait and ask.

`upgrade/database_0001.json` was left by a process of that version that stopped dead.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from alembic import command
from alembic.config import Config
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from processes import Servers
from psycopg.rows import dict_row

from app.db.engine import psycopg_url
from app.db.migrate import MIGRATIONS, migrate, pending

HERE = Path(__file__).parent / "upgrade"
TABLES = (
    *("assistants", "assistant_versions", "threads", "runs", "run_events"),
    *("inbox_items", "inbox_decisions", "inbox_events"),
    *("checkpoints", "checkpoint_blobs", "checkpoint_writes"),
)
SEQUENCES = {"inbox_decisions": "id", "inbox_events": "id"}


async def restore(url: str, tables: dict[str, list[dict[str, Any]]]) -> None:
    """The schema of the first migration, filled."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["url"] = url
    await asyncio.to_thread(command.upgrade, config, "0001")
    async with await psycopg.AsyncConnection.connect(psycopg_url(url), autocommit=True, row_factory=dict_row) as connection:
        await AsyncPostgresSaver(connection).setup()
        for table in TABLES:
            fill = f"INSERT INTO {table} SELECT * FROM jsonb_populate_recordset(NULL::{table}, %s::jsonb)"
            if table in SEQUENCES:
                fill = fill.replace(" SELECT", " OVERRIDING SYSTEM VALUE SELECT", 1)
            await connection.execute(fill, [json.dumps(tables[table])])
        for table, column in SEQUENCES.items():
            await connection.execute(
                f"SELECT setval(pg_get_serial_sequence('{table}', '{column}'), max({column})) FROM {table}"
            )


@pytest.fixture
def left() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "database_0001.json").read_text())
    return found


async def test_nothing_is_lost_in_an_upgrade(empty_database_url: str, left: dict[str, Any], servers: Servers) -> None:
    await restore(empty_database_url, left["tables"])
    assert await pending(empty_database_url)
    await migrate(empty_database_url)
    server = await servers.start(empty_database_url, environment={"UPGRADE_GO": "1"}, config=HERE / "langgraph.json")
    ids = left["ids"]
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as api:
        busy = f"/threads/{ids['busy']}"
        for run in ("running", "queued"):
            await api.get(f"{busy}/runs/{ids[run]}/join")
            assert (await api.get(f"{busy}/runs/{ids[run]}")).json()["status"] == "success"
        assert await texts(api, ids["busy"]) == ["one", "first: one", "second", "two", "first: two", "second"]
        replay = (await api.get(f"{busy}/runs/{ids['running']}/stream", headers={"Last-Event-ID": "-1"})).text
        assert replay.index("id: 1-1\r\n") < replay.index("event: attempt") < replay.index("event: end")

        for thread, answer in ((ids["paused"], {"type": "response", "args": "yes"}), (ids["desk"], {"type": "accept"})):
            [item] = (await api.get("/inbox", params={"thread_id": thread})).json()["items"]
            decided = await api.post(f"/inbox/{item['id']}/response", json=answer)
            assert decided.status_code == 202, decided.text
            await api.get(f"/threads/{thread}/runs/{decided.json()['run_id']}/join")
        assert await texts(api, ids["paused"]) == ["ask", "answered: yes", "second"]
        assert (await texts(api, ids["desk"]))[-1].startswith("Done: ")
        assert len(await texts(api, ids["done"])) == 4
        assert (await api.get("/inbox", params={"thread_id": ids["desk"]})).json()["items"] == []


async def texts(api: httpx.AsyncClient, thread: str) -> list[str]:
    state = (await api.get(f"/threads/{thread}/state")).json()
    return [m["content"] for m in state["values"]["messages"]]
