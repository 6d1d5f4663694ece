"""Commands of `keyturn` as processes, and what they say; and clients that keep a server busy."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
STOP_WITHIN = 5.0
SLOW = {"graph_id": "react", "config": {"configurable": {"model": {"provider": "scripted", "params": {"latency_ms": 60_000}}}}}
HI = {"messages": [{"role": "user", "content": "hi"}]}


class Process:
    """A command of `keyturn`, and the lines it writes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers = [
            asyncio.create_task(self._read(process.stdout, self.out)),
            asyncio.create_task(self._read(process.stderr, self.err)),
        ]

    @staticmethod
    async def _read(stream: asyncio.StreamReader | None, lines: list[str]) -> None:
        assert stream is not None
        async for line in stream:
            lines.append(line.decode().rstrip("\n"))

    async def says(self, text: str) -> str:
        """The first line with the text, once it is there."""
        async with asyncio.timeout(60):
            while True:
                for line in (*self.out, *self.err):
                    if text in line:
                        return line
                assert self.process.returncode is None, self.err
                await asyncio.sleep(0.01)

    async def ends(self, number: signal.Signals | None = None) -> int:
        """The exit code, after a signal."""
        if number is not None:
            self.process.send_signal(number)
        async with asyncio.timeout(60):
            await asyncio.gather(*self._readers)
            return await self.process.wait()


@asynccontextmanager
async def keyturn(*args: str | Path, **env: str) -> AsyncIterator[Process]:
    """Run a command."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "app.cli", *map(str, args),
        env=os.environ | env, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    started = Process(process)
    try:
        yield started
    finally:
        if process.returncode is None:
            process.kill()
        await started.ends()


def runs(home: Path) -> bool:
    """Whether the embedded Postgres of a home is up."""
    return any(home.glob("pg*/postmaster.pid"))


@asynccontextmanager
async def endless(api: httpx.AsyncClient, streams: int) -> AsyncIterator[list[asyncio.Task[bytes]]]:
    """A run that does not end, and that many streams on it and on the inbox; each task is the body of one."""
    assistant = (await api.post("/assistants", json=SLOW)).json()["assistant_id"]
    thread = (await api.post("/threads", json={})).json()["thread_id"]
    run = (await api.post(f"/threads/{thread}/runs", json={"assistant_id": assistant, "input": HI})).json()["run_id"]
    opened = asyncio.Semaphore(0)

    async def read(path: str) -> bytes:
        async with api.stream("GET", path, headers={"Last-Event-ID": "-1"}) as response:
            assert response.status_code == 200
            opened.release()
            return await response.aread()

    paths = [f"/threads/{thread}/runs/{run}/stream", "/inbox/stream"]
    tasks = [asyncio.create_task(read(paths[i % 2])) for i in range(streams)]
    for _ in tasks:
        await opened.acquire()
    yield tasks
    await asyncio.gather(*tasks, return_exceptions=True)
