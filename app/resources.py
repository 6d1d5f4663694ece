"""The composition root: everything that one process needs, built once, closed in the reverse order.

Nobody but `main`, `worker`, `cli` and tests imports this.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import structlog
from langgraph.store.postgres.aio import AsyncPostgresStore

from app.assistants.service import AssistantService
from app.auth import KEYS_CHANNEL, Authenticator, ensure_bootstrap_key
from app.db.engine import Database, open_database
from app.db.listen import Listener
from app.examples.assistants import EXAMPLES, PROJECT
from app.graphs.registry import Graphs
from app.graphs.saver import Saver
from app.inbox.feed import InboxFeed
from app.inbox.permits import PostgresEffectGate
from app.inbox.service import InboxService
from app.observability import find_telemetry
from app.runs.cancel import Canceller
from app.runs.claims import Claims, LeaseClock
from app.runs.endings import RunEndings
from app.runs.executor import Executor
from app.runs.finish import Finisher
from app.runs.jobs import Jobs
from app.runs.ports import RunTelemetry
from app.runs.service import RunService
from app.runs.shortcut import Shortcut
from app.runs.webhook import WebhookObserver
from app.runs.worker import Worker
from app.settings import Settings
from app.store.service import StoreService
from app.streaming.log import EventLog
from app.streaming.retention import Retention
from app.streaming.stores import open_event_store
from app.threads.service import ThreadService
from app.watchdog import Watchdog
from app.webhooks.delivery import Deliverer
from app.webhooks.outbox import Outbox

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Resources:
    """What routes and workers use. `stopping` turns readiness off."""

    settings: Settings
    database: Database
    authenticator: Authenticator
    events: EventLog
    graphs: Graphs
    assistants: AssistantService
    threads: ThreadService
    runs: RunService
    inbox: InboxService
    feed: InboxFeed
    store: StoreService
    worker: Worker
    webhooks: Deliverer | None
    stopping: bool = False

    async def drain(self) -> None:
        """Stop taking work, let what runs come to a safe point, and end all streams."""
        if self.stopping:
            return
        self.stopping = True
        webhooks = self.webhooks.drain(self.settings.shutdown_seconds) if self.webhooks else asyncio.sleep(0)
        await asyncio.gather(self.worker.drain(self.settings.shutdown_seconds), webhooks)
        self.events.shut()
        self.feed.shut()


@asynccontextmanager
async def open_resources(
    settings: Settings, url: str, *, on_broken: Callable[[], None] = lambda: None
) -> AsyncIterator[Resources]:
    """Open everything on the database `url`, which must be migrated. `on_broken` is called when a side task dies."""
    async with AsyncExitStack() as stack:
        if settings.blocked_seconds:
            stack.enter_context(Watchdog(settings.blocked_seconds).watching())
        direct = settings.direct_url(url)
        database = await stack.enter_async_context(
            open_database(url, pool_size=settings.database_pool_size, pooled=direct != url)
        )
        listener = Listener(direct, on_connect=database.heal)
        authenticator = Authenticator(settings, database)
        listener.subscribe(KEYS_CHANNEL, authenticator.forget)
        clock = LeaseClock(settings.lease_seconds)
        saver = await stack.enter_async_context(Saver.open(database.pool, may_write=clock.valid))
        postgres_store = AsyncPostgresStore(database.pool)
        stack.push_async_callback(_close_store, postgres_store)
        store = StoreService(postgres_store)
        graphs = Graphs(
            settings=settings,
            checkpointer=saver,
            store=store.for_graphs(),
            gate=PostgresEffectGate(database),
            examples=EXAMPLES if settings.examples else (),
        )
        await graphs.load(default=PROJECT if settings.examples else None)
        assistants = AssistantService(database, graphs)
        inbox = InboxService(settings=settings, database=database, graphs=graphs)
        threads = ThreadService(database, graphs, assistants, inbox)
        endings = RunEndings(database)
        event_store = await stack.enter_async_context(open_event_store(settings, database, listener))
        events = EventLog(event_store, endings, heartbeat_seconds=settings.heartbeat_seconds)
        jobs = Jobs(direct)
        claims = Claims(
            inbox=inbox,
            lease=settings.lease_seconds,
            slots=settings.max_concurrent_runs if settings.worker else 0,
        )
        shortcut = Shortcut(database)
        observers = [WebhookObserver(Outbox(), private=graphs.private_keys)]
        finisher = Finisher(
            database=database,
            graphs=graphs,
            assistants=assistants,
            inbox=inbox,
            claims=claims,
            jobs=jobs,
            shortcut=shortcut,
            observers=observers,
        )
        executor = Executor(
            settings=settings,
            database=database,
            events=events,
            graphs=graphs,
            assistants=assistants,
            jobs=jobs,
            finisher=finisher,
        )
        worker = Worker(
            database=database,
            listener=listener,
            claims=claims,
            executor=executor,
            jobs=jobs,
            inbox=inbox,
            clock=clock,
            telemetry=_telemetry(stack, claims),
        )
        webhooks = Deliverer(database, listener, allow_private=settings.allow_private_addresses) if claims.open else None
        canceller = Canceller(database=database, events=events, threads=threads, inbox=inbox, jobs=jobs, observers=observers)
        runs = RunService(
            settings=settings,
            database=database,
            events=events,
            endings=endings,
            graphs=graphs,
            assistants=assistants,
            threads=threads,
            claims=claims,
            jobs=jobs,
            inbox=inbox,
            worker=worker,
            canceller=canceller,
            shortcut=shortcut,
        )
        inbox.runs = runs
        feed = InboxFeed(database, listener, heartbeat_seconds=settings.heartbeat_seconds)
        async with database.transaction() as tx:
            await assistants.sync_system(tx, graphs.system)
            if settings.bootstrap_key:
                await ensure_bootstrap_key(tx, settings.bootstrap_key.get_secret_value())
        resources = Resources(
            settings=settings,
            database=database,
            authenticator=authenticator,
            events=events,
            graphs=graphs,
            assistants=assistants,
            threads=threads,
            runs=runs,
            inbox=inbox,
            feed=feed,
            store=store,
            worker=worker,
            webhooks=webhooks,
        )
        retention = Retention(database, hours=settings.event_retention_hours)
        await retention.tidy()
        tasks = [
            asyncio.create_task(listener.run(), name="listener"),
            asyncio.create_task(events.run(), name="events"),
            asyncio.create_task(feed.run(), name="feed"),
            asyncio.create_task(retention.run(), name="retention"),
            asyncio.create_task(worker.run(), name="worker"),
        ]
        if webhooks is not None:
            tasks.append(asyncio.create_task(webhooks.run(), name="webhooks"))

        def broke(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("side_task_broke", task=task.get_name(), exc_info=error)
                on_broken()

        for task in tasks:
            task.add_done_callback(broke)
        try:
            yield resources
        finally:
            await resources.drain()
            for task in reversed(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _telemetry(stack: AsyncExitStack, claims: Claims) -> RunTelemetry:
    if (telemetry := find_telemetry()) is None:
        return RunTelemetry()
    telemetry.active = lambda: len(claims.held)
    stack.push_async_callback(telemetry.flush)
    return telemetry


async def _close_store(store: AsyncPostgresStore) -> None:
    """LangGraph ends the task behind a store only when it is collected, which may be after the loop has gone."""
    if store._task is not None:
        store._task.cancel()
        await asyncio.gather(store._task, return_exceptions=True)
