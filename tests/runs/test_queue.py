"""The job's SQL: claim once, keep order, take over, refuse what is not one's own any more."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError
from uuid_utils.compat import uuid7

from app.db.engine import Database
from app.runs import lookup, queue
from app.runs.models import TERMINAL, TRANSITIONS, CancelAction, Run, RunKind, RunStatus, StopReason
from app.runs.queue import Claimant
from app.threads.models import Thread

ME, OTHER = Claimant("me", 30.0), Claimant("other", 30.0)


async def make_thread(database: Database) -> UUID:
    thread = Thread(id=uuid7(), tenant_id="default", metadata_={})
    async with database.transaction() as tx:
        tx.add(thread)
    return thread.id


def new_run(thread_id: UUID, *, kind: RunKind = RunKind.input, **kwargs: object) -> Run:
    return Run(
        id=uuid7(),
        tenant_id="default",
        thread_id=thread_id,
        assistant_id=uuid7(),
        assistant_version=1,
        graph_id="react",
        subject="local",
        kind=kind,
        kwargs=kwargs,
        metadata_={},
        multitask_strategy="enqueue",
    )


async def submit(database: Database, run: Run, claimant: Claimant | None = None) -> Run:
    async with database.transaction() as tx:
        await queue.lock_thread(tx, run.thread_id)
        return await queue.insert(tx, run, claimant)


async def claim(database: Database, thread_id: UUID, claimant: Claimant, *, paused: bool = False) -> Run | None:
    async with database.transaction() as tx:
        thread = await queue.lock_thread(tx, thread_id)
        assert thread is not None
        return await queue.claim_next(tx, thread, claimant, paused=paused)


async def finish(database: Database, run: Run, status: RunStatus = RunStatus.success) -> bool:
    async with database.transaction() as tx:
        return await queue.finish(tx, run, status, StopReason.finished)


async def expire(database: Database, run: Run) -> None:
    async with database.transaction() as tx:
        await tx.execute(text("UPDATE runs SET lease_until = now() - interval '1 second' WHERE id = :id"), {"id": run.id})


async def status(database: Database, run: Run) -> str | None:
    async with database.transaction() as tx:
        return await tx.scalar(select(Run.status).where(Run.id == run.id))


async def test_a_run_claimed_while_it_is_inserted_belongs_to_its_process(database: Database) -> None:
    run = await submit(database, new_run(await make_thread(database)), ME)
    assert (run.status, run.owner, run.epoch, run.attempts) == ("running", "me", 1, 1)
    assert run.base_checkpoint_id is None


async def test_of_many_claimants_one_gets_the_run(database: Database) -> None:
    run = await submit(database, new_run(await make_thread(database)))
    claimed = await asyncio.gather(*(claim(database, run.thread_id, Claimant(f"p{i}", 30.0)) for i in range(8)))
    winners = [c for c in claimed if c is not None]
    assert [w.id for w in winners] == [run.id]
    assert winners[0].epoch == 1


async def test_a_thread_never_runs_twice(database: Database) -> None:
    thread_id = await make_thread(database)
    first = await submit(database, new_run(thread_id), ME)
    second = await submit(database, new_run(thread_id))
    assert await claim(database, thread_id, OTHER) is None
    with pytest.raises(IntegrityError, match="uq_runs_running_thread"):
        await submit(database, new_run(thread_id), OTHER)
    assert await finish(database, first)
    following = await claim(database, thread_id, OTHER)
    assert following is not None
    assert following.id == second.id


async def test_runs_of_a_thread_keep_the_order_of_submission(database: Database) -> None:
    thread_id = await make_thread(database)
    submitted = [(await submit(database, new_run(thread_id))).id for _ in range(5)]
    ran = []
    while (run := await claim(database, thread_id, ME)) is not None:
        ran.append(run.id)
        await finish(database, run)
    assert ran == submitted


async def test_answers_go_before_queued_input_and_alone_while_a_question_is_open(database: Database) -> None:
    thread_id = await make_thread(database)
    waiting = await submit(database, new_run(thread_id))
    assert await claim(database, thread_id, ME, paused=True) is None
    answer = await submit(database, new_run(thread_id, kind=RunKind.resume))
    run = await claim(database, thread_id, ME, paused=True)
    assert run is not None
    assert run.id == answer.id
    await finish(database, run)
    assert await claim(database, thread_id, ME, paused=True) is None
    run = await claim(database, thread_id, ME)
    assert run is not None
    assert run.id == waiting.id


async def test_a_delayed_run_does_not_block_a_ready_one(database: Database) -> None:
    thread_id = await make_thread(database)
    delayed = await submit(database, new_run(thread_id, after_seconds=60))
    ready = await submit(database, new_run(thread_id))
    run = await claim(database, thread_id, ME)
    assert run is not None
    assert run.id == ready.id
    await finish(database, run)
    assert await claim(database, thread_id, ME) is None
    assert await status(database, delayed) == "pending"


async def test_an_expired_lease_is_taken_over_and_the_zombie_can_write_nothing(database: Database) -> None:
    run = await submit(database, new_run(await make_thread(database)), ME)
    assert await claim(database, run.thread_id, OTHER) is None
    await expire(database, run)
    taken = await claim(database, run.thread_id, OTHER)
    assert taken is not None
    assert (taken.id, taken.epoch, taken.owner, taken.attempts) == (run.id, 2, "other", 2)
    assert not await finish(database, run)
    async with database.transaction() as tx:
        assert not await queue.release(tx, run, StopReason.drained)
        assert await queue.renew(tx, ME, [run.id]) == {}
    assert await status(database, run) == "running"
    assert await finish(database, taken)


async def test_a_released_run_goes_on_anywhere_and_does_not_count_as_an_attempt(database: Database) -> None:
    run = await submit(database, new_run(await make_thread(database)), ME)
    async with database.transaction() as tx:
        assert await queue.release(tx, run, StopReason.drained)
    again = await claim(database, run.thread_id, OTHER)
    assert again is not None
    assert (again.epoch, again.attempts) == (2, 1)


async def test_a_row_that_its_process_does_not_execute_is_left_to_expire(database: Database) -> None:
    held = await submit(database, new_run(await make_thread(database)), ME)
    forgotten = await submit(database, new_run(await make_thread(database)), ME)
    async with database.transaction() as tx:
        assert await queue.renew(tx, ME, [held.id]) == {held.id: (1, None)}
    await expire(database, forgotten)
    async with database.transaction() as tx:
        assert await lookup.stranded(tx, older_than=15, limit=10) == [forgotten.thread_id]


async def test_runs_that_nobody_starts_are_found(database: Database) -> None:
    run = await submit(database, new_run(await make_thread(database)))
    asks = await submit(database, new_run(await make_thread(database)))
    await submit(database, new_run(await make_thread(database), after_seconds=60))
    async with database.transaction() as tx:
        await queue.wait_for_human(tx, asks.thread_id)
        assert await lookup.stranded(tx, older_than=3600, limit=10) == []
        assert await lookup.stranded(tx, older_than=-1, limit=10) == [run.thread_id]


async def test_cancelling_ends_what_waits_and_tells_what_runs(database: Database) -> None:
    thread_id = await make_thread(database)
    running = await submit(database, new_run(thread_id), ME)
    waiting = await submit(database, new_run(thread_id))
    async with database.transaction() as tx:
        thread = await queue.lock_thread(tx, thread_id)
        assert thread is not None
        both = [waiting.id, running.id]
        assert await queue.cancel(tx, thread, both, CancelAction.interrupt) == ([waiting.id], [running.id], False)
    assert await status(database, waiting) == "interrupted"
    async with database.transaction() as tx:
        assert await queue.renew(tx, ME, [running.id]) == {running.id: (1, "interrupt")}


async def test_a_run_that_was_given_back_is_cancelled_by_whoever_claims_it(database: Database) -> None:
    run = await submit(database, new_run(await make_thread(database)), ME)
    async with database.transaction() as tx:
        await queue.release(tx, run, StopReason.drained)
        thread = await queue.lock_thread(tx, run.thread_id)
        assert thread is not None
        assert await queue.cancel(tx, thread, [run.id], CancelAction.interrupt) == ([], [run.id], True)
    again = await claim(database, run.thread_id, OTHER)
    assert again is not None
    assert again.cancel == "interrupt"


async def test_a_run_that_is_to_be_rolled_back_ends_in_no_other_way(database: Database) -> None:
    run = await submit(database, new_run(await make_thread(database)), ME)
    async with database.transaction() as tx:
        thread = await queue.lock_thread(tx, run.thread_id)
        assert thread is not None
        await queue.cancel(tx, thread, [run.id], CancelAction.rollback)
        await queue.cancel(tx, thread, [run.id], CancelAction.interrupt)
    assert not await finish(database, run)
    async with database.transaction() as tx:
        assert await queue.wants_rollback(tx, run)
        assert await queue.finish(tx, run, RunStatus.interrupted, StopReason.rolled_back, rolled_back=True)


async def test_leases_of_the_dead_end_at_once(database: Database) -> None:
    run = await submit(database, new_run(await make_thread(database)), ME)
    async with database.transaction() as tx:
        assert await lookup.owners(tx) == ["me"]
        await queue.expire(tx, ["me"])
    assert (await claim(database, run.thread_id, OTHER)) is not None


def test_nothing_leaves_a_terminal_status() -> None:
    assert all(not TRANSITIONS[status] for status in TERMINAL)
    assert set(TRANSITIONS) == set(RunStatus)
    with pytest.raises(AssertionError):
        queue.check(RunStatus.success, RunStatus.running)
