"""A stream that is cut at every event and resumed on the other of two server processes is the stream that was not cut."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from processes import Servers
from redisserver import RedisServer
from streaming.test_redis import PROJECT

EVENTS = ["metadata", "values", *["custom", "custom", "values", "updates"] * 4, "end"]


class Cut:
    """Reads one event a connection, each from the other server."""

    def __init__(self, run: str, apis: list[httpx.AsyncClient]) -> None:
        self._run = run
        self._apis = apis
        self.connections = 0

    async def next(self, last: str) -> bytes | None:
        """The event behind an id; None when the stream ends without one."""
        api = self._apis[self.connections % 2]
        self.connections += 1
        async with api.stream("GET", f"{self._run}/stream", headers={"Last-Event-ID": last}) as response:
            assert response.status_code == 200
            seen = b""
            async for part in response.aiter_raw():
                seen = (seen + part).replace(b": heartbeat\r\n\r\n", b"")
                if b"\r\n\r\n" in seen:
                    return seen.partition(b"\r\n\r\n")[0]
        return None

    async def all(self) -> list[bytes]:
        """Every event, one at a time."""
        events: list[bytes] = []
        last = "-1"
        while (event := await self.next(last)) is not None:
            events.append(event)
            last = event.rpartition(b"id: ")[2].decode()
            if event.startswith(b"event: end"):
                break
        return events


@pytest.mark.parametrize("store", ["postgres", "redis"])
async def test_cut_at_every_event_and_resumed_on_the_other_replica(
    servers: Servers, fresh_database_url: str, store: str, request: pytest.FixtureRequest
) -> None:
    settings: dict[str, Any] = {"config": PROJECT, "examples": 0}
    if store == "redis":
        redis: RedisServer = request.getfixturevalue("redis_server")
        settings["redis_url"] = redis.url
    pair = await asyncio.gather(*(servers.start(fresh_database_url, **settings) for _ in range(2)))
    async with (
        httpx.AsyncClient(base_url=pair[0].url, timeout=30) as one,
        httpx.AsyncClient(base_url=pair[1].url, timeout=30) as other,
        asyncio.timeout(60),
    ):
        thread = (await one.post("/threads", json={})).json()["thread_id"]
        body = {"assistant_id": "steps", "input": {"count": 0}, "stream_mode": ["custom", "values", "updates"]}
        run = (await one.post(f"/threads/{thread}/runs", json=body)).json()["run_id"]
        path = f"/threads/{thread}/runs/{run}"
        whole = asyncio.create_task(one.get(f"{path}/stream", headers={"Last-Event-ID": "-1"}))
        live = [Cut(path, [one, other]), Cut(path, [other, one])]
        cut = await asyncio.gather(*(reader.all() for reader in live))
        expected = (await whole).content.replace(b": heartbeat\r\n\r\n", b"").split(b"\r\n\r\n")[:-1]
        names = [event.partition(b"\r\n")[0].removeprefix(b"event: ").decode() for event in expected]
        assert sorted(names) == sorted(EVENTS)
        assert cut == [expected, expected]
        assert [reader.connections for reader in live] == [len(expected)] * 2
        again = Cut(path, [other, one])
        assert await again.all() == expected, "of a run that is over"
        await pair[0].stop()
        assert (await other.get(f"{path}/stream", headers={"Last-Event-ID": "-1"})).content.count(b"event:") == len(expected)
    await pair[1].stop()
