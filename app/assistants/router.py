"""Routes under `/assistants`."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from app.assistants import schemas
from app.assistants.service import AssistantService
from app.auth import Principal, require
from app.errors import Invalid
from app.openapi import responses
from app.wire import page_headers, reply

router = APIRouter(prefix="/assistants", tags=["Assistants"])


async def service(request: Request) -> AssistantService:
    """The service of this process."""
    found: AssistantService = request.app.state.resources.assistants
    return found


Service = Annotated[AssistantService, Depends(service)]
Reader = Annotated[Principal, require("assistants:read")]
Writer = Annotated[Principal, require("assistants:write")]
Ref = Annotated[str, Path(description="The assistant's UUID, or the name of a served graph or example.", max_length=500)]
Id = Annotated[UUID, Path(description="The assistant's UUID.")]


@router.post("", summary="Create an assistant", response_model=schemas.AssistantRead, responses=responses(400, 404, 409))
async def create(body: schemas.AssistantCreate, assistants: Service, principal: Writer) -> Response:
    """Store a configuration of a graph. It is validated here: a model, prompt, tool or review rule that cannot work is a
    422 that names the field. `config.configurable` and `context` are one thing; set one of them.
    """
    async with assistants.database.transaction() as tx:
        row = await assistants.create(tx, principal, body)
    return reply(schemas.read(row))


@router.post("/search", summary="Search assistants", response_model=list[schemas.AssistantRead], responses=responses(404))
async def search(body: schemas.AssistantSearch, assistants: Service, principal: Reader) -> Response:
    """Your assistants and those that come with the server, newest first. `X-Pagination-Total` is the number of all matches,
    `X-Pagination-Next` the next offset.
    """
    async with assistants.database.transaction() as tx:
        rows, total = await assistants.search(tx, principal, body)
    return reply([schemas.read(r, body.select) for r in rows], headers=page_headers(total, body.offset, len(rows)))


@router.post("/count", summary="Count assistants", response_model=int, responses=responses(404))
async def count(body: schemas.AssistantFilter, assistants: Service, principal: Reader) -> Response:
    """How many assistants match, as a bare number."""
    async with assistants.database.transaction() as tx:
        return reply(await assistants.count(tx, principal, body))


@router.get("/{assistant_id}", summary="Get an assistant", response_model=schemas.AssistantRead, responses=responses(404))
async def get(assistant_id: Ref, assistants: Service, principal: Reader) -> Response:
    """The assistant as it is now."""
    async with assistants.database.transaction() as tx:
        row = await assistants.get(tx, principal, assistant_id)
    return reply(schemas.read(row))


@router.patch(
    "/{assistant_id}", summary="Change an assistant", response_model=schemas.AssistantRead, responses=responses(400, 404)
)
async def patch(assistant_id: Ref, body: schemas.AssistantPatch, assistants: Service, principal: Writer) -> Response:
    """Make a new version, and make it current. Threads that ask a question go on with the version that asked."""
    async with assistants.database.transaction() as tx:
        row = await assistants.update(tx, principal, assistant_id, body)
    return reply(schemas.read(row))


@router.delete("/{assistant_id}", summary="Delete an assistant", status_code=204, responses=responses(404))
async def delete(
    assistant_id: Ref,
    assistants: Service,
    principal: Writer,
    delete_threads: Annotated[bool, Query(description="Not supported: threads are deleted one by one.")] = False,
) -> Response:
    """Delete an assistant. Its threads stay readable, and questions that it has asked can still be answered."""
    if delete_threads:
        raise Invalid.field("delete_threads", "not supported; delete the threads one by one")
    async with assistants.database.transaction() as tx:
        await assistants.delete(tx, principal, assistant_id)
    return Response(status_code=204)


@router.post(
    "/{assistant_id}/versions", summary="List versions", response_model=list[schemas.VersionRead], responses=responses(404)
)
async def versions(
    assistant_id: Ref, assistants: Service, principal: Reader, body: schemas.VersionSearch | None = None
) -> Response:
    """The assistant's versions, newest first."""
    async with assistants.database.transaction() as tx:
        rows = await assistants.versions(tx, principal, assistant_id, body or schemas.VersionSearch())
    return reply([schemas.read_version(r) for r in rows])


@router.post(
    "/{assistant_id}/latest", summary="Choose the version", response_model=schemas.AssistantRead, responses=responses(404)
)
async def latest(assistant_id: Ref, body: schemas.SetLatest, assistants: Service, principal: Writer) -> Response:
    """Make an existing version the current one, with its configuration, context, name and metadata."""
    async with assistants.database.transaction() as tx:
        row = await assistants.set_latest(tx, principal, assistant_id, body.version)
    return reply(schemas.read(row))


@router.get(
    "/{assistant_id}/schemas", summary="Get JSON Schemas", response_model=schemas.AssistantSchemas, responses=responses(404)
)
async def get_schemas(assistant_id: Ref, assistants: Service, principal: Reader) -> Response:
    """JSON Schemas of the graph's input, output, state, configuration and context; null where it has none."""
    async with assistants.database.transaction() as tx:
        pinned = await assistants.resolve(tx, principal, assistant_id)
    return reply(assistants.schemas(pinned))


@router.get("/{assistant_id}/graph", summary="Draw the graph", response_model=schemas.Drawing, responses=responses(404))
async def get_graph(
    assistant_id: Ref,
    assistants: Service,
    principal: Reader,
    xray: Annotated[str, Query(description="`true` opens subgraphs, a positive number does so to that depth.")] = "false",
) -> Response:
    """Nodes and edges, to draw the graph from."""
    depth = _xray(xray)
    async with assistants.database.transaction() as tx:
        pinned = await assistants.resolve(tx, principal, assistant_id)
    return reply(assistants.drawing(pinned, xray=depth))


@router.get("/{assistant_id}/subgraphs", summary="Get subgraphs", response_model=dict[str, Any], responses=responses(404))
@router.get(
    "/{assistant_id}/subgraphs/{namespace}",
    summary="Get one subgraph",
    response_model=dict[str, Any],
    responses=responses(404),
)
async def get_subgraphs(
    assistant_id: Ref, assistants: Service, principal: Reader, namespace: str | None = None, recurse: bool = False
) -> Response:
    """JSON Schemas of the graph's subgraphs by namespace. The built-in `react` has none."""
    async with assistants.database.transaction() as tx:
        pinned = await assistants.resolve(tx, principal, assistant_id)
    return reply(assistants.subgraphs(pinned, namespace=namespace, recurse=recurse))


def _xray(value: str) -> bool | int:
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value.isdecimal() and int(value[:4]) > 0:
        return int(value[:4])
    raise Invalid.field("xray", "must be true, false or a positive number")
