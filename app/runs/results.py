"""The one JSON result of a run, for clients that wait instead of streaming."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson

from app.codec import dumps
from app.runs.models import Run
from app.streaming.channel import GAP, Frame

LAST_SEQ = 2**31 - 1
"""Ids of what is told of a forgotten run lie behind all that it can have had."""


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


def forgotten(run: Run, values: bytes | None) -> list[Frame]:
    """What is still known of a finished run whose events are not kept any more: a notice, its values or error, its end."""
    events: list[tuple[str, bytes]] = [
        ("metadata", dumps({"run_id": run.id, "attempt": run.attempts})),
        (GAP, dumps({"run_id": run.id, "events": None, "reason": "expired"})),
    ]
    if values is not None:
        events.append(("values", values))
    if run.error is not None:
        events.append(("error", dumps(run.error)))
    events.append(("end", dumps({"run_id": run.id, "status": run.status, "stop_reason": run.stop_reason})))
    return [Frame.make(run.epoch, LAST_SEQ - len(events) + i, event, data) for i, (event, data) in enumerate(events, 1)]
