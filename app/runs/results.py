"""The one JSON result of a run, for clients that wait instead of streaming."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson

from app.codec import dumps
from app.streaming.channel import Frame


async def final_result(
    frames: AsyncIterator[list[Frame]], *, fallback: Callable[[], Awaitable[bytes | None]]
) -> AsyncIterator[bytes]:
    """The body of `/wait` and `/join`: a newline per heartbeat (legal before JSON), then the result.

    The result is the last values, with `__interrupt__` when the run asked something; `{"__error__": ...}` when it failed;
    `{}` when it was stopped before it had values. `fallback` gives the values of a run that streamed none.
    """
    values: bytes | None = None
    error: bytes | None = None
    asked: dict[str, Any] = {}
    async for batch in frames:
        if not batch:
            yield b"\n"
        for frame in batch:
            if frame.event == "values":
                values = frame.data
            elif frame.event == "error":
                error = frame.data
            if frame.event in ("values", "updates") and b'"__interrupt__"' in frame.data:
                for interrupt in orjson.loads(frame.data).get("__interrupt__") or ():
                    asked[interrupt["id"]] = interrupt
    if error is not None:
        yield b'{"__error__":' + error + b"}"
    elif asked:
        state = orjson.loads(values or await fallback() or b"{}")
        yield dumps({**state, "__interrupt__": list(asked.values())})
    else:
        yield values or await fallback() or b"{}"
