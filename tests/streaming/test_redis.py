"""What is Redis' own: it may go away, come back empty or hang, and runs, cancels, answers and results do not notice."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import orjson
import pytest
from asgi import new_thread, serving
from redisserver import RedisServer
from replicas import Place, collect, eventually, stored
from sqlalchemy import text

from app.db.engine import Database
from app.db.listen import Listener
from app.errors import AppError
from app.resources import Resources
from app.settings import Settings
from app.streaming import flusher, redis, subscription
from app.streaming.channel import START, Frame
from app.streaming.stores import open_event_store

PROJECT = Path(__file__).parent / "project" / "langgraph.json"


@pytest.fixture
def place(database: Database, redis_server: RedisServer) -> Place:
    return Place(database, redis_server)


@pytest.fixture
def mortal(database: Database, mortal_redis: RedisServer) -> Place:
    return Place(database, mortal_redis)


@asynccontextmanager
async def two(place: Place) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient, Resources]]:
    """A replica that executes runs, and one that does not, with its resources."""
    assert place.redis is not None
    settings: dict[str, Any] = {"redis_url": place.redis.url, "config": PROJECT, "heartbeat_seconds": 0.2, "examples": False}
    async with (
        serving(place.database.url, **settings) as (here, _),
        serving(place.database.url, worker=False, **settings) as (there, resources),
    ):
        yield here, there, resources


async def ticking(api: httpx.AsyncClient, until: Path) -> str:
    """The address of a run that goes on until a file is there."""
    body = {"assistant_id": "ticks", "input": {"until": str(until)}, "stream_mode": ["custom", "values"]}
    made = await api.post(f"/threads/{await new_thread(api)}/runs", json=body)
    assert made.status_code == 200, made.text
    return f"/threads/{made.json()['thread_id']}/runs/{made.json()['run_id']}"


def run_id(run: str) -> UUID:
    return UUID(run.rpartition("/")[2])


def frames_of(response: httpx.Response) -> list[Frame]:
    assert response.status_code == 200
    blocks = [b for b in response.content.split(b"\r\n\r\n") if b and not b.startswith(b":")]
    return list(Frame.parse(b"".join(b + b"\r\n\r\n" for b in blocks)))


ALL = {"Last-Event-ID": "-1"}


async def test_a_run_and_its_readers_outlive_redis(mortal: Place, tmp_path: Path) -> None:
    assert mortal.redis is not None
    async with two(mortal) as (here, there, resources):
        run = await ticking(here, tmp_path / "gate")
        readers = [asyncio.create_task(api.get(f"{run}/stream", headers=ALL)) for api in (here, there)]
        seen = await collect(resources.events.subscribe(run_id(run), after=None), until=10)
        mortal.redis.kill()
        joined = asyncio.create_task(there.get(f"{run}/join"))
        (tmp_path / "gate").touch()
        local, remote = [frames_of(await reader) for reader in readers]
        ticks = [f for f in local if f.event == "custom"]
        assert [f.seq for f in local] == list(range(1, len(local) + 1))
        assert local[-1].event == "end"
        told = [f.event for f in remote if f.event != "custom"]
        assert told == ["metadata", "values", "gap", "values", "end"]
        assert remote[: len(seen)] == seen
        assert orjson.loads(next(f for f in remote if f.event == "gap").data)["reason"] == "unavailable"
        assert orjson.loads(remote[-2].data)["count"] == len(ticks)
        assert (await joined).json()["count"] == len(ticks)
        assert (await here.get(run)).json()["status"] == "success"


async def test_without_redis_runs_answers_and_cancels_go_on(mortal: Place, tmp_path: Path) -> None:
    assert mortal.redis is not None
    mortal.redis.kill()
    async with two(mortal) as (here, there, _):
        thread = await new_thread(here)
        asked = await here.post(f"/threads/{thread}/runs/wait", json={"assistant_id": "asks", "input": {}})
        [question] = asked.json()["__interrupt__"]
        told = await there.get(f"{asked.headers['content-location']}/join")
        assert told.json()["__interrupt__"] == [question]
        answered = await there.post(
            f"/threads/{thread}/runs/wait", json={"assistant_id": "asks", "command": {"resume": {question["id"]: "yes"}}}
        )
        assert answered.json() == {"answer": "yes"}
        run = await ticking(here, tmp_path / "gate")
        stopped = await there.post(f"{run}/cancel", params={"wait": True})
        assert stopped.status_code == 200
        assert (await there.get(run)).json()["status"] == "interrupted"


async def test_a_redis_that_hangs_delays_nothing_and_misses_nothing(mortal: Place, tmp_path: Path) -> None:
    assert mortal.redis is not None
    async with two(mortal) as (here, there, resources):
        run = await ticking(here, tmp_path / "gate")
        reader = resources.events.subscribe(run_id(run), after=None)
        await collect(reader, until=3)
        mortal.redis.freeze()
        beats = 0
        async with asyncio.timeout(10):
            while beats < 3:
                beats += not await anext(reader)
        (tmp_path / "gate").touch()
        started = time.monotonic()
        assert (await here.get(f"{run}/join")).json()["count"] > 3
        assert time.monotonic() - started < 1
        mortal.redis.thaw()
        whole = frames_of(await here.get(f"{run}/stream", headers=ALL))

        async def arrived() -> bool:
            return frames_of(await there.get(f"{run}/stream", headers=ALL))[-1].seq == whole[-1].seq

        await eventually(arrived)
        kept = frames_of(await there.get(f"{run}/stream", headers=ALL))
        assert [f.seq for f in kept] == list(range(1, len(kept) + 1))
        assert kept[-1].event == "end"


async def test_a_redis_that_comes_back_empty_goes_on(mortal: Place) -> None:
    assert mortal.redis is not None
    run = await mortal.run()
    async with mortal.replica() as here, mortal.replica(heartbeat_seconds=0.2) as there:
        reader = asyncio.create_task(collect(there.subscribe(run.id, after=None)))
        writer = here.open(run.id, 1)
        for _ in range(10):
            writer.publish("custom", b"1")
        await stored(there, run.id, 10)
        mortal.redis.kill()
        writer.publish("custom", b"2")
        mortal.redis.start()
        await stored(there, run.id)
        await mortal.end(run, writer)
        live = [f for f in await reader if f.event != "gap"]
        assert live[-1].id == (1, 12)
        assert len({f.id for f in live}) == len(live)
        gap, *rest = await collect(there.subscribe(run.id, after=None))
        assert (gap.event, gap.id) == ("gap", (1, 10))
        assert orjson.loads(gap.data) == {"run_id": str(run.id), "events": 10, "reason": "expired"}
        assert [f.id for f in rest] == [(1, 11), (1, 12)]


async def test_what_waits_for_redis_is_bounded_and_what_is_given_up_is_told(
    mortal: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mortal.redis is not None
    monkeypatch.setattr("app.streaming.writer.PENDING_BYTES", 50_000)
    monkeypatch.setattr(flusher, "PENDING_BYTES", 50_000)
    run = await mortal.run()
    async with mortal.replica() as here, mortal.replica() as there:
        writer = here.open(run.id, 1)
        writer.publish("custom", b"1")
        await stored(there, run.id)
        mortal.redis.kill()
        for _ in range(20):
            for _ in range(50):
                writer.publish("custom", b"2")
            assert writer.waiting < 60_000
            await asyncio.sleep(0.01)
        mortal.redis.start()
        await mortal.end(run, writer)
        assert len(await collect(here.subscribe(run.id, after=(1, 900)))) == 102, "memory here has them all"

        async def ended() -> bool:
            return await there.store.newest(run.id) == (1, 1002)

        await eventually(ended)
        gap, *kept = await collect(there.subscribe(run.id, after=None))
        told = orjson.loads(gap.data)
        assert (gap.event, told["reason"]) == ("gap", "not_stored")
        assert gap.id == (1, told["events"] + 1), "the event before was lost with Redis"
        assert [f.id for f in kept] == [(1, i) for i in range(gap.seq + 1, 1003)]
        assert told["events"] > 800


async def test_old_events_of_a_long_run_are_trimmed_with_a_notice(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis, "KEEP_EVENTS", 1000)
    monkeypatch.setattr(redis, "ENTRY_BYTES", 1000)
    run = await place.run()
    async with place.replica() as here, place.replica() as there:
        writer = here.open(run.id, 1)
        for i in range(6000):
            writer.publish("custom", b"%d" % i)
            if i % 500 == 0:
                await asyncio.sleep(0.03)
        await place.end(run, writer)
        await stored(there, run.id, 1000)
        first, *kept = await collect(there.subscribe(run.id, after=(1, 5)))
        assert (first.event, first.id) == ("gap", (1, 6001 - len(kept)))
        assert orjson.loads(first.data)["events"] == 6001 - len(kept) - 5
        assert 1000 <= len(kept) < 3000


async def test_events_expire_some_time_after_the_end(place: Place) -> None:
    assert place.redis is not None
    run = await place.run()
    with place.redis.client() as client:
        async with place.replica() as log:
            writer = log.open(run.id, 1)
            writer.publish("custom", b"1")
            await stored(log, run.id)
            assert int(client.ttl(f"keyturn:run:{run.id}")) > 24 * 3600
            await place.end(run, writer)
            await stored(log, run.id, 2)
            assert 0 < int(client.ttl(f"keyturn:run:{run.id}")) <= 24 * 3600
            client.delete(f"keyturn:run:{run.id}")
            assert await log.lacking(run.id) == "expired"


async def test_an_end_that_never_arrives_is_told_from_the_row(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has died between its commit and Redis."""
    monkeypatch.setattr(subscription, "GRACE", 0.2)
    run = await place.run()
    async with place.replica() as here, place.replica(heartbeat_seconds=0.1) as there:
        writer = here.open(run.id, 1)
        writer.publish("custom", b"1")
        reader = there.subscribe(run.id, after=None)
        assert [f.event for f in await collect(reader, until=1)] == ["custom"]
        async with place.database.transaction() as tx:
            await tx.execute(text("UPDATE runs SET status = 'success', finished_at = now() WHERE id = :id"), {"id": run.id})
        assert [f.event for f in await collect(reader)] == ["gap", "end"]


async def test_an_entry_of_an_older_claim_is_refused_and_a_repeated_one_changes_nothing(place: Place) -> None:
    run = await place.run()
    async with place.replica() as log:
        old = [Frame.make(1, i, "custom", b"1") for i in range(1, 4)]
        new = [Frame.make(2, i, "custom", b"2") for i in range(1, 4)]
        await log.store.append([(run.id, old[:2])])
        await log.store.append([(run.id, new)])
        await log.store.append([(run.id, old)])
        await log.store.append([(run.id, new), (run.id, [*new, Frame.make(2, 4, "end", b"{}")])])
        assert [f.id for f in await log.store.read(run.id, START, 100)] == [(1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (2, 4)]


async def test_one_command_waits_for_all_runs(place: Place) -> None:
    assert place.redis is not None
    runs = [await place.run() for _ in range(20)]
    async with place.replica() as here, place.replica() as there:
        readers = [asyncio.create_task(collect(there.subscribe(run.id, after=None))) for run in runs for _ in range(3)]
        writers = [here.open(run.id, 1) for run in runs]
        for writer in writers:
            writer.publish("custom", b"1")
        for run in runs:
            await stored(here, run.id)
        with place.redis.client() as client:

            async def waiting() -> list[Any]:
                return [c for c in client.client_list() if c["cmd"] == "xread" and "b" in c["flags"]]

            await eventually(waiting)
            assert len(await waiting()) == 1
        for run, writer in zip(runs, writers, strict=True):
            await place.end(run, writer)
        for frames in await asyncio.gather(*readers):
            assert [f.id for f in frames] == [(1, 1), (1, 2)]


@pytest.mark.parametrize("url", ["localhost:6379", "http://localhost", "redis://localhost:port"])
async def test_an_address_that_is_none_is_one_line(database: Database, url: str) -> None:
    with pytest.raises(AppError, match=r"^KEYTURN_REDIS_URL must look like redis://") as raised:
        async with open_event_store(Settings(redis_url=url), database, Listener(database.url)):
            pass
    assert "\n" not in str(raised.value)


async def test_a_missing_library_is_one_line(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "app.streaming.redis")
    monkeypatch.delattr("app.streaming.redis", raising=False)
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)  # type: ignore[arg-type]
    with pytest.raises(AppError, match=r"needs the package `redis`: pip install 'keyturn\[redis\]'\.$"):
        async with open_event_store(Settings(redis_url="redis://localhost"), database, Listener(database.url)):
            pass
