"""A decision: what speaks against it, and how it is stored. Everything is refused before anything is written."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import orjson
from sqlalchemy.ext.asyncio import AsyncSession

from app.auth import Principal
from app.errors import Conflict, Gone, Invalid, PreconditionFailed
from app.inbox import items, permits
from app.inbox.answers import Checked, check
from app.inbox.items import By, item_json
from app.inbox.models import InboxItem, ItemStatus
from app.inbox.payloads import Answer, Kind

EFFECTS = ("accept", "edit")
ENDS = {
    ItemStatus.expired: "Nobody answered in time.",
    ItemStatus.superseded: "The question is not asked any more.",
    ItemStatus.withdrawn: "The question was withdrawn.",
}


@dataclass(frozen=True, slots=True)
class Terms:
    """Under which conditions a reviewer's answer may be stored."""

    versions: frozenset[int] | None = None
    """The versions that the reviewer read (`If-Match`); None for any."""
    args_hash: str | None = None
    """Hash of the call that the reviewer read."""
    key: str | None = None
    """Idempotency key, of this subject."""
    allow_duplicate: bool = False
    """Carry out a call that the thread this one was copied from has carried out already."""


def fingerprint(answer: Answer, terms: Terms) -> str:
    """Names the body of a request: the same key with another body is a mistake."""
    body = [answer.type, answer.args, terms.args_hash, terms.allow_duplicate]
    return hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()


def repeated(item: InboxItem, key: str, body: str) -> bool:
    """Whether this very request was answered before. A key that stands for something else is refused."""
    if item.idempotency_key != key:
        return False
    if item.idempotency_hash != body:
        raise Invalid(
            "This Idempotency-Key was used for another answer to this question. Use a new key.",
            code="idempotency_mismatch",
            item=item_json(item),
        )
    if item.decision is None:
        raise Conflict(
            "This answer was stored and then revoked, because its run was cancelled. Use a new key to answer again.",
            code="revoked",
            item=item_json(item),
        )
    return True


def refuse_closed(item: InboxItem) -> None:
    """Only a pending question can be answered; the loser is told who won."""
    status = ItemStatus(item.status)
    if status is ItemStatus.pending:
        return
    if status in ENDS:
        raise Gone(f"{ENDS[status]} It is {status.value}.", code=status.value, item=item_json(item))
    decision = item.decision or {}
    raise Conflict(
        f"{decision.get('by')} was first and decided: {decision.get('type')}.", code="already_decided", item=item_json(item)
    )


def refuse_unread(item: InboxItem, terms: Terms) -> None:
    """Refuse an answer to something else than what is asked now."""
    if terms.versions is not None and item.version not in terms.versions:
        raise PreconditionFailed(f"The item is at version {item.version}. Read it again.", item=item_json(item))
    if terms.args_hash is not None and terms.args_hash != item.args_hash:
        raise Conflict(
            "The arguments are not those that you were shown. Read the item again.", code="args_changed", item=item_json(item)
        )


def examine(item: InboxItem, answer: Answer) -> Checked:
    """The checked answer; what is wrong with it comes with the item."""
    try:
        return check(item, answer)
    except Invalid as error:
        error.extra["item"] = item_json(item)
        raise


async def refuse_second_effect(tx: AsyncSession, item: InboxItem, checked: Checked, terms: Terms) -> None:
    """A call is carried out once. If it was, or may have been, no further decision makes it run."""
    if not item.bound or checked.answer.type not in EFFECTS:
        return
    before = await permits.spent(tx, item)
    if before is not None and before.receipt is None:
        raise Conflict(
            "The call was started before and nobody knows how it ended. Answer with response or ignore.",
            code="unknown_outcome",
            item=item_json(item),
        )
    elsewhere = before is None and item.copied_from is not None and not terms.allow_duplicate
    if (before is not None and before.args_hash != checked.args_hash) or (
        elsewhere and await permits.spent_in_source(tx, item)
    ):
        raise Conflict(
            "The call was carried out already. Answer with response or ignore"
            + (", or with allow_duplicate to carry it out again on this copy." if elsewhere else "."),
            code="already_carried_out",
            item=item_json(item),
        )


async def store(tx: AsyncSession, item: InboxItem, checked: Checked, by: By, terms: Terms) -> None:
    """pending → decided: the decision, its audit record and, where a call may run now, its permit."""
    answer, now = checked.answer, datetime.now(UTC)
    decision: dict[str, Any] = {
        "type": answer.type,
        "args": answer.args,
        "by": by.actor,
        "via": by.via,
        "at": now.isoformat(),
        "cause": by.cause,
        "diff": checked.diff,
        "args_hash": checked.args_hash,
    }
    if item.bound and answer.type in EFFECTS and checked.args_hash is not None:
        await permits.mint(tx, item, checked.args_hash)
    await items.move(
        tx,
        item,
        ItemStatus.decided,
        By(by.actor, by.via, by.cause, {**by.detail, "decision": decision}),
        decision=decision,
        decided_at=now,
        outcome={"state": "queued", "error": None, "tool_message_id": None},
        idempotency_key=terms.key,
        idempotency_hash=fingerprint(answer, terms) if terms.key else None,
    )


async def revoke(tx: AsyncSession, item: InboxItem, by: By) -> None:
    """decided or resuming → pending: the answer never reached the graph. The question is open again."""
    await permits.revoke(tx, item)
    await items.move(
        tx,
        item,
        ItemStatus.pending,
        By(by.actor, by.via, by.cause, {**by.detail, "decision": item.decision}),
        audit="revoked",
        decision=None,
        decided_at=None,
        outcome=None,
        resume_run_id=None,
    )


async def close(tx: AsyncSession, item: InboxItem, to: ItemStatus, by: By) -> None:
    """To superseded or withdrawn: nothing that was decided may still happen."""
    await permits.revoke(tx, item)
    await items.move(tx, item, to, by)


def key_of(principal: Principal, key: str | None) -> str | None:
    """Keys of different subjects never meet."""
    return f"{principal.subject}\n{key}" if key else None


def is_breakpoint(item: InboxItem) -> bool:
    """Whether the item stands for a static breakpoint."""
    return item.kind == Kind.breakpoint


@dataclass(frozen=True, slots=True)
class Decided:
    """What the reviewer gets: the item as it is now, and the run that carries the answer (None for a dry run)."""

    item: dict[str, Any]
    run_id: UUID | None
    checked: Checked | None = None
    repeated: bool = False
