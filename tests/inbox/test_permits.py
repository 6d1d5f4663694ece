"""Effect permits: granted once, to the holder of the run, for the very arguments that were decided."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text
from uuid_utils.compat import uuid7

from app.db.engine import Database
from app.graphs.review import GatedCall, LeaseLost, Receipt, args_hash
from app.inbox import permits
from app.inbox.models import InboxItem
from app.inbox.permits import PostgresEffectGate
from app.runs import queue
from app.runs.models import Run, RunKind
from app.runs.queue import Claimant
from app.threads.models import Thread

ARGS = {"to": "Ada", "amount": 5}
MESSAGE = {"content": "Done.\0", "status": "success", "artifact": None, "additional_kwargs": {}}


async def held_run(database: Database) -> Run:
    """A run that is running, claimed for the first time."""
    thread = Thread(id=uuid7(), tenant_id="default", metadata_={})
    run = Run(
        id=uuid7(),
        tenant_id="default",
        thread_id=thread.id,
        assistant_id=uuid7(),
        assistant_version=1,
        graph_id="react",
        subject="local",
        kind=RunKind.resume,
        kwargs={},
        metadata_={},
        multitask_strategy="enqueue",
    )
    async with database.transaction() as tx:
        tx.add(thread)
        await tx.flush()
        return await queue.insert(tx, run, Claimant("me", 30))


async def taken_over(database: Database, run: Run) -> None:
    """Another process claims the run."""
    async with database.transaction() as tx:
        await tx.execute(text("UPDATE runs SET lease_until = now() - interval '1 second' WHERE id = :id"), {"id": run.id})
        thread = await queue.lock_thread(tx, run.thread_id)
        assert thread is not None
        assert await queue.claim_next(tx, thread, Claimant("other", 30), paused=False)


def call_of(run: Run, **changes: Any) -> GatedCall:
    args = changes.pop("args", ARGS)
    call = GatedCall(
        thread_id=str(run.thread_id),
        message_id="ai-1",
        index=0,
        action="transfer",
        args=args,
        args_hash=args_hash("transfer", args),
        run_id=str(run.id),
        epoch=run.epoch,
    )
    return replace(call, **changes)


def item_of(run: Run, **changes: Any) -> InboxItem:
    fields = {"id": uuid7(), "thread_id": run.thread_id, "message_id": "ai-1", "call_index": 0, "copied_from": None}
    return InboxItem(tenant_id="default", **{**fields, **changes})


async def mint(database: Database, item: InboxItem, args: Any = ARGS) -> None:
    async with database.transaction() as tx:
        await permits.mint(tx, item, args_hash("transfer", args))


async def test_without_a_decision_there_is_no_permit(database: Database) -> None:
    run, gate = await held_run(database), PostgresEffectGate(database)
    assert await gate.spend(call_of(run)) == "absent"


@pytest.mark.parametrize(
    "other",
    [{"message_id": "ai-2"}, {"index": 1}, {"args": {"to": "Ada", "amount": 6}}, {"thread_id": str(UUID(int=7))}],
    ids=["message", "index", "args", "thread"],
)
async def test_a_permit_is_for_one_call_with_its_arguments(database: Database, other: dict[str, Any]) -> None:
    run, gate = await held_run(database), PostgresEffectGate(database)
    await mint(database, item_of(run))
    assert await gate.spend(call_of(run, **other)) == "absent"
    assert await gate.spend(call_of(run)) == "granted"


async def test_of_many_spends_one_is_granted(database: Database) -> None:
    run, gate = await held_run(database), PostgresEffectGate(database)
    await mint(database, item_of(run))
    got = await asyncio.gather(*(gate.spend(call_of(run)) for _ in range(30)))
    assert sorted(str(g) for g in got) == ["granted"] + ["unknown"] * 29


async def test_a_receipt_takes_the_place_of_the_call(database: Database) -> None:
    run, gate = await held_run(database), PostgresEffectGate(database)
    await mint(database, item_of(run))
    assert await gate.spend(call_of(run)) == "granted"
    await gate.receipt(call_of(run), MESSAGE)
    assert await gate.spend(call_of(run)) == Receipt({**MESSAGE, "content": "Done."})
    await gate.release(call_of(run))
    assert isinstance(await gate.spend(call_of(run)), Receipt)


async def test_a_call_that_paused_gets_its_permit_back(database: Database) -> None:
    run, gate = await held_run(database), PostgresEffectGate(database)
    await mint(database, item_of(run))
    assert await gate.spend(call_of(run)) == "granted"
    await gate.release(call_of(run, epoch=7))
    assert await gate.spend(call_of(run)) == "unknown"
    await gate.release(call_of(run))
    assert await gate.spend(call_of(run)) == "granted"


async def test_a_run_that_was_taken_over_spends_nothing_and_burns_nothing(database: Database) -> None:
    run, gate = await held_run(database), PostgresEffectGate(database)
    await mint(database, item_of(run))
    await taken_over(database, run)
    with pytest.raises(LeaseLost):
        await gate.spend(call_of(run))
    assert await gate.spend(call_of(run, epoch=2)) == "granted"


async def test_what_was_spent_before_a_takeover_is_never_run_again(database: Database) -> None:
    run, gate = await held_run(database), PostgresEffectGate(database)
    await mint(database, item_of(run))
    assert await gate.spend(call_of(run)) == "granted"
    await taken_over(database, run)
    assert await gate.spend(call_of(run, epoch=2)) == "unknown"
    # The first process was only slow: what it did is known after all.
    await gate.receipt(call_of(run), MESSAGE)
    assert isinstance(await gate.spend(call_of(run, epoch=2)), Receipt)


async def test_a_spent_permit_cannot_be_made_anew_or_taken_back(database: Database) -> None:
    run, gate = await held_run(database), PostgresEffectGate(database)
    item = item_of(run)
    await mint(database, item)
    await mint(database, item, {"to": "Ada", "amount": 6})
    assert await gate.spend(call_of(run)) == "absent"
    assert await gate.spend(call_of(run, args={"to": "Ada", "amount": 6})) == "granted"
    await mint(database, item)
    async with database.transaction() as tx:
        await permits.revoke(tx, item)
        assert await permits.outcome_unknown(tx, item)
    assert await gate.spend(call_of(run)) == "absent"
    assert await gate.spend(call_of(run, args={"to": "Ada", "amount": 6})) == "unknown"


async def test_a_revoked_permit_is_gone(database: Database) -> None:
    run, gate = await held_run(database), PostgresEffectGate(database)
    item = item_of(run)
    await mint(database, item)
    async with database.transaction() as tx:
        await permits.revoke(tx, item)
    assert await gate.spend(call_of(run)) == "absent"


async def test_a_graph_outside_of_a_run_needs_no_lease(database: Database) -> None:
    run, gate = await held_run(database), PostgresEffectGate(database)
    await mint(database, item_of(run))
    alone = call_of(run, run_id=None, epoch=None)
    assert await gate.spend(alone) == "granted"
    await gate.release(alone)
    assert await gate.spend(alone) == "granted"
    await gate.receipt(alone, MESSAGE)
    assert isinstance(await gate.spend(alone), Receipt)
