"""The event log: same bytes for every reader, on every replica, from every position; nothing lost, nobody waited for.

All of it on both stores.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from replicas import Place, collect, eventually, sse, stored

from app.db.engine import Database, open_database
from app.runs.models import Run
from app.streaming import channel
from app.streaming.channel import Frame
from app.streaming.log import EventLog
from app.streaming.writer import RunWriter


@pytest.fixture(params=["postgres", "redis"])
def place(request: pytest.FixtureRequest, database: Database) -> Place:
    return Place(database, request.getfixturevalue("redis_server") if request.param == "redis" else None)


@pytest.fixture
async def run(place: Place) -> Run:
    return await place.run()


async def test_all_readers_see_the_same_bytes_on_every_replica(place: Place, run: Run) -> None:
    async with place.replica() as here, place.replica() as there:
        readers = [asyncio.create_task(collect(log.subscribe(run.id, after=None))) for log in (here, here, there)]
        writer = here.open(run.id, 1)
        for i in range(50):
            writer.publish("custom", b"%d" % i)
            if i % 10 == 0:
                await asyncio.sleep(0.03)
        await place.end(run, writer, ("values", b"{}"))
        first, second, remote = [sse(frames) for frames in await asyncio.gather(*readers)]
        assert first == second == remote
        assert first.startswith(b"event: custom\r\ndata: 0\r\nid: 1-1\r\n\r\nevent: custom\r\ndata: 1\r\nid: 1-2\r\n\r\n")
        assert first.endswith(b"event: values\r\ndata: {}\r\nid: 1-51\r\n\r\nevent: end\r\ndata: {}\r\nid: 1-52\r\n\r\n")
        late = sse(await collect(there.subscribe(run.id, after=None)))
        assert late == first


async def test_a_reader_that_comes_back_gets_exactly_the_rest(place: Place, run: Run) -> None:
    async with place.replica() as here, place.replica() as there:
        writer = here.open(run.id, 1)
        for i in range(9):
            writer.publish("custom", b"%d" % i)
        whole = [f async for b in _ended(place, run, writer, here) for f in b]
        for log in (here, there):
            for i, frame in enumerate(whole[:-1]):
                assert await collect(log.subscribe(run.id, after=frame.id)) == whole[i + 1 :]


async def _ended(place: Place, run: Run, writer: RunWriter, log: EventLog) -> AsyncIterator[list[Frame]]:
    reader = log.subscribe(run.id, after=None)
    await place.end(run, writer)
    async for batch in reader:
        yield batch


async def test_readers_of_a_live_run_do_not_touch_the_store(place: Place, run: Run) -> None:
    """The whole stream comes from memory, although nothing can be read anywhere else."""
    async with place.replica() as log:
        writer = log.open(run.id, 1)
        reader = log.subscribe(run.id, after=None)
        writer.publish("custom", b"1")
        async with place.unreadable():
            assert len(await collect(reader, until=1)) == 1
            writer.publish("custom", b"2")
            assert len(await collect(reader, until=1)) == 1


async def test_a_slow_reader_holds_up_nobody_and_misses_nothing(
    place: Place, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MEMORY", 10_000)
    async with place.replica() as log:
        writer = log.open(run.id, 1)
        slow = log.subscribe(run.id, after=None)
        first = await _first(slow, writer)
        quick = asyncio.create_task(collect(log.subscribe(run.id, after=None)))
        for i in range(3000):
            writer.publish("custom", b'"%0100d"' % i)
            if i % 500 == 0:
                await asyncio.sleep(0.03)

        async def trimmed() -> bool:
            held = log._topics[run.id].channel
            return held is not None and held.since > (1, 2000)

        await eventually(trimmed)
        await place.end(run, writer)
        seen = await quick
        assert [f.seq for f in seen] == list(range(1, 3003))
        assert sse(first + await collect(slow)) == sse(seen)


@pytest.mark.parametrize("claim", [1, 2])
async def test_what_memory_lets_go_of_while_a_reader_looks_into_the_store_is_not_missed(
    place: Place, run: Run, monkeypatch: pytest.MonkeyPatch, claim: int
) -> None:
    monkeypatch.setattr(channel, "MEMORY", 10_000)
    async with place.replica() as log:
        asked, answer, read = asyncio.Event(), asyncio.Event(), log.store.read

        async def late(*where: Any) -> list[Frame]:
            frames = await read(*where)
            if not frames:
                asked.set()
                await answer.wait()
            return frames

        if claim == 2:
            await place.take_over(run)
            writer = log.open(run.id, claim)
        monkeypatch.setattr(log.store, "read", late)
        reader = asyncio.create_task(collect(log.subscribe(run.id, after=None)))
        await asked.wait()
        if claim == 1:
            writer = log.open(run.id, claim)
        for i in range(200):
            writer.publish("custom", b'"%0100d"' % i)

        async def trimmed() -> bool:
            held = log._topics[run.id].channel
            return held is not None and held.since[1] > 0

        await eventually(trimmed)
        answer.set()
        await place.end(run, writer)
        assert [f.id for f in await reader] == [(claim, seq) for seq in range(1, 202)]


async def test_what_the_store_has_lost_is_told(place: Place, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MEMORY", 10_000)
    async with place.replica() as log:
        writer = log.open(run.id, 1)
        for i in range(200):
            writer.publish("custom", b'"%0100d"' % i)
        await stored(log, run.id, 200)
        held = log._topics[run.id].channel
        assert held is not None
        await place.lose()
        reader = log.subscribe(run.id, after=(1, 10))
        missing, *there = await collect(reader, until=201 - held.since[1])
        assert (missing.id, missing.event) == (held.since, "gap")
        assert orjson.loads(missing.data) == {
            "run_id": str(run.id),
            "events": held.since[1] - 10,
            "reason": "not_stored",
        }
        assert [f.seq for f in there] == list(range(held.since[1] + 1, 201))


async def _first(reader: AsyncIterator[list[Frame]], writer: RunWriter) -> list[Frame]:
    writer.publish("custom", b"0")
    return await collect(reader, until=1)


async def test_a_stale_epoch_writes_nothing(place: Place, run: Run) -> None:
    async with place.replica() as here, place.replica() as there:
        zombie = here.open(run.id, 1)
        await place.take_over(run)
        owner = there.open(run.id, 2)
        owner.publish("custom", b'"owner"')
        await stored(there, run.id)
        zombie.publish("custom", b'"zombie"')
        await place.end(run, owner)
        async with place.replica() as log:
            assert [(f.id, f.event) for f in await collect(log.subscribe(run.id, after=None))] == [
                ((2, 1), "custom"),
                ((2, 2), "end"),
            ]
        zombie.abandon()


async def test_a_reader_goes_on_across_a_takeover(place: Place, run: Run) -> None:
    async with place.replica() as first, place.replica() as second, place.replica() as reading:
        remote = asyncio.create_task(collect(reading.subscribe(run.id, after=None)))
        local = asyncio.create_task(collect(second.subscribe(run.id, after=None)))
        before = first.open(run.id, 1)
        before.publish("custom", b"1")
        await stored(reading, run.id)
        await place.take_over(run)
        before.abandon()
        after = second.open(run.id, 2)
        after.publish("custom", b"2")
        await place.end(run, after)
        for frames in await asyncio.gather(remote, local):
            assert [f.id for f in frames] == [(1, 1), (2, 1), (2, 2)]


async def test_without_any_notification_the_stream_still_ends(place: Place, run: Run) -> None:
    async with place.replica() as here, place.replica(listening=False, heartbeat_seconds=0.1) as deaf:
        reader = asyncio.create_task(collect(deaf.subscribe(run.id, after=None)))
        writer = here.open(run.id, 1)
        for i in range(5):
            writer.publish("custom", b"%d" % i)
        await place.end(run, writer)
        assert len(await reader) == 6


async def test_a_store_that_throws_its_clients_out_loses_no_event(place: Place, fresh_database_url: str) -> None:
    async with open_database(fresh_database_url) as database:
        place.database = database
        run = await place.run()
        async with place.replica(heartbeat_seconds=0.1) as log, place.hostile() as throw_out:
            writer = log.open(run.id, 1)
            for i in range(20):
                writer.publish("custom", b"%d" % i)
                await asyncio.sleep(0.01)
                await throw_out()
            await database.engine.dispose()
            await place.end(run, writer)
            seen = await collect(log.subscribe(run.id, after=None))
            assert [f.seq for f in seen] == list(range(1, 22))


async def test_heartbeats_come_while_nothing_happens(place: Place, run: Run) -> None:
    async with place.replica(heartbeat_seconds=0.05) as log:
        log.open(run.id, 1)
        reader = log.subscribe(run.id, after=None)
        async with asyncio.timeout(5):
            assert [await anext(reader), await anext(reader)] == [[], []]


async def test_live_only_starts_now_and_modes_filter(place: Place, run: Run) -> None:
    async with place.replica() as log:
        writer = log.open(run.id, 1)
        writer.publish("values", b"1")
        live = log.subscribe(run.id, after=None, live_only=True)
        messages = log.subscribe(run.id, after=None, modes=frozenset({"messages-tuple"}))
        writer.publish("messages|child:1", b"2")
        writer.publish("messages/partial", b"3")
        await place.end(run, writer, ("error", b"{}"))
        assert [f.event for f in await collect(live)] == ["messages|child:1", "messages/partial", "error", "end"]
        assert [f.event for f in await collect(messages)] == ["messages|child:1", "messages/partial", "error", "end"]


async def test_a_run_that_ended_without_running_ends_its_streams(place: Place, run: Run) -> None:
    async with place.replica() as here, place.replica() as there:
        readers = [asyncio.create_task(collect(log.subscribe(run.id, after=None))) for log in (here, there)]
        await asyncio.sleep(0)
        async with place.database.transaction() as tx:
            await here.close(tx, run.id)
        for frames in await asyncio.gather(*readers):
            assert [(f.id, f.event) for f in frames] == [((0, 1), "end")]


async def test_a_run_that_ended_while_nobody_had_it_ends_behind_what_it_had(place: Place, run: Run) -> None:
    async with place.replica() as log:
        await place.take_over(run, 3)
        writer = log.open(run.id, 3)
        writer.publish("custom", b"1")
        await stored(log, run.id)
        writer.abandon()
        reader = log.subscribe(run.id, after=(3, 1))
        async with place.database.transaction() as tx:
            await log.close(tx, run.id)
        assert [(f.id, f.event) for f in await collect(reader)] == [((3, 2), "end")]


async def test_a_finish_that_did_not_commit_can_be_tried_again(place: Place, run: Run) -> None:
    async with place.replica() as log:
        writer = log.open(run.id, 1)
        reader = log.subscribe(run.id, after=None)
        writer.publish("custom", b"1")
        await writer.settle()
        async with place.database.engine.connect() as connection, place.database.sessions(bind=connection) as tx:
            await writer.finish(tx, [("end", b"{}")])
            await tx.rollback()
        await place.end(run, writer)
        assert [f.id for f in await collect(reader)] == [(1, 1), (1, 2)]


async def test_stopping_ends_every_stream(place: Place, run: Run) -> None:
    async with place.replica() as log:
        log.open(run.id, 1)
        readers = [asyncio.create_task(collect(log.subscribe(run.id, after=None))) for _ in range(10)]
        await asyncio.sleep(0)
        log.shut()
        assert await asyncio.gather(*readers) == [[]] * 10


async def test_topics_of_the_past_are_forgotten(place: Place, run: Run) -> None:
    async with place.replica() as log:
        writer = log.open(run.id, 1)
        reader = log.subscribe(run.id, after=None)
        await place.end(run, writer)
        await collect(reader)
        await collect(log.subscribe(run.id, after=None))
        assert log._topics == {}
