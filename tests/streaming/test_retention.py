"""Events of old runs go, with their partition; those of runs that may still be read stay."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
import pytest
from asgi import HI, new_thread, serving
from sqlalchemy import text
from uuid_utils.compat import uuid7

from app.db.engine import Database, psycopg_url
from app.streaming.retention import PERIOD, Partition, Retention, first_id

NOW = datetime(2031, 3, 4, 7, 30, tzinfo=UTC)
NAMES = "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'run_events'::regclass"
INSERT = "INSERT INTO run_events (run_id, epoch, seq, event, data) VALUES (:id, 1, 1, 'custom', '{}')"


async def tables(database: Database) -> dict[str, int]:
    """Partitions with the number of their events."""
    async with database.transaction() as tx:
        names = await tx.scalars(
            text("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'run_events'::regclass")
        )
        return {name: await tx.scalar(text(f"SELECT count(*) FROM {name}")) or 0 for name in names.all()}


async def write(database: Database, *run_ids: UUID) -> None:
    async with database.transaction() as tx:
        for run_id in run_ids:
            await tx.execute(text(INSERT), {"id": run_id})


async def forget(database: Database) -> None:
    """Drop the present partition, as soon as no run of the server needs it: the shipped example makes one at start."""
    async with asyncio.timeout(20):
        while Partition.at(datetime.now(UTC)).name in await tables(database):
            await Retention(database, hours=1e-6).tidy(datetime.now(UTC) + timedelta(days=1))


def test_a_partition_holds_the_ids_of_its_hours() -> None:
    partition = Partition.at(NOW)
    assert (partition.name, partition.end - partition.start) == ("run_events_p20310304_06", PERIOD)
    assert Partition.named(partition.name) == partition
    low, high = Partition.at(datetime.now(UTC)).bounds
    assert low <= uuid7() < high
    assert partition.bounds[1] == Partition.at(NOW + PERIOD).bounds[0]


async def test_partitions_are_made_ahead_and_what_came_too_early_is_moved_there(database: Database) -> None:
    early, now = first_id(NOW + PERIOD), first_id(NOW)
    await write(database, early, UUID(int=1))
    retention = Retention(database, hours=1)
    await asyncio.gather(*(retention.tidy(NOW) for _ in range(3)))
    await write(database, now)
    there = await tables(database)
    assert {n: c for n, c in there.items() if "2031" in n} == {
        "run_events_p20310304_06": 1,
        "run_events_p20310304_12": 1,
        "run_events_p20310304_18": 0,
    }
    async with database.transaction() as tx:
        rest = (await tx.scalars(text("SELECT run_id FROM run_events_rest"))).all()
    assert UUID(int=1) in rest
    assert early not in rest


async def test_a_partition_is_kept_while_somebody_may_read_it(database: Database) -> None:
    async with serving(database.url) as (api, _):
        thread = await new_thread(api)
        body = {"assistant_id": "weather", "input": HI}
        await api.post(f"/threads/{thread}/runs/wait", json=body)
        later = (await api.post(f"/threads/{thread}/runs", json={**body, "after_seconds": 3600})).json()["run_id"]
        present = Partition.at(datetime.now(UTC)).name
        in_a_day = datetime.now(UTC) + timedelta(days=1)
        await Retention(database, hours=1e-6).tidy(in_a_day)
        assert present in await tables(database), "a run of then waits still"
        await api.post(f"/threads/{thread}/runs/{later}/cancel")
        await Retention(database, hours=1).tidy(in_a_day)
        assert present in await tables(database), "a run of then ended just now"
        await forget(database)
        assert present not in await tables(database)


async def test_a_client_is_told_that_events_are_gone_and_how_the_run_ended(database: Database) -> None:
    async with serving(database.url, examples=True) as (api, _):
        thread = await new_thread(api)
        done = await api.post(f"/threads/{thread}/runs/wait", json={"assistant_id": "weather", "input": HI})
        run = done.headers["content-location"]
        await forget(database)
        for header in ({"Last-Event-ID": "1-2"}, {"Last-Event-ID": "-1"}, {}):
            told = (await api.get(f"{run}/stream", headers=header)).text
            names = [line.removeprefix("event: ") for line in told.splitlines() if line.startswith("event: ")]
            assert names == ["metadata", "gap", "values", "end"]
            assert '"reason":"expired"' in told
        assert (await api.get(f"{run}/join")).json() == done.json()
        await api.post(f"/threads/{thread}/runs/wait", json={"assistant_id": "weather", "input": HI})
        told = (await api.get(f"{run}/stream", headers={"Last-Event-ID": "-1"})).text
        assert "event: values" not in told, "the values are those of a later run by now"


async def test_a_lock_that_somebody_holds_is_not_waited_for_long(database: Database) -> None:
    later = NOW.replace(year=2033)
    async with await psycopg.AsyncConnection.connect(psycopg_url(database.url)) as reader:
        await reader.execute("SELECT 1 FROM run_events_rest")
        async with asyncio.timeout(20):
            await Retention(database, hours=1).tidy(later)
        assert not any("2033" in name for name in await tables(database))
        await reader.rollback()
        await Retention(database, hours=1).tidy(later)
        assert any("2033" in name for name in await tables(database))


@pytest.mark.parametrize("name", ["run_events_rest", "other"])
def test_other_tables_are_no_partitions_of_a_time(name: str) -> None:
    assert Partition.named(name) is None
