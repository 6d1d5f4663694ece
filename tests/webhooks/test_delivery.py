"""Delivery: what is repeated and what is not, by any process, after a crash too; nobody waits for somebody else's receiver."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any
from uuid import UUID, uuid4

import httpx
import psycopg
import pytest
import pytest_asyncio
from asgi import new_thread, serving
from fakes.receiver import Receiver, receiving
from processes import Servers
from psycopg.rows import dict_row

from app.db.engine import Database
from app.db.listen import Listener
from app.webhooks import delivery, outbox
from app.webhooks.delivery import ATTEMPTS, KEEP, LEASE, LONGEST_DELAY, PER_HOST, Deliverer, delay, retry_after
from app.webhooks.outbox import CHANNEL, Outbox

Row = dict[str, Any]


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


@pytest_asyncio.fixture
async def deliverer(database: Database) -> AsyncIterator[Deliverer]:
    """Delivers, as it does in a server."""
    listener = Listener(database.url)
    deliverer = Deliverer(database, listener, allow_private=True)
    tasks = [asyncio.create_task(listener.run()), asyncio.create_task(deliverer.run())]
    yield deliverer
    await deliverer.drain(1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await database.notifier.flush()


async def send(database: Database, *urls: str) -> list[UUID]:
    """Put messages into the outbox. Returns the ids of what they tell of."""
    runs = [uuid4() for _ in urls]
    async with database.transaction() as tx:
        for run, url in zip(runs, urls, strict=True):
            await Outbox().add(tx, tenant_id="default", run_id=run, url=url, event="run.finished", payload=b'{"run":"x"}')
    return runs


async def until(database: Database, run: UUID, **wanted: Any) -> Row:
    """The row of a message, once it is as wanted."""
    async with asyncio.timeout(20), database.pool.connection() as connection:
        while True:
            found = await connection.execute("SELECT *, now() FROM webhook_deliveries WHERE run_id = %s", [run])
            row = await found.fetchone()
            assert row is not None
            if wanted.items() <= row.items():
                return row
            await asyncio.sleep(0.01)


async def due(database: Database) -> None:
    """Have everything that waits attempted now."""
    async with database.pool.connection() as connection:
        await connection.execute("UPDATE webhook_deliveries SET next_attempt_at = now() WHERE status = 'pending'")
        await connection.execute("SELECT pg_notify(%s, '')", [CHANNEL])


async def test_a_server_error_is_repeated_with_the_same_id(
    deliverer: Deliverer, receiver: Receiver, database: Database
) -> None:
    receiver.answers["/"] = [(500, {}), (503, {}), (204, {})]
    [run] = await send(database, f"{receiver.url}/")
    row = await until(database, run, last_status=500)
    assert row["status"] == "pending"
    assert row["last_error"] == "The receiver answered 500"
    row = await until(database, run, last_status=503)  # after a delay, by itself
    await due(database)
    await until(database, run, status="delivered", attempts=3, last_status=204, last_error=None)
    assert {r.id for r in receiver.received} == {str(row["id"])}
    first, second, _ = (r.json["webhook_sent_at"] for r in receiver.received)
    assert timedelta(seconds=1) < datetime.fromisoformat(second) - datetime.fromisoformat(first) < timedelta(seconds=10)


@pytest.mark.parametrize("status", [301, 302, 401, 403, 404, 408, 429, 502])
async def test_what_may_change_is_repeated(deliverer: Deliverer, receiver: Receiver, database: Database, status: int) -> None:
    receiver.answers["/"] = [(status, {"location": f"{receiver.url}/elsewhere"})]
    [run] = await send(database, f"{receiver.url}/")
    row = await until(database, run, last_status=status)
    assert (row["status"], row["attempts"]) == ("pending", 1)
    assert timedelta(0) < row["next_attempt_at"] - row["now"] < timedelta(seconds=2.5)
    assert receiver.at("/elsewhere") == []


@pytest.mark.parametrize("status", [400, 410, 413, 415, 422])
async def test_what_will_not_change_is_not_repeated(
    deliverer: Deliverer, receiver: Receiver, database: Database, status: int
) -> None:
    receiver.answers["/"] = [(status, {})]
    [run] = await send(database, f"{receiver.url}/")
    await until(database, run, last_status=status, status="failed", attempts=1)


async def test_a_receiver_may_ask_to_be_left_alone(deliverer: Deliverer, receiver: Receiver, database: Database) -> None:
    receiver.answers["/"] = [(429, {"retry-after": "3600"})]
    [run] = await send(database, f"{receiver.url}/")
    row = await until(database, run, last_status=429)
    assert timedelta(seconds=3590) < row["next_attempt_at"] - row["now"] < timedelta(seconds=3601)
    at = datetime.now(UTC) + timedelta(seconds=600)
    assert 590 < retry_after(format_datetime(at, usegmt=True)) <= 600
    assert retry_after("99999999") == LONGEST_DELAY
    assert [retry_after(v) for v in (None, "", "soon", "-5", "²")] == [0] * 5


async def test_a_message_is_given_up_after_about_a_day(deliverer: Deliverer, receiver: Receiver, database: Database) -> None:
    waits = [delay(n) for n in range(1, ATTEMPTS)]
    assert 18 * 3600 < sum(waits) < 36 * 3600
    assert waits[0] < 3
    receiver.answers["/"] = [(500, {})] * 2
    [run] = await send(database, f"{receiver.url}/")
    await until(database, run, last_status=500)
    async with database.pool.connection() as connection:
        await connection.execute("UPDATE webhook_deliveries SET attempts = %s", [ATTEMPTS - 1])
    await due(database)
    await until(database, run, status="failed", attempts=ATTEMPTS)


async def test_no_answer_in_time_is_a_failure(
    deliverer: Deliverer, receiver: Receiver, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "TIMEOUT", 0.2)
    receiver.held["/"] = asyncio.Event()
    [run] = await send(database, f"{receiver.url}/")
    await until(database, run, status="pending", last_error="No answer within 0.2 seconds")


async def test_a_slow_receiver_keeps_nobody_else_waiting(deliverer: Deliverer, receiver: Receiver, database: Database) -> None:
    receiver.held["/slow"] = asyncio.Event()
    runs = await send(database, *[f"{receiver.url}/slow"] * 50)
    await receiver.get("/slow", PER_HOST)
    await send(database, f"http://localhost:{receiver.port}/quick")
    await receiver.get("/quick")
    assert len(receiver.at("/slow")) < 2 * PER_HOST
    receiver.held["/slow"].set()
    await asyncio.gather(*(until(database, run, status="delivered", attempts=1) for run in runs))
    assert len(receiver.at("/slow")) == 50


async def test_an_odd_address_stops_nobody(deliverer: Deliverer, receiver: Receiver, database: Database) -> None:
    """None of these gets through the check of a request."""
    odd = ("nonsense", "http://\udcff".encode("utf-8", "replace").decode(), "http://a..b/", "http://[::1", "gopher://x/")
    runs = await send(database, *odd, f"{receiver.url}/")
    await receiver.get("/")
    for run in runs[:-1]:
        row = await until(database, run, attempts=1)
        assert row["status"] == "pending"


async def test_what_is_under_way_ends_before_the_process_does(
    deliverer: Deliverer, receiver: Receiver, database: Database
) -> None:
    receiver.held["/"] = asyncio.Event()
    [run] = await send(database, f"{receiver.url}/")
    await receiver.get("/")
    draining = asyncio.create_task(deliverer.drain(10))
    receiver.held["/"].set()
    await draining
    assert (await until(database, run))["status"] == "delivered"


async def test_many_processes_send_each_message_once(receiver: Receiver, database: Database) -> None:
    options: Any = {"examples": False, "allow_private_addresses": True}
    async with serving(database.url, **options) as (one, _), serving(database.url, **options) as (two, _):
        body = {"graph_id": "react", "config": {"configurable": {"model": {"provider": "scripted", "params": {"else": "x"}}}}}
        assistant = (await one.post("/assistants", json=body)).json()["assistant_id"]

        async def run(api: httpx.AsyncClient, path: str) -> UUID:
            sent = {"assistant_id": assistant, "input": {"messages": []}, "webhook": f"{receiver.url}/{path}"}
            made = await api.post(f"/threads/{await new_thread(api)}/runs", json=sent)
            return UUID(made.json()["run_id"])

        runs = await asyncio.gather(*(run((one, two)[i % 2], str(i)) for i in range(40)))
        await receiver.until(lambda: len({r.path for r in receiver.received}) == 40)
        await asyncio.gather(*(until(database, r, status="delivered", attempts=1) for r in runs))
        assert len(receiver.received) == 40


async def test_a_process_that_executes_nothing_leaves_it_to_others(receiver: Receiver, database: Database) -> None:
    options: Any = {"examples": False, "allow_private_addresses": True}
    async with serving(database.url, worker=False, **options) as (_, resources):
        assert resources.webhooks is None
        [run] = await send(database, f"{receiver.url}/")
    async with serving(database.url, **options):
        await receiver.get("/")
        await until(database, run, status="delivered")


async def test_old_messages_go(database: Database) -> None:
    runs = await send(database, *["http://example.com/"] * 3)
    async with database.pool.connection() as connection:
        for run, status in zip(runs, ("delivered", "failed", "pending"), strict=True):
            await connection.execute(
                "UPDATE webhook_deliveries SET status = %s, created_at = now() - interval '8 days', "
                "next_attempt_at = now() - interval '8 days' WHERE run_id = %s",
                [status, run],
            )
        [recent] = await send(database, "http://example.com/")
        await connection.execute("UPDATE webhook_deliveries SET status = 'failed' WHERE run_id = %s", [recent])
        async with database.transaction() as tx:
            await outbox.tidy(tx, keep=KEEP)
        left = await (await connection.execute("SELECT run_id FROM webhook_deliveries")).fetchall()
    assert {row["run_id"] for row in left} == {runs[2], recent}


async def test_kill_between_the_end_of_a_run_and_its_delivery_and_in_the_middle_of_one(
    servers: Servers, receiver: Receiver, fresh_database_url: str
) -> None:
    server = await servers.start(fresh_database_url, allow_private_addresses=True)
    async with (
        await psycopg.AsyncConnection.connect(fresh_database_url, autocommit=True, row_factory=dict_row) as connection,
        httpx.AsyncClient(base_url=server.url, timeout=30) as api,
    ):

        async def row() -> Row:
            found = await (await connection.execute("SELECT *, now() FROM webhook_deliveries")).fetchall()
            [only] = found
            return only

        # No delivery can be claimed while this is there, so that the process dies before the first attempt.
        await connection.execute("""
            CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not now'; END $$
        """)
        await connection.execute("CREATE TRIGGER r BEFORE UPDATE ON webhook_deliveries EXECUTE FUNCTION refuse()")
        sent = {"assistant_id": "weather", "input": {"messages": []}, "webhook": f"{receiver.url}/"}
        ran = await api.post(f"/threads/{await new_thread(api)}/runs/wait", json=sent)
        assert ran.status_code == 200, ran.text
        await server.stop(signal.SIGKILL)
        assert (await row())["attempts"] == 0
        assert receiver.received == []
        await connection.execute("DROP TRIGGER r ON webhook_deliveries")

        # The next one dies while the receiver has the message and has not answered yet.
        receiver.held["/"] = asyncio.Event()
        await server.start()
        first = await receiver.get("/")
        await server.stop(signal.SIGKILL)
        left = await row()
        assert (left["status"], left["attempts"]) == ("pending", 1)
        assert timedelta(0) < left["next_attempt_at"] - left["now"] <= timedelta(seconds=LEASE)
        await connection.execute("UPDATE webhook_deliveries SET next_attempt_at = now() + interval '1 second'")

        receiver.held.pop("/").set()
        async with serving(fresh_database_url, allow_private_addresses=True):
            second = await receiver.get("/", 2)
            assert second.id == first.id == str(left["id"])
            assert {**second.json, "webhook_sent_at": None} == {**first.json, "webhook_sent_at": None}
            async with asyncio.timeout(10):
                while (await row())["status"] != "delivered":
                    await asyncio.sleep(0.01)
        assert len(receiver.received) == 2
