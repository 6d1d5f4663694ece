"""A model provider at the network: a small HTTP server on loopback that answers, fails, stalls or breaks off as told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self


class BreakOff(Exception):
    """Close the connection in the middle of the answer."""


@dataclass
class Request:
    """What the server was sent."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Provider:
    """Base of the doubles. `behave` is what happens to the next requests:

    `ok`; a number: that HTTP status; `stall`: no answer; `cut`: the connection breaks in the middle of the stream;
    `end_early`: the stream ends properly, but before the answer does; `bad_json`: arguments of a call that are not JSON.
    """

    behave: str | int = "ok"
    requests: list[Request] = field(default_factory=list)
    url: str = ""
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Self]:
        """Listen until the block ends."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in tuple(self._connections):
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def error_body(self, status: int) -> dict[str, Any]:
        """The provider's error in its own shape. It repeats the key, as a careless server would."""
        raise NotImplementedError

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        raise NotImplementedError

    def events(self, body: dict[str, Any]) -> list[str]:
        """The answer as server-sent events."""
        raise NotImplementedError

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        with suppress(asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError, BreakOff):
            while (request := await _read(reader)) is not None:
                self.requests.append(request)
                await self._answer(request, writer)
        self._connections.discard(task)
        writer.close()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        if self.behave == "stall":
            await asyncio.Event().wait()
        if isinstance(self.behave, int):
            return await _send(writer, self.behave, "application/json", json.dumps(self.error_body(self.behave)).encode())
        if not request.body.get("stream"):
            return await _send(writer, 200, "application/json", json.dumps(self.whole(request.body)).encode())
        events = self.events(request.body)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for event in events[: len(events) // 2] if self.behave in ("cut", "end_early") else events:
            data = event.encode()
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()
        if self.behave == "cut":
            raise BreakOff
        writer.write(b"0\r\n\r\n")
        await writer.drain()


async def _read(reader: asyncio.StreamReader) -> Request | None:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, path, headers, json.loads(body) if body else {})


async def _send(writer: asyncio.StreamWriter, status: int, kind: str, data: bytes) -> None:
    head = f"HTTP/1.1 {status} Status\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()


def pieces(text: str, size: int = 5) -> list[str]:
    """Text as a provider streams it."""
    return [text[i : i + size] for i in range(0, len(text), size)] or [""]
