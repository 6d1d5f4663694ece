"""Routes under `/store`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import ValidationError

from app.auth import Principal, require
from app.errors import FieldError, Invalid
from app.openapi import responses
from app.store import schemas
from app.store.service import StoreService
from app.wire import reply

router = APIRouter(prefix="/store", tags=["Store"])


async def service(request: Request) -> StoreService:
    """The service of this process."""
    found: StoreService = request.app.state.resources.store
    return found


Service = Annotated[StoreService, Depends(service)]
Reader = Annotated[Principal, require("store:read")]
Writer = Annotated[Principal, require("store:write")]


@router.put("/items", summary="Store an item", status_code=204, responses=responses())
async def put(body: schemas.ItemPut, store: Service, principal: Writer) -> Response:
    """Store a value under a namespace and key, in place of what was there. Agents' memories live under
    `["memories", user]`. Without the scope `users:any` only your own can be used.
    """
    await store.put(principal, body.namespace, body.key, body.value)
    return Response(status_code=204)


@router.get("/items", summary="Get an item", response_model=schemas.ItemRead | None, responses=responses())
async def get(
    store: Service,
    principal: Reader,
    key: Annotated[str, Query()],
    namespace: Annotated[list[str], Query(description="Labels joined by periods, or one parameter for each label.")],
) -> Response:
    """An item, or `null` if there is none."""
    labels = namespace[0].split(".") if len(namespace) == 1 else namespace
    try:
        named = schemas.Named(namespace=labels, key=key)
    except ValidationError as error:
        errors: list[FieldError] = [
            {"path": ".".join(map(str, e["loc"])), "message": e["msg"]} for e in error.errors(include_url=False)
        ]
        raise Invalid(f"{errors[0]['path']}: {errors[0]['message']}", errors=errors) from error
    item = await store.get(principal, named.namespace, named.key)
    return reply(None if item is None else schemas.read(item))


@router.delete("/items", summary="Delete an item", status_code=204, responses=responses())
async def delete(body: schemas.Named, store: Service, principal: Writer) -> Response:
    """Delete an item. It is no error if there is none."""
    await store.delete(principal, body.namespace, body.key)
    return Response(status_code=204)


@router.post("/items/search", summary="Search items", response_model=schemas.ItemsRead, responses=responses())
async def search(body: schemas.ItemSearch, store: Service, principal: Reader) -> Response:
    """Items under a namespace prefix, last changed first. Without the scope `users:any` a wider prefix than your own
    memories' is narrowed to them.
    """
    return reply({"items": [schemas.read(item) for item in await store.search(principal, body)]})


@router.post("/namespaces", summary="List namespaces", response_model=schemas.NamespacesRead, responses=responses())
async def namespaces(body: schemas.NamespaceSearch, store: Service, principal: Reader) -> Response:
    """Namespaces that hold items."""
    return reply({"namespaces": await store.namespaces(principal, body)})
