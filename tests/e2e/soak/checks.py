"""What must be true when all is quiet again, asked of the tables and of the API."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import httpx
import psycopg
from psycopg.rows import dict_row

from soak.load import Told

QUIET_SECONDS = 90.0
WATCH = """
CREATE TABLE soak_effects (key text, at timestamptz DEFAULT now());
CREATE TABLE soak_ends (run_id uuid, status text, at timestamptz DEFAULT now());
CREATE TABLE soak_faults (what text);
CREATE FUNCTION soak_watch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF TG_OP = 'UPDATE' AND OLD.status IN ('success', 'error', 'timeout', 'interrupted') AND NEW.status <> OLD.status THEN
        INSERT INTO soak_faults VALUES (format('run %s went from %s to %s', NEW.id, OLD.status, NEW.status));
    END IF;
    IF NEW.status IN ('success', 'error', 'timeout', 'interrupted') AND (TG_OP = 'INSERT' OR NEW.status <> OLD.status) THEN
        INSERT INTO soak_ends (run_id, status) VALUES (NEW.id, NEW.status);
    END IF;
    IF NEW.status = 'running'
       AND (SELECT count(*) FROM runs WHERE thread_id = NEW.thread_id AND status = 'running' AND id <> NEW.id) > 0 THEN
        INSERT INTO soak_faults VALUES (format('thread %s runs twice', NEW.thread_id));
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER soak_watch AFTER INSERT OR UPDATE ON runs FOR EACH ROW EXECUTE FUNCTION soak_watch();
"""
# Each query finds what must not be.
NEVER = {
    "a status that came after the end, or two runs of a thread at once": "SELECT what FROM soak_faults",
    "a run that ended twice": "SELECT run_id FROM soak_ends GROUP BY run_id HAVING count(*) > 1",
    "an effect that happened twice": "SELECT key FROM soak_effects GROUP BY key HAVING count(*) > 1",
    "a decision with another number of records than one": """
        SELECT i.id FROM inbox_items i WHERE i.decision IS NOT NULL AND 1 <> (
            SELECT count(*) FILTER (WHERE event = 'decided') - count(*) FILTER (WHERE event = 'revoked')
            FROM inbox_decisions d WHERE d.item_id = i.id)""",
    "a settled accept or edit whose permit was not spent": """
        SELECT i.id FROM inbox_items i WHERE i.status = 'settled' AND i.bound AND i.decision->>'type' IN ('accept', 'edit')
          AND NOT EXISTS (SELECT 1 FROM effect_permits p WHERE p.item_id = i.id AND p.spent_at IS NOT NULL)""",
    "a permit that was spent without a decision for it": """
        SELECT p.item_id FROM effect_permits p WHERE p.spent_at IS NOT NULL AND NOT EXISTS (
            SELECT 1 FROM inbox_decisions d WHERE d.item_id = p.item_id AND d.event = 'decided'
              AND d.detail->'decision'->>'type' IN ('accept', 'edit'))""",
    "a question that nobody asks any more": "SELECT id FROM inbox_items WHERE status IN ('pending', 'decided', 'resuming')",
}


async def quiet(url: str) -> list[str]:
    """Wait until no run is left to do. What is left after a long while."""
    deadline = asyncio.get_running_loop().time() + QUIET_SECONDS
    while True:
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            rows = await (
                await connection.execute(
                    "SELECT id, thread_id, status, kind, stop_reason, epoch, attempts, waiting_for, owner FROM runs "
                    "WHERE status IN ('pending', 'running')"
                )
            ).fetchall()
        if not rows or asyncio.get_running_loop().time() > deadline:
            return [f"a run that does not end: {row}" for row in rows]
        await asyncio.sleep(0.5)


async def broken(url: str, api: httpx.AsyncClient, told: list[Told]) -> list[str]:
    """Everything that is not as it must be."""
    found = [f"stuck in {one.stuck}: {one.thread}" for one in told if one.stuck]
    async with await psycopg.AsyncConnection.connect(url, autocommit=True, row_factory=dict_row) as connection:
        for what, query in NEVER.items():
            found += [f"{what}: {dict(row)}" for row in await (await connection.execute(query)).fetchall()]
        effects, spent = 0, 0
        for row in await (await connection.execute("SELECT count(*) AS n FROM soak_effects")).fetchall():
            effects = row["n"]
        for row in await (
            await connection.execute("SELECT count(*) AS n FROM effect_permits WHERE spent_at IS NOT NULL")
        ).fetchall():
            spent = row["n"]
        if effects > spent:
            found.append(f"{effects} effects on {spent} permits")
        runs = {
            str(row["id"]): row["status"] for row in await (await connection.execute("SELECT id, status FROM runs")).fetchall()
        }
    for one in told:
        found += [f"an accepted run is gone: {run} of {one.thread}" for run in one.runs if not one.forgets and run not in runs]
        state = (await api.get(f"/threads/{one.thread}/state")).json()
        found += _said(one, state.get("values", {}).get("messages", []), runs)
    return found


def _said(one: Told, messages: list[dict[str, Any]], runs: dict[str, str]) -> list[str]:
    found = []
    calls = Counter(call["id"] for m in messages if m["type"] == "ai" for call in m["tool_calls"])
    answered = Counter(m["tool_call_id"] for m in messages if m["type"] == "tool")
    cancelled = any(runs.get(run, "interrupted") == "interrupted" for run in one.runs)
    for call, count in calls.items():
        if answered[call] > 1 or count > 1 or (answered[call] == 0 and not cancelled):
            found.append(f"a call with {answered[call]} tool messages: {call} of {one.thread}")
    found += [f"a tool message without a call: {call} of {one.thread}" for call in answered if call not in calls]
    texts = [m["content"] for m in messages if m["type"] == "human"]
    if len(set(texts)) != len(texts):
        found.append(f"something was said twice: {texts} in {one.thread}")
    expected = [
        text
        for run, text in zip(one.runs, one.said, strict=True)
        if runs.get(run) in ("success", "error")  # what was cancelled may have come too early to be heard
    ]
    if [text for text in texts if text in expected] != expected:
        found.append(f"said {expected}, heard {texts} in {one.thread}")
    return found
