"""Load driver for servers of the LangGraph wire protocol: closed loop, one process, loopback only.

Every run must end as its scenario expects, else it counts as an error. CPU seconds of the server's process tree are charged
to the runs: on a busy machine that is the figure to trust.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from graphs import QUESTION

TICKS = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
            except OSError:
                continue
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def cpu_seconds(pids: list[int]) -> float:
    """CPU time of processes and of their ended children."""
    total = 0
    for pid in pids:
        try:
            total += sum(int(field) for field in _stat(pid)[11:15])
        except OSError:
            continue
    return total / TICKS


def _stat(pid: int) -> list[str]:
    text = Path(f"/proc/{pid}/stat").read_text()
    return text[text.rindex(")") + 2 :].split()


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """p50, p95 and p99 of durations."""
    ordered = sorted(seconds) or [float("nan")]
    return {f"p{q}": round(ordered[min(len(ordered) - 1, len(ordered) * q // 100)] * 1e3, 2) for q in (50, 95, 99)}


class Failed(Exception):
    """A run that did not end as expected."""


class Client:
    """Makes threads and reads run streams to their end."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def thread(self) -> str:
        """A new thread."""
        async with self._session.post("/threads", json={}) as response:
            if response.status != 200:
                raise Failed(f"threads: {response.status} {(await response.text())[:200]}")
            return str(orjson.loads(await response.read())["thread_id"])

    async def json(self, method: str, path: str, body: Any = None) -> Any:
        """One request; its answer."""
        async with self._session.request(method, path, json=body) as response:
            if response.status >= 300:
                raise Failed(f"{method} {path}: {response.status} {(await response.text())[:200]}")
            return orjson.loads(await response.read())

    async def raw(self, path: str, body: Any = None) -> bytes:
        """A stream, whole: of a new run, or of one that is there."""
        how: dict[str, Any] = {"json": body} if body is not None else {"headers": {"Last-Event-ID": "-1"}}
        async with self._session.request("GET" if body is None else "POST", path, **how) as response:
            return await response.read()

    async def first_event(self, path: str) -> None:
        """Join a stream and read its first event."""
        async with self._session.get(path, headers={"Last-Event-ID": "-1"}) as response:
            async for chunk in response.content.iter_any():
                if b"event: " in chunk:
                    return

    async def run(self, thread: str, body: dict[str, Any], expected: bytes) -> tuple[float, float]:
        """Stream a run; seconds to its first event and to its end."""
        start = time.perf_counter()
        first = 0.0
        seen = b""
        async with self._session.post(f"/threads/{thread}/runs/stream", json=body) as response:
            if response.status != 200:
                raise Failed(f"stream: {response.status} {(await response.text())[:200]}")
            async for chunk in response.content.iter_any():
                first = first or time.perf_counter() - start
                seen += chunk
        if b"event: error" in seen or expected not in seen:
            raise Failed(f"no {expected!r} in {seen[-300:]!r}")
        return first, time.perf_counter() - start


async def measure(
    url: str, scenario: str, *, runs: int, concurrency: int, pids: list[int], assistant: str = "bench_react"
) -> dict[str, Any]:
    """Run a scenario: `stream` is one run on a new thread, `hitl` is a run to its question, the answer, and the rest."""
    firsts: list[float] = []
    lasts: list[float] = []
    body = {"stream_mode": ["updates", "messages-tuple"]}

    async def stream(client: Client) -> None:
        thread = await client.thread()
        first, last = await client.run(thread, {**body, "assistant_id": assistant, "input": QUESTION}, b"sunny")
        firsts.append(first)
        lasts.append(last)

    async def hitl(client: Client) -> None:
        start = time.perf_counter()
        thread = await client.thread()
        asked, _ = await client.run(thread, {**body, "assistant_id": "bench_hitl", "input": QUESTION}, b"__interrupt__")
        accept = {"command": {"resume": [{"type": "accept", "args": None}]}}
        await client.run(thread, {**body, "assistant_id": "bench_hitl", **accept}, b"sunny")
        firsts.append(asked)
        lasts.append(time.perf_counter() - start)

    one: Callable[[Client], Awaitable[None]] = {"stream": stream, "hitl": hitl}[scenario]
    errors: Counter[str] = Counter()
    jobs = iter(range(runs))
    async with connected(url) as client:

        async def worker() -> None:
            for _ in jobs:
                try:
                    await one(client)
                except (Failed, aiohttp.ClientError, TimeoutError) as error:
                    errors[f"{type(error).__name__}: {error}"[:300]] += 1

        before, start = cpu_seconds(pids), time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        wall, cpu = time.perf_counter() - start, cpu_seconds(pids) - before
    return {
        "per_second": round(len(lasts) / wall, 1),
        "first_event_ms": milliseconds(firsts),
        "last_event_ms": milliseconds(lasts),
        "cpu_ms": round(cpu * 1e3 / runs, 2),
        "errors": dict(errors),
    }


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    """A client of a server."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    async with aiohttp.ClientSession(url, connector=connector, read_bufsize=2**18) as session:
        yield Client(session)


async def decisions(url: str, count: int) -> dict[str, Any]:
    """From sending an answer to the first event of the run that carries it."""
    took: list[float] = []
    async with connected(url) as client:
        for _ in range(count):
            thread = await client.thread()
            body = {"assistant_id": "bench_hitl", "input": QUESTION, "stream_mode": ["updates"]}
            await client.run(thread, body, b"__interrupt__")
            [item] = (await client.json("GET", f"/inbox?thread_id={thread}"))["items"]
            start = time.perf_counter()
            decided = await client.json("POST", f"/inbox/{item['id']}/response", {"type": "accept"})
            await client.first_event(f"/threads/{thread}/runs/{decided['run_id']}/stream")
            took.append(time.perf_counter() - start)
    return {"first_event_ms": milliseconds(took)}


async def tokens(url: str) -> dict[str, Any]:
    """Events of one stream per second."""
    async with connected(url) as client:
        thread = await client.thread()
        body = {"assistant_id": "bench_tokens", "input": QUESTION, "stream_mode": ["messages-tuple"]}
        start = time.perf_counter()
        seen = await client.raw(f"/threads/{thread}/runs/stream", body)
        wall = time.perf_counter() - start
    return {"events_per_second": round(seen.count(b"event: ") / wall)}


async def fan_out(url: str, readers: int, pids: list[int]) -> dict[str, Any]:
    """CPU of the server while so many clients read one run."""
    async with connected(url) as client:
        thread = await client.thread()
        before = cpu_seconds(pids)
        body = {"assistant_id": "bench_paced", "input": QUESTION, "stream_mode": ["messages-tuple"]}
        run = (await client.json("POST", f"/threads/{thread}/runs", body))["run_id"]
        path = f"/threads/{thread}/runs/{run}/stream"
        lengths = {len(seen) for seen in await asyncio.gather(*(client.raw(path) for _ in range(readers)))}
    if len(lengths) != 1:
        raise Failed(f"readers saw different streams: {lengths}")
    return {"cpu_ms": round((cpu_seconds(pids) - before) * 1e3, 1)}


async def long_thread(url: str, assistant: str, turns: int, pids: list[int]) -> dict[str, Any]:
    """Wall and CPU time of early and late turns of one thread, medians of ten."""
    walls, cpus = [], []
    async with connected(url) as client:
        thread = await client.thread()
        for _ in range(turns):
            body = {"assistant_id": assistant, "input": QUESTION, "stream_mode": ["updates", "messages-tuple"]}
            before = cpu_seconds(pids)
            _, last = await client.run(thread, body, b"sunny")
            walls.append(last)
            cpus.append(cpu_seconds(pids) - before)
    early, late = slice(2, 12), slice(turns - 10, turns)

    def mean(values: list[float]) -> float:
        return round(sum(values) / len(values) * 1e3, 2)  # CPU ticks are coarse: no medians of them

    return {
        "thread": thread,
        "early_ms": round(sorted(walls[early])[5] * 1e3, 2),
        "late_ms": round(sorted(walls[late])[5] * 1e3, 2),
        "early_cpu_ms": mean(cpus[early]),
        "late_cpu_ms": mean(cpus[late]),
    }


async def idle(url: str, streams: int, pids: list[int], *, seconds: float = 10.0) -> dict[str, Any]:
    """Memory and CPU of streams on which nothing happens."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(None)) as session:
        client = Client(session)
        thread = await client.thread()
        body = {"assistant_id": "bench_idle", "input": QUESTION}
        run = (await client.json("POST", f"/threads/{thread}/runs", body))["run_id"]
        path = f"/threads/{thread}/runs/{run}/stream"
        await client.first_event(path)
        before = resident(pids)
        opened = [await session.get(path, headers={"Last-Event-ID": "-1"}) for _ in range(streams)]
        await asyncio.sleep(3)
        memory, start = resident(pids) - before, cpu_seconds(pids)
        await asyncio.sleep(seconds)
        cpu = cpu_seconds(pids) - start
        for response in opened:
            response.close()
        await session.post(f"/threads/{thread}/runs/{run}/cancel")
    return {"core": round(cpu / seconds, 4), "kb_per_stream": round(memory / streams / 1024, 1)}


def resident(pids: list[int]) -> int:
    """Bytes of memory of processes."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total
