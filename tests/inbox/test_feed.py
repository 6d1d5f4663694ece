"""The live feed: nothing skipped, nothing foreign, resumable anywhere, notifications or not."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import httpx
import psycopg
import pytest
from desk import Desk
from processes import Server
from uuid_utils.compat import uuid7

from app.auth import Principal
from app.db.engine import Database
from app.db.listen import Listener
from app.inbox.feed import InboxFeed, parse_position
from app.resources import Resources
from app.streaming.channel import Frame

CALL = {"name": "transfer", "args": {"to": "Ada", "amount": 1500}}
ME = Principal("default", "local")
INSERT = "INSERT INTO inbox_events (tenant_id, item_id, event, data) VALUES (%s, %s, 'updated', %s)"


@asynccontextmanager
async def feeding(database: Database, *, deaf: bool = False, heartbeat: float = 0.05) -> AsyncIterator[InboxFeed]:
    """A feed at work; a deaf one hears no notification."""
    listener = Listener(database.url)
    feed = InboxFeed(database, listener, heartbeat_seconds=heartbeat)
    tasks = [asyncio.create_task(feed.run())]
    if not deaf:
        tasks.append(asyncio.create_task(listener.run()))
        await listener.connected.wait()
    try:
        yield feed
    finally:
        feed.shut()
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def tell(connection: Any, n: int, tenant: str = "default") -> None:
    await connection.execute(INSERT, (tenant, uuid7(), json.dumps({"n": n})))


async def numbers(frames: AsyncIterator[list[Frame]], count: int) -> list[Frame]:
    """The next events, heartbeats left out."""
    found: list[Frame] = []
    async with asyncio.timeout(20):
        async for batch in frames:
            found += [f for f in batch if f.event != "snapshot"]
            if len(found) >= count:
                return found
    raise AssertionError("the stream ended")


def read(frames: list[Frame]) -> list[int]:
    return [json.loads(f.data)["n"] for f in frames]


async def test_no_event_is_skipped_however_transactions_commit(database: Database) -> None:
    rng = random.Random(5)
    async with feeding(database) as feed:
        early = await feed.subscribe(ME, after=(0, 0))
        first = await asyncio.gather(*(writer(database, range(w * 30, w * 30 + 15), rng) for w in range(6)), numbers(early, 90))
        late = await feed.subscribe(ME, after=(0, 0))
        middle = first[-1][40].id
        resumed = await feed.subscribe(ME, after=middle)
        rest = await asyncio.gather(
            *(writer(database, range(w * 30 + 15, w * 30 + 30), rng) for w in range(6)), numbers(early, 90)
        )
        everything = first[-1] + rest[-1]
        assert sorted(read(everything)) == list(range(180))
        assert [f.id for f in everything] == sorted(f.id for f in everything)
        assert read(await numbers(late, 180)) == read(everything)
        assert read(await numbers(resumed, 139)) == read(everything)[41:]


async def writer(database: Database, numbers_: range, rng: random.Random) -> None:
    """Transactions that take their id first, then wait a while, and sometimes roll back."""
    async with await psycopg.AsyncConnection.connect(database.url) as connection:
        for n in numbers_:
            await connection.execute("SELECT pg_current_xact_id()")
            await asyncio.sleep(rng.random() * 0.01)
            if rng.random() < 0.2:
                await tell(connection, -1)
                await connection.rollback()
            await tell(connection, n)
            await asyncio.sleep(rng.random() * 0.01)
            await connection.execute("SELECT pg_notify('keyturn_inbox', '')")
            await connection.commit()


async def test_an_older_transaction_holds_later_events_back(database: Database) -> None:
    async with feeding(database) as feed, await psycopg.AsyncConnection.connect(database.url) as slow:
        frames = await feed.subscribe(ME, after=(0, 0))
        await tell(slow, 1)
        async with await psycopg.AsyncConnection.connect(database.url) as quick:
            await tell(quick, 2)
        waiting = asyncio.create_task(numbers(frames, 2))
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
        await slow.commit()
        assert read(await waiting) == [1, 2]


async def test_without_notifications_the_heartbeat_finds_everything(database: Database) -> None:
    async with (
        feeding(database, deaf=True) as feed,
        await psycopg.AsyncConnection.connect(database.url, autocommit=True) as connection,
    ):
        frames = await feed.subscribe(ME, after=None)
        [snapshot] = await anext(frames)
        assert snapshot.event == "snapshot"
        assert json.loads(snapshot.data)["items"] == []
        assert await anext(frames) == []
        await tell(connection, 1)
        assert read(await numbers(frames, 1)) == [1]
        again = await feed.subscribe(ME, after=parse_position(f"{snapshot.epoch}-{snapshot.seq}"))
        assert read(await numbers(again, 1)) == [1]


async def test_a_slow_reader_goes_on_from_the_table(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.inbox.feed.BATCH", 7)
    async with feeding(database) as feed, await psycopg.AsyncConnection.connect(database.url, autocommit=True) as connection:
        feed._recent = type(feed._recent)(maxlen=10)
        monkeypatch.setattr("app.inbox.feed.MEMORY", 10)
        slow = await feed.subscribe(ME, after=(0, 0))
        await tell(connection, 0)
        assert read(await numbers(slow, 1)) == [0]
        quick = await feed.subscribe(ME, after=(0, 0))
        for n in range(1, 60):
            await tell(connection, n)
        assert read(await numbers(quick, 60)) == list(range(60))
        assert read(await numbers(slow, 59)) == list(range(1, 60))


async def test_other_tenants_hear_nothing(database: Database) -> None:
    async with feeding(database) as feed, await psycopg.AsyncConnection.connect(database.url, autocommit=True) as connection:
        mine = await feed.subscribe(ME, after=(0, 0))
        theirs = await feed.subscribe(Principal("other", "eve"), after=(0, 0))
        for n in range(4):
            await tell(connection, n, "default" if n % 2 else "other")
        assert read(await numbers(mine, 2)) == [1, 3]
        assert read(await numbers(theirs, 2)) == [0, 2]


async def test_nobody_listens_and_nothing_is_read(database: Database) -> None:
    async with feeding(database) as feed, await psycopg.AsyncConnection.connect(database.url, autocommit=True) as connection:
        frames = await feed.subscribe(ME, after=(0, 0))
        await tell(connection, 1)
        assert read(await numbers(frames, 1)) == [1]
        await frames.aclose()  # type: ignore[attr-defined]
        await tell(connection, 2)
        async with asyncio.timeout(5):
            while feed._end is not None:
                await asyncio.sleep(0.01)
        frames = await feed.subscribe(ME, after=(0, 0))
        assert read(await numbers(frames, 2)) == [1, 2]
        feed.shut()
        assert [batch async for batch in frames if batch] == []


async def test_events_of_a_restored_database_are_left_alone(database: Database) -> None:
    async with feeding(database) as feed, await psycopg.AsyncConnection.connect(database.url, autocommit=True) as connection:
        await connection.execute(
            "INSERT INTO inbox_events (tenant_id, xid, item_id, event, data) VALUES ('default', '99999999999', %s, '', '{}')",
            (uuid7(),),
        )
        frames = await feed.subscribe(ME, after=(0, 0))
        await tell(connection, 1)
        assert read(await numbers(frames, 1)) == [1]
        frames = await feed.subscribe(ME, after=(99999999999, 1))
        [first] = await anext(frames)
        assert first.event == "snapshot"
        await tell(connection, 2)
        assert read(await numbers(frames, 1)) == [2]


async def test_the_life_of_an_item(desk: Desk, resources: Resources) -> None:
    feed = resources.feed
    frames = await feed.subscribe(ME, after=None)
    await anext(frames)
    _, [item] = await desk.asked(await desk.agent(CALL))
    await desk.settle(item, "accept")
    told = await numbers(frames, 4)
    assert [f.event for f in told] == ["created", "decided", "updated", "closed"]
    items = [json.loads(f.data) for f in told]
    assert [i["status"] for i in items] == ["pending", "decided", "resuming", "settled"]
    assert [i["version"] for i in items] == [1, 2, 3, 4]
    assert items[0] == item
    assert items[-1] == await desk.item(item["id"])
    frames = await feed.subscribe(ME, after=told[1].id)
    assert [f.event for f in await numbers(frames, 2)] == ["updated", "closed"]
    _, [other] = await desk.asked("ask", 1)
    frames = await feed.subscribe(ME, after=None)
    [snapshot] = await anext(frames)
    shown = json.loads(snapshot.data)
    assert shown["items"] == [other]
    assert shown["next_cursor"] is None
    assert shown["counts"]["total"] == 1
    assert UUID(shown["items"][0]["id"])


@pytest.mark.parametrize(
    ("value", "position"),
    [
        (None, None),
        ("12-3", (12, 3)),
        (" 4294967296-9 ", (2**32, 9)),
        ("-1", None),
        ("0", None),
        ("-", None),
        ("a-b", None),
        ("1-" + "9" * 30, None),
    ],
)
def test_positions(value: str | None, position: tuple[int, int] | None) -> None:
    assert parse_position(value) == position


async def told_over_http(api: httpx.AsyncClient, last: str | None = None) -> AsyncIterator[tuple[str, str, Any]]:
    """Events of the stream: id, name, data."""
    event: dict[str, str] = {}
    async with api.stream("GET", "/inbox/stream", headers={"Last-Event-ID": last} if last else {}) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-store"
        async for line in response.aiter_lines():
            if line and not line.startswith(":"):
                name, _, value = line.partition(": ")
                event[name] = value
            elif event:
                yield event["id"], event["event"], json.loads(event["data"])
                event = {}


async def test_the_stream_over_http(live_server: Server) -> None:
    async with asyncio.timeout(20), httpx.AsyncClient(base_url=live_server.url, timeout=30) as api:
        stream = told_over_http(api)
        assert (await anext(stream))[1] == "snapshot"
        thread = (await api.post("/threads", json={})).json()["thread_id"]
        question = {"messages": [{"role": "user", "content": "refund 1500 for order 12345"}]}
        await api.post(f"/threads/{thread}/runs/wait", json={"assistant_id": "demo", "input": question})
        [item] = (await api.get("/inbox", params={"thread_id": thread})).json()["items"]
        await api.post(f"/inbox/{item['id']}/response", json={"type": "ignore"})
        mine: list[tuple[str, str]] = []
        async for id_, name, data in stream:
            mine += [(id_, name)] if data.get("thread_id") == thread else []
            if name == "closed" and data.get("thread_id") == thread:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        assert [name for _, name in mine] == ["created", "decided", "updated", "closed"]
        again = told_over_http(api, mine[0][0])
        while (event := await anext(again))[2]["id"] != item["id"]:
            pass
        assert event[:2] == mine[1]
        await again.aclose()  # type: ignore[attr-defined]
        anew = told_over_http(api, "-1")
        assert (await anext(anew))[1] == "snapshot"
        await anew.aclose()  # type: ignore[attr-defined]
