"""What a run may do on a thread that waits for a human, and how a LangGraph client's resume becomes inbox decisions.

A bare resume binds on arrival to the one question that its sender was shown, and never waits for the next one.
"""

from __future__ import annotations

from typing import Any, NoReturn
from uuid import UUID

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession

from app.auth import Principal
from app.codec import clean
from app.errors import AppError, Conflict, Forbidden, Invalid
from app.inbox import items
from app.inbox.decisions import (
    Terms,
    examine,
    is_breakpoint,
    refuse_closed,
    refuse_second_effect,
    store,
)
from app.inbox.items import By, item_json
from app.inbox.models import InboxItem, ItemStatus
from app.inbox.payloads import Answer, from_client
from app.runs.schemas import RunCreate
from app.threads.models import Thread, ThreadStatus

HEAD = text("SELECT max(checkpoint_id) FROM checkpoints WHERE thread_id = :thread AND checkpoint_ns = ''")
ANSWERED = (ItemStatus.decided, ItemStatus.resuming, ItemStatus.settled, ItemStatus.failed)
HEX = frozenset("0123456789abcdef")
VIA = "run"


async def admit(tx: AsyncSession, thread: Thread, request: RunCreate, principal: Principal, *, strict: bool) -> list[InboxItem]:
    """The items that this request has just decided; none if it may go on and make an ordinary run.

    Raises Conflict with `items` when it may do neither.
    """
    known = await items.lock(tx, thread.id)
    pending = [item for item in known if item.status == ItemStatus.pending]
    if request.resumes:
        return await _resume(tx, thread, request, principal, known, pending, strict=strict)
    if not pending:
        return []
    if request.input is None and request.command is None:
        released = await _released(tx, thread, request, principal, pending)
        if released is not None:
            return await _decide(tx, [(released, Answer("accept"))], principal)
    _conflict("The thread waits for a human. Answer the open questions first: see `items`.", "thread_waiting", known)


async def _resume(
    tx: AsyncSession,
    thread: Thread,
    request: RunCreate,
    principal: Principal,
    known: list[InboxItem],
    pending: list[InboxItem],
    *,
    strict: bool,
) -> list[InboxItem]:
    command = request.command
    assert command is not None
    if request.after_seconds is not None:
        raise Invalid.field("after_seconds", "an answer cannot be delayed; leave it out with command.resume")
    if command.update is not None or command.goto is not None:
        raise Invalid.field("command", "resume cannot be combined with update or goto; send them as a run of their own")
    if not principal.can("inbox:decide"):
        raise Forbidden("Answering a question needs the scope inbox:decide.", code="missing_scope", scope="inbox:decide")
    await _refuse_other_checkpoint(tx, thread, request, known)
    resume = clean(command.resume)
    if is_id_map(resume):
        return await _decide(tx, await _addressed(tx, thread, resume, principal, known), principal)
    if strict:
        raise Invalid.field(
            "command.resume",
            "name what you answer, as {interrupt_id: answer}; this server takes no bare answers",
            code="bare_resume",
        )
    if not known:
        _conflict("The thread asks nothing. There is nothing to resume.", "nothing_pending", known)
    if thread.status == ThreadStatus.busy or not pending:
        _conflict("The thread is busy with an earlier answer. Wait for it, then answer by id.", "thread_busy", known)
    if len(pending) > 1:
        _conflict("Several questions are open. Say which you answer: {interrupt_id: answer}.", "ambiguous_resume", pending)
    [item] = pending
    await _refuse_unseen(tx, item, principal)
    return await _decide(tx, [(item, _parsed(item, resume, "command.resume"))], principal, bare=True)


def is_id_map(resume: Any) -> bool:
    """Whether a resume value names what it answers: by LangGraph's interrupt ids, or by our items' ids."""
    return isinstance(resume, dict) and bool(resume) and all(_is_id(key) for key in resume)


def _is_id(key: str) -> bool:
    return (len(key) == 32 and HEX.issuperset(key)) or _uuid(key) is not None


def _uuid(key: str) -> UUID | None:
    try:
        return UUID(key) if len(key) == 36 else None
    except ValueError:
        return None


async def _addressed(
    tx: AsyncSession, thread: Thread, resume: dict[str, Any], principal: Principal, known: list[InboxItem]
) -> list[tuple[InboxItem, Answer]]:
    """The items that an id map names, with their answers. All of them can be answered, or none is."""
    found: dict[UUID, tuple[InboxItem, Answer]] = {}
    for key, value in resume.items():
        item = await _named(tx, thread, key, principal, known)
        if item.id in found:
            raise Invalid.field(f"command.resume.{key}", "answers the same question as another entry")
        refuse_closed(item)
        found[item.id] = item, _parsed(item, value, f"command.resume.{key}")
    return list(found.values())


async def _named(tx: AsyncSession, thread: Thread, key: str, principal: Principal, known: list[InboxItem]) -> InboxItem:
    """The item that a key of an id map names on this thread."""
    by_id = _uuid(key)
    match = InboxItem.id == by_id if by_id else InboxItem.interrupt_id == key
    rows = await tx.scalars(
        select(InboxItem)
        .where(InboxItem.thread_id == thread.id, match)
        .order_by(InboxItem.created_at.desc(), InboxItem.id.desc())
    )
    found = list(rows.all())
    if not found:
        _conflict(f"The thread asks nothing under the id {key}.", "unknown_interrupt", known)
    item = next((i for i in found if i.status == ItemStatus.pending), found[0])
    used = any(i is not item and i.decided_at is not None for i in found)
    if item.status == ItemStatus.pending and used and principal.subject not in item.seen_by:
        # A late answer to the question that had this id before must not reach this one.
        _conflict(f"The id {key} was used for several questions. Answer by the item's id.", "ambiguous_resume", found)
    return item


async def _refuse_unseen(tx: AsyncSession, item: InboxItem, principal: Principal) -> None:
    """A bare answer is an answer to what its sender was shown last, so it must have been shown this."""
    if principal.subject not in item.seen_by:
        _conflict("This question was not delivered to you yet. Read it, then answer it by its id.", "not_delivered", [item])
    if item.args_hash is None:
        return
    again = await tx.scalar(
        select(InboxItem.id)
        .where(
            InboxItem.thread_id == item.thread_id,
            InboxItem.args_hash == item.args_hash,
            InboxItem.id != item.id,
            InboxItem.status.in_(ANSWERED),
        )
        .limit(1)
    )
    if again is not None:
        _conflict("The same call was decided before on this thread. Answer this one by its id.", "answered_before", [item])


async def _released(
    tx: AsyncSession, thread: Thread, request: RunCreate, principal: Principal, pending: list[InboxItem]
) -> InboxItem | None:
    """The breakpoint that a run without input releases: it quotes the checkpoint, or it was shown nothing else."""
    if len(pending) != 1 or not is_breakpoint(pending[0]) or thread.status == ThreadStatus.busy:
        return None
    [item] = pending
    await _refuse_other_checkpoint(tx, thread, request, pending)
    quoted = _checkpoint(request) is not None
    if not quoted and principal.subject not in item.seen_by:
        return None
    if not principal.can("inbox:decide"):
        raise Forbidden("Releasing a breakpoint needs the scope inbox:decide.", code="missing_scope", scope="inbox:decide")
    return item


async def _decide(
    tx: AsyncSession, answers: list[tuple[InboxItem, Answer]], principal: Principal, *, bare: bool = False
) -> list[InboxItem]:
    """Check all answers, then store all of them."""
    checked = []
    for item, answer in answers:
        try:
            one = examine(item, answer)
        except Invalid as error:
            if bare and error.code == "action_request_differs":
                _conflict("The call is not the one that you answer. Read it again.", "args_changed", [item])
            raise
        await refuse_second_effect(tx, item, one, Terms())
        checked.append((item, one))
    for item, one in checked:
        await store(tx, item, one, By.human(principal, VIA, bare=bare), Terms())
    return [item for item, _ in checked]


def _parsed(item: InboxItem, value: Any, path: str) -> Answer:
    answer = from_client(item.kind, item.value, value)
    if answer is None:
        wrong = "must be a HumanResponse: {type, args}, or a list of one"
        raise Invalid(f"{path}: {wrong}", errors=[{"path": path, "message": wrong}], item=item_json(item))
    return answer


async def _refuse_other_checkpoint(tx: AsyncSession, thread: Thread, request: RunCreate, shown: list[InboxItem]) -> None:
    """A client that says which checkpoint it saw must have seen the newest."""
    wanted = _checkpoint(request)
    if wanted is None:
        return
    if wanted != await tx.scalar(HEAD, {"thread": str(thread.id)}):
        _conflict("The thread has moved on from that checkpoint. Read its state again.", "checkpoint_changed", shown)


def _checkpoint(request: RunCreate) -> str | None:
    checkpoint = request.checkpoint or {}
    wanted = checkpoint.get("checkpoint_id") or request.checkpoint_id
    return str(wanted) if wanted else None


def _conflict(message: str, code: str, shown: list[InboxItem]) -> NoReturn:
    error: AppError = Conflict(message, code=code, items=[item_json(item) for item in shown])
    raise error
