"""The run routes of the LangGraph Agent Server: create, stream, wait, list, get, join, cancel, delete."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, Literal
from uuid import UUID

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response

from app.auth import Principal, require
from app.openapi import responses
from app.runs.models import CancelAction, Run
from app.runs.results import final_result
from app.runs.schemas import RunCreate, RunRead, RunsCancel
from app.runs.service import RunService
from app.streaming.channel import START, Frame
from app.streaming.sse import KeptAlive, event_stream, parse_last_event_id

router = APIRouter(prefix="/threads/{thread_id}/runs", tags=["runs"])
many = APIRouter(prefix="/runs", tags=["runs"])

EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Server-sent events", "content": {"text/event-stream": {"schema": {"type": "string"}}}}
}
RESULT: dict[int | str, dict[str, Any]] = {
    200: {"description": "The last values, with `__interrupt__` or `__error__`", "content": {"application/json": {}}}
}


async def service(request: Request) -> RunService:
    """The service of this process."""
    runs: RunService = request.app.state.resources.runs
    return runs


Runs = Annotated[RunService, Depends(service)]
Writer = Annotated[Principal, require("runs:write")]
Reader = Annotated[Principal, require("runs:read")]


def locations(run: Run, suffix: str) -> dict[str, str]:
    """Where the run is, and where a client that lost its connection goes on."""
    path = f"/threads/{run.thread_id}/runs/{run.id}"
    return {"Location": f"{path}/{suffix}", "Content-Location": path}


def wanted_modes(values: list[str]) -> frozenset[str] | None:
    """`stream_mode` of a query: repeated, comma separated, or a JSON array. Nothing means everything."""
    modes: set[str] = set()
    for value in values:
        if value.startswith("["):
            try:
                modes.update(str(mode) for mode in orjson.loads(value))
            except orjson.JSONDecodeError:
                continue
        else:
            modes.update(mode.strip() for mode in value.split(",") if mode.strip())
    return frozenset(modes) or None


def cancel_on_disconnect(runs: RunService, principal: Principal, run: Run) -> Callable[[], Awaitable[None]]:
    """What to do when the client that asked for it goes away."""

    async def gone() -> None:
        await runs.canceller.cancel_if_active(principal, run.thread_id, run.id)

    return gone


@router.post("", response_model=RunRead, summary="Start a run in the background", responses=responses(403, 404, 409, 422))
async def create_run(thread_id: UUID, body: RunCreate, runs: Runs, principal: Writer, response: Response) -> RunRead:
    """Make a run and return at once. Follow it with `GET .../stream` or `GET .../join`."""
    run = await runs.create(principal, thread_id, body)
    response.headers.update(locations(run, "join"))
    return RunRead.of(run)


@router.post("/stream", summary="Start a run and stream its events", responses={**EVENTS, **responses(403, 404, 409, 422)})
async def stream_run(thread_id: UUID, body: RunCreate, runs: Runs, principal: Writer) -> Response:
    """Make a run and stream it: `metadata` first, then events of the modes asked for, then `end`.

    A run that asks a human ends with the question in `updates` and `values`; it is in the inbox by then.
    """
    run = await runs.create(principal, thread_id, body, watched=True)
    gone = cancel_on_disconnect(runs, principal, run) if body.on_disconnect == "cancel" else None
    return event_stream(runs.follow(run.id), headers=locations(run, "stream"), on_disconnect=gone)


@router.post("/wait", summary="Start a run and wait for its result", responses={**RESULT, **responses(403, 404, 409, 422)})
async def wait_run(thread_id: UUID, body: RunCreate, runs: Runs, principal: Writer) -> Response:
    """Make a run and answer with its last values. A newline every few seconds keeps the connection alive."""
    run = await runs.create(principal, thread_id, body, watched=True)
    return result(runs, run, cancel_on_disconnect(runs, principal, run) if body.on_disconnect == "cancel" else None)


@router.get("", response_model=list[RunRead], summary="List the runs of a thread", responses=responses(403, 404, 422))
async def list_runs(
    thread_id: UUID,
    runs: Runs,
    principal: Reader,
    limit: Annotated[int, Query(ge=1, le=1000)] = 10,
    offset: Annotated[int, Query(ge=0)] = 0,
    status: Literal["pending", "running", "success", "error", "timeout", "interrupted"] | None = None,
) -> list[RunRead]:
    """Runs of the thread, newest first."""
    return [RunRead.of(run) for run in await runs.of_thread(principal, thread_id, limit=limit, offset=offset, status=status)]


@router.get("/{run_id}", response_model=RunRead, summary="Get a run", responses=responses(403, 404, 422))
async def get_run(thread_id: UUID, run_id: UUID, runs: Runs, principal: Reader) -> RunRead:
    """One run. `status` is `success` also when the run ended in a question: `stop_reason` tells."""
    return RunRead.of(await runs.get(principal, thread_id, run_id))


@router.get("/{run_id}/join", summary="Wait for the result of a run", responses={**RESULT, **responses(403, 404, 422)})
async def join_run(thread_id: UUID, run_id: UUID, runs: Runs, principal: Reader) -> Response:
    """The result of the run, as `wait` gives it, now or when it is there."""
    run = await runs.get(principal, thread_id, run_id)
    return result(runs, run, frames=await runs.join(run, after=START, modes=None))


@router.get("/{run_id}/stream", summary="Join the stream of a run", responses={**EVENTS, **responses(403, 404, 422)})
async def join_stream(
    request: Request,
    thread_id: UUID,
    run_id: UUID,
    runs: Runs,
    principal: Reader,
    stream_mode: Annotated[list[str] | None, Query(description="Only these modes")] = None,
    cancel_on_disconnect_: Annotated[bool, Query(alias="cancel_on_disconnect")] = False,
) -> Response:
    """Events behind `Last-Event-ID` (`-1` for all); without that header those from now on, or how a finished run ended."""
    run = await runs.get(principal, thread_id, run_id)
    after = parse_last_event_id(request.headers.get("last-event-id"))
    frames = await runs.join(run, after=after, modes=wanted_modes(stream_mode or []))
    gone = None
    if cancel_on_disconnect_ and principal.can("runs:write"):
        gone = cancel_on_disconnect(runs, principal, run)
    return event_stream(frames, headers=locations(run, "stream"), on_disconnect=gone)


@router.post(
    "/{run_id}/cancel",
    status_code=202,
    summary="Cancel a run",
    responses={202: {"description": "Told to stop"}, **RESULT, **responses(403, 404, 409, 422)},
)
async def cancel_run(
    thread_id: UUID,
    run_id: UUID,
    runs: Runs,
    principal: Writer,
    wait: bool = False,
    action: CancelAction = CancelAction.interrupt,
) -> Response:
    """Stop a run at the next await; it ends as `interrupted` and keeps what it had done.

    `action=rollback` undoes what it did to the thread, and deletes it. With `wait`, answer when it has ended.
    """
    run = await runs.get(principal, thread_id, run_id)
    await runs.canceller.cancel(principal, thread_id, run_id, action)
    return result(runs, run) if wait else Response(status_code=202)


@many.post(
    "/cancel",
    status_code=204,
    summary="Cancel many runs",
    responses={204: {"description": "Told to stop"}, **responses(403, 404, 422)},
)
async def cancel_runs(
    body: RunsCancel, runs: Runs, principal: Writer, action: CancelAction = CancelAction.interrupt
) -> Response:
    """Cancel the runs named, those of a thread, or all in a status. Those that are over are left alone; 404 if all are."""
    statuses = ["pending", "running"] if body.status in (None, "all") else [str(body.status)]
    await runs.canceller.cancel_many(
        principal, thread_id=body.thread_id, run_ids=body.run_ids, statuses=statuses, action=action
    )
    return Response(status_code=204)


@router.delete("/{run_id}", status_code=204, summary="Delete a run", responses=responses(403, 404, 409, 422))
async def delete_run(thread_id: UUID, run_id: UUID, runs: Runs, principal: Writer) -> Response:
    """Delete a run that is over."""
    await runs.delete(principal, thread_id, run_id)
    return Response(status_code=204)


def result(
    runs: RunService,
    run: Run,
    gone: Callable[[], Awaitable[None]] | None = None,
    *,
    frames: AsyncIterator[list[Frame]] | None = None,
) -> Response:
    """A JSON response that is kept alive until the run has ended. `gone` is called if the client does not wait for it."""

    async def values() -> bytes | None:
        return await runs.endings.values(run.thread_id)

    body = final_result(frames or runs.follow(run.id), fallback=values)
    return KeptAlive(body, media_type="application/json", headers=locations(run, "join"), on_disconnect=gone)
