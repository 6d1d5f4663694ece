"""The inbox over HTTP: find questions, read them, answer them, follow them live. Knows no SQL."""

from __future__ import annotations

import re
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from fastapi import Response as HttpResponse

from app.auth import Principal, require
from app.codec import clean
from app.inbox.decisions import Terms
from app.inbox.feed import InboxFeed, parse_position
from app.inbox.schemas import Accepted, AuditRecord, Counts, DryRun, ItemPage, ItemQuery, ItemRead, Response
from app.inbox.service import InboxService
from app.openapi import responses
from app.streaming.sse import event_stream
from app.wire import reply

router = APIRouter(prefix="/inbox", tags=["inbox"])


async def service(request: Request) -> InboxService:
    """The service of this process."""
    inbox: InboxService = request.app.state.resources.inbox
    return inbox


def live(request: Request) -> InboxFeed:
    """The feed of this process."""
    feed: InboxFeed = request.app.state.resources.feed
    return feed


Inbox = Annotated[InboxService, Depends(service)]
Reader = Annotated[Principal, require("inbox:read")]
Decider = Annotated[Principal, require("inbox:decide")]
ItemId = Annotated[str, Path(description="The item's id, or the id of LangGraph's interrupt.", max_length=200)]
IfMatch = Annotated[str | None, Header(description='The version that was read, as `"3"`. A newer one is a 412.')]
IdempotencyKey = Annotated[
    str | None, Header(description="A repeat with the same key and body gets the same answer again.", max_length=255)
]

ETAG = {"ETag": {"description": "The item's version.", "schema": {"type": "string"}}}
EVENTS = {
    "description": "Server-sent events: `snapshot`, then `created`, `updated`, `decided`, `closed`.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}


@router.get("", summary="List questions", response_model=ItemPage, responses=responses(403, 422))
async def list_items(inbox: Inbox, principal: Reader, query: Annotated[ItemQuery, Query()]) -> HttpResponse:
    """Pending questions, oldest first. Pages stay stable while items come and go: follow `next_cursor` until it is null."""
    found, cursor = await inbox.page(principal, query)
    return reply({"items": found, "next_cursor": cursor})


@router.get("/counts", summary="Count questions", responses=responses(403))
async def count_items(inbox: Inbox, principal: Reader) -> Counts:
    """How many questions wait, by tool and by assistant, and how many items there are in each status."""
    return await inbox.counts(principal)


@router.get("/stream", summary="Follow the inbox live", responses={200: EVENTS, **responses(403)})
async def stream_items(request: Request, principal: Reader) -> HttpResponse:
    """A `snapshot` of what is pending (the first 200 items and the counts), then every change, each with the whole item.

    With `Last-Event-ID` the stream goes on behind that event, on any replica. An event may come twice: keep the item with
    the higher `version`.
    """
    after = parse_position(request.headers.get("last-event-id"))
    return event_stream(await live(request).subscribe(principal, after=after), headers={})


@router.get(
    "/{item_id}",
    summary="Get a question",
    response_model=ItemRead,
    responses={200: {"headers": ETAG}, **responses(403, 404)},
)
async def get_item(item_id: ItemId, inbox: Inbox, principal: Reader) -> HttpResponse:
    """One item as it is now. Its `version` is the ETag."""
    item = await inbox.get(principal, clean(item_id))
    return reply(item, headers=_etag(item))


@router.get("/{item_id}/history", summary="Get what happened to a question", responses=responses(403, 404))
async def get_history(item_id: ItemId, inbox: Inbox, principal: Reader) -> list[AuditRecord]:
    """The item's audit, oldest first. It is append-only."""
    return await inbox.history(principal, clean(item_id))


@router.post(
    "/{item_id}/response",
    status_code=202,
    summary="Answer a question",
    response_model=Accepted,
    responses={
        200: {"model": Accepted | DryRun, "description": "A repeat with the same Idempotency-Key, or a dry run."},
        202: {"headers": ETAG, "description": "Stored. The run that carries the answer is on its way."},
        **responses(403, 404, 409, 410, 412, 422),
    },
)
async def respond(
    item_id: ItemId,
    body: Response,
    inbox: Inbox,
    principal: Decider,
    if_match: IfMatch = None,
    idempotency_key: IdempotencyKey = None,
    dry_run: Annotated[bool, Query(description="Check everything, store nothing.")] = False,
) -> HttpResponse:
    """Answer with accept, edit, response or ignore. The first answer wins; everybody else gets a 409 with the winner's.

    The verb is checked against the item's `config`, an edit against the tool's schema, before anything is stored.
    """
    terms = Terms(
        versions=_versions(if_match),
        args_hash=body.args_hash,
        key=idempotency_key,
        allow_duplicate=body.allow_duplicate,
    )
    decided = await inbox.decide(principal, clean(item_id), body.answer(), terms, dry_run=dry_run)
    headers = _etag(decided.item)
    if decided.run_id is None:
        return reply({"item": decided.item, "run_id": None, "decision": _planned(decided.checked)}, headers=headers)
    headers["Location"] = _run_path(decided.item["thread_id"], decided.run_id)
    shown = {"item": decided.item, "run_id": decided.run_id}
    return reply(shown, status=200 if decided.repeated else 202, headers=headers)


def _planned(checked: Any) -> dict[str, Any]:
    return {
        "type": checked.answer.type,
        "args": checked.answer.args,
        "diff": checked.diff,
        "args_hash": checked.args_hash,
    }


def _run_path(thread_id: str, run_id: UUID) -> str:
    return f"/threads/{thread_id}/runs/{run_id}"


def _etag(item: dict[str, Any]) -> dict[str, str]:
    return {"ETag": f'"{item["version"]}"'}


def _versions(if_match: str | None) -> frozenset[int] | None:
    """The versions of an `If-Match`; None where any will do. What cannot be read matches nothing."""
    if if_match is None or if_match.strip() == "*":
        return None
    return frozenset(int(v) for v in re.findall(r'"(\d{1,9})"', if_match) or re.findall(r"^\s*(\d{1,9})\s*$", if_match))
