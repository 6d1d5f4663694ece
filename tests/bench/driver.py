"""Load driver for servers of the LangGraph wire protocol: closed loop, one process, loopback only.

Every run must end as its scenario expects, else it counts as an error. CPU seconds of the server's process tree are charged
to the runs: on a busy machine that is the figure to trust.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
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


async def measure(url: str, scenario: str, *, runs: int, concurrency: int, pids: list[int]) -> dict[str, Any]:
    """Run a scenario: `stream` is one run on a new thread, `hitl` is a run to its question, the answer, and the rest."""
    firsts: list[float] = []
    lasts: list[float] = []
    body = {"stream_mode": ["updates", "messages-tuple"]}

    async def stream(client: Client) -> None:
        thread = await client.thread()
        first, last = await client.run(thread, {**body, "assistant_id": "bench_react", "input": QUESTION}, b"sunny")
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
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    async with aiohttp.ClientSession(url, connector=connector, read_bufsize=2**18) as session:
        client = Client(session)

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
        "scenario": f"{scenario} c{concurrency}",
        "per_second": round(len(lasts) / wall, 1),
        "first_event_ms": milliseconds(firsts),
        "last_event_ms": milliseconds(lasts),
        "cpu_ms": round(cpu * 1e3 / runs, 2),
        "errors": dict(errors),
    }
