"""Routes under `/threads`, without those of runs."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response

from app.auth import Principal, require
from app.openapi import responses
from app.threads import schemas
from app.threads.service import ThreadService
from app.threads.states import ThreadStates
from app.wire import page_headers, reply

router = APIRouter(prefix="/threads", tags=["Threads"])


async def service(request: Request) -> ThreadService:
    """The service of this process."""
    found: ThreadService = request.app.state.resources.threads
    return found


async def states_of(threads: Annotated[ThreadService, Depends(service)]) -> ThreadStates:
    """State of this process' threads."""
    return ThreadStates(threads)


Threads = Annotated[ThreadService, Depends(service)]
States = Annotated[ThreadStates, Depends(states_of)]
Reader = Annotated[Principal, require("threads:read")]
Writer = Annotated[Principal, require("threads:write")]
ThreadId = Annotated[UUID, Path(description="The thread's UUID.")]
CheckpointId = Annotated[UUID, Path(description="The checkpoint's id.")]
Subgraphs = Annotated[bool, Query(description="Include the states of subgraphs that are waiting.")]


@router.post("", summary="Create a thread", response_model=schemas.ThreadRead, responses=responses(400, 404, 409))
async def create(states: States, principal: Writer, body: schemas.ThreadCreate | None = None) -> Response:
    """Create an empty thread, or one that starts with the given state."""
    thread = await states.create(principal, body or schemas.ThreadCreate())
    return reply(schemas.read(thread))


@router.post("/search", summary="Search threads", response_model=list[schemas.ThreadRead], responses=responses())
async def search(body: schemas.ThreadSearch, threads: Threads, principal: Reader) -> Response:
    """Your threads, last changed first, with their values and pending questions unless `select` leaves them out.
    `X-Pagination-Total` is the number of all matches, `X-Pagination-Next` the next offset.
    """
    async with threads.database.transaction() as tx:
        rows, total = await threads.search(tx, principal, body)
    return reply([schemas.read(t, body.select) for t in rows], headers=page_headers(total, body.offset, len(rows)))


@router.post("/count", summary="Count threads", response_model=int, responses=responses())
async def count(body: schemas.ThreadFilter, threads: Threads, principal: Reader) -> Response:
    """How many threads match, as a bare number."""
    async with threads.database.transaction() as tx:
        return reply(await threads.count(tx, principal, body))


@router.get("/{thread_id}", summary="Get a thread", response_model=schemas.ThreadRead, responses=responses(404))
async def get(thread_id: ThreadId, threads: Threads, principal: Reader) -> Response:
    """The thread with its last values and the questions that wait in it."""
    async with threads.database.transaction() as tx:
        thread = await threads.show(tx, principal, thread_id)
    return reply(schemas.read(thread))


@router.patch(
    "/{thread_id}",
    summary="Change a thread",
    response_model=schemas.ThreadRead,
    responses=responses(404) | {204: {"description": "Done; asked for by `Prefer: return=minimal`."}},
)
async def patch(
    thread_id: ThreadId,
    body: schemas.ThreadPatch,
    threads: Threads,
    principal: Writer,
    prefer: Annotated[str | None, Header(description="`return=minimal` answers 204 without a body.")] = None,
) -> Response:
    """Merge metadata into the thread's."""
    async with threads.database.transaction() as tx:
        thread = await threads.patch(tx, principal, thread_id, body.metadata)
    if prefer is not None and "return=minimal" in prefer.replace(" ", "").lower():
        return Response(status_code=204)
    return reply(schemas.read(thread))


@router.delete("/{thread_id}", summary="Delete a thread", status_code=204, responses=responses(404, 409))
async def delete(thread_id: ThreadId, threads: Threads, principal: Writer) -> Response:
    """Delete the thread with its state and runs. Its open questions are withdrawn; waiting runs are cancelled; a running one
    is a 409 `thread_busy`.
    """
    async with threads.database.transaction() as tx:
        await threads.delete(tx, principal, thread_id)
    return Response(status_code=204)


@router.post("/{thread_id}/copy", summary="Copy a thread", response_model=schemas.ThreadRead, responses=responses(404, 409))
async def copy(thread_id: ThreadId, threads: Threads, principal: Writer) -> Response:
    """A new thread with the same state, history and metadata. Questions that wait in it are asked anew, under new items."""
    async with threads.database.transaction() as tx:
        thread = await threads.copy(tx, principal, thread_id)
    return reply(schemas.read(thread))


@router.get("/{thread_id}/state", summary="Get the state", response_model=schemas.ThreadState, responses=responses(404, 409))
async def get_state(thread_id: ThreadId, states: States, principal: Reader, subgraphs: Subgraphs = False) -> Response:
    """Values, next nodes, tasks and pending questions at the newest checkpoint; all empty before the first run."""
    return reply(await states.read(principal, thread_id, subgraphs=subgraphs))


@router.post(
    "/{thread_id}/state", summary="Write the state", response_model=schemas.StateUpdated, responses=responses(400, 404, 409)
)
async def update_state(thread_id: ThreadId, body: schemas.StateUpdate, states: States, principal: Writer) -> Response:
    """Write values as if a node had returned them. On an agent with review rules this needs the scope `threads:repair`, and
    closes open questions as superseded; it never lets a gated call run. `{"values": null, "as_node": "__end__"}` ends the
    turn: tool calls that nobody answered get a message which says so.
    """
    return reply(await states.update(principal, thread_id, body))


@router.post(
    "/{thread_id}/state/checkpoint",
    summary="Get the state at a checkpoint",
    response_model=schemas.ThreadState,
    responses=responses(404, 409),
)
async def get_state_at(thread_id: ThreadId, body: schemas.StateAt, states: States, principal: Reader) -> Response:
    """The state at a checkpoint; with `checkpoint_ns` that of a subgraph."""
    return reply(await states.read(principal, thread_id, at=body.checkpoint, subgraphs=body.subgraphs))


@router.get(
    "/{thread_id}/state/{checkpoint_id}",
    summary="Get the state at a checkpoint",
    response_model=schemas.ThreadState,
    responses=responses(404, 409),
)
async def get_state_by_id(
    thread_id: ThreadId, checkpoint_id: CheckpointId, states: States, principal: Reader, subgraphs: Subgraphs = False
) -> Response:
    """The state at a checkpoint."""
    at = schemas.Checkpoint(checkpoint_id=checkpoint_id)
    return reply(await states.read(principal, thread_id, at=at, subgraphs=subgraphs))


@router.get(
    "/{thread_id}/history", summary="Get the history", response_model=list[schemas.ThreadState], responses=responses(404, 409)
)
async def get_history(
    thread_id: ThreadId,
    states: States,
    principal: Reader,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1,
    before: Annotated[UUID | None, Query(description="Only checkpoints older than this one.")] = None,
) -> Response:
    """States at the thread's checkpoints, newest first."""
    query = schemas.HistorySearch(limit=limit, before=schemas.Checkpoint(checkpoint_id=before) if before else None)
    return reply(await states.history(principal, thread_id, query))


@router.post(
    "/{thread_id}/history",
    summary="Search the history",
    response_model=list[schemas.ThreadState],
    responses=responses(404, 409),
)
async def search_history(
    thread_id: ThreadId, states: States, principal: Reader, body: schemas.HistorySearch | None = None
) -> Response:
    """States at the thread's checkpoints, newest first, chosen by metadata or before a checkpoint."""
    return reply(await states.history(principal, thread_id, body or schemas.HistorySearch()))
