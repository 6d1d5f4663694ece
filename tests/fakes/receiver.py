"""A receiver of webhooks: a real HTTP server on loopback that keeps what it is sent and answers as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import orjson

Answer = tuple[int, dict[str, str]]
OK: Answer = (204, {})


@dataclass
class Received:
    """One request."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]


@dataclass
class Receiver:
    """Answers a path's `answers` in turn, and OK when there is none left. Paths in `held` wait for their event before."""

    port: int = 0
    received: list[Received] = field(default_factory=list)
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    held: dict[str, asyncio.Event] = field(default_factory=dict)
    came: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def at(self, path: str) -> list[Received]:
        """What came to a path."""
        return [r for r in self.received if r.path == path]

    async def until(self, enough: Callable[[], bool], seconds: float = 30) -> None:
        """Wait until what was received is enough."""
        async with asyncio.timeout(seconds), self.came:
            await self.came.wait_for(enough)

    async def get(self, path: str, number: int = 1) -> Received:
        """The first, second, ... request to a path, once it is there."""
        await self.until(lambda: len(self.at(path)) >= number)
        return self.at(path)[number - 1]

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines if line)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            path = head.split()[1]
            async with self.came:
                self.received.append(Received(path, headers, body))
                self.came.notify_all()
            if path in self.held:
                await self.held[path].wait()
            left = self.answers.get(path)
            status, answered = left.pop(0) if left else OK
            shown = "".join(f"{k}: {v}\r\n" for k, v in answered.items())
            writer.write(f"HTTP/1.1 {status} .\r\n{shown}content-length: 0\r\nconnection: close\r\n\r\n".encode())
            await writer.drain()
        writer.close()


@asynccontextmanager
async def receiving(port: int = 0) -> AsyncIterator[Receiver]:
    """A receiver on a port, or on a free one."""
    receiver = Receiver()
    server = await asyncio.start_server(receiver.accept, "127.0.0.1", port)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        for event in receiver.held.values():
            event.set()
        server.close()
