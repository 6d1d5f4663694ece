"""Responses that take their time over ASGI: server-sent events, and JSON that is kept alive until it is there."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.streaming.channel import START, Frame, Id

HEARTBEAT = b": heartbeat\r\n\r\n"
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
EVENT_STREAM = "text/event-stream; charset=utf-8"
ID = re.compile(r"(\d{1,9})-(\d{1,18})")


def parse_last_event_id(value: str | None) -> Id | None:
    """Position named by `Last-Event-ID`: `<epoch>-<seq>`, compared as numbers.

    None without the header. `-1`, `0`, `-` and whatever cannot be read stand for the beginning.
    """
    if value is None:
        return None
    match = ID.fullmatch(value.strip())
    return (int(match[1]), int(match[2])) if match else START


class KeptAlive(Response):
    """A response whose body comes bit by bit. When the client goes away first, `on_disconnect` is called."""

    def __init__(
        self,
        body: AsyncIterator[bytes],
        *,
        media_type: str,
        headers: Mapping[str, str],
        on_disconnect: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._body = body
        self._on_disconnect = on_disconnect
        self.init_headers({**HEADERS, **headers, "content-type": media_type})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pump = asyncio.create_task(self._pump(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not pump.done() and self._on_disconnect is not None:
                await self._on_disconnect()
        finally:
            gone.cancel()
            pump.cancel()
            await asyncio.gather(pump, gone, return_exceptions=True)
            if (close := getattr(self._body, "aclose", None)) is not None:
                await close()
        if not pump.cancelled() and (error := pump.exception()) is not None and not isinstance(error, OSError):
            raise error

    async def _pump(self, send: Send) -> None:
        async for part in self._body:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _encoded(frames: AsyncIterator[list[Frame]]) -> AsyncIterator[bytes]:
    async for batch in frames:
        yield b"".join([f.sse for f in batch]) if batch else HEARTBEAT


def event_stream(
    frames: AsyncIterator[list[Frame]],
    *,
    headers: Mapping[str, str],
    on_disconnect: Callable[[], Awaitable[None]] | None = None,
) -> Response:
    """A response that streams frames until they end, those of a batch in one send. An empty batch is sent as a heartbeat."""
    return KeptAlive(_encoded(frames), media_type=EVENT_STREAM, headers=headers, on_disconnect=on_disconnect)
