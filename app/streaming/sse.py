"""Server-sent events over ASGI: frames that are encoded already, one send per wake, heartbeats as comments."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.streaming.channel import START, Frame, Id

HEARTBEAT = b": heartbeat\r\n\r\n"
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
ID = re.compile(r"(\d{1,9})-(\d{1,18})")


def parse_last_event_id(value: str | None) -> Id | None:
    """Position named by `Last-Event-ID`: `<epoch>-<seq>`, compared as numbers.

    None without the header. `-1`, `0`, `-` and whatever cannot be read stand for the beginning.
    """
    if value is None:
        return None
    match = ID.fullmatch(value.strip())
    return (int(match[1]), int(match[2])) if match else START


class EventStream(Response):
    """A response that sends batches of frames as they come. When the client goes away, `on_disconnect` is called."""

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncIterator[list[Frame]],
        headers: Mapping[str, str],
        on_disconnect: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._frames = frames
        self._on_disconnect = on_disconnect
        self.init_headers({**HEADERS, **headers, "content-type": "text/event-stream; charset=utf-8"})

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
            if (close := getattr(self._frames, "aclose", None)) is not None:
                await close()
        if not pump.cancelled() and (error := pump.exception()) is not None and not isinstance(error, OSError):
            raise error

    async def _pump(self, send: Send) -> None:
        async for batch in self._frames:
            body = b"".join([f.sse for f in batch]) if batch else HEARTBEAT
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event_stream(
    frames: AsyncIterator[list[Frame]],
    *,
    headers: Mapping[str, str],
    on_disconnect: Callable[[], Awaitable[None]] | None = None,
) -> Response:
    """A response that streams frames until they end. An empty batch is sent as a heartbeat."""
    return EventStream(frames, headers, on_disconnect)
