"""The first question in the inbox: a demo thread whose refund waits for a human, made once per database."""

from __future__ import annotations

from typing import Protocol
from uuid import uuid5

from sqlalchemy import exists, select

from app.auth import LOCAL
from app.db.engine import Database
from app.errors import Conflict
from app.examples.assistants import NAMESPACE
from app.inbox.models import InboxItem
from app.runs.models import Run
from app.runs.schemas import RunCreate
from app.runs.service import RunService
from app.settings import Settings
from app.threads.service import ThreadService

DEMO_THREAD = uuid5(NAMESPACE, "keyturn-demo-thread")
DEMO_RUN = RunCreate(
    assistant_id="demo",
    input={"messages": [{"role": "user", "content": "Please refund 1500 for order 12345, it arrived broken."}]},
    stream_mode=["values", "updates", "messages-tuple"],
    multitask_strategy="reject",
)


class Services(Protocol):
    """What seeding needs of the process's resources."""

    settings: Settings
    database: Database
    threads: ThreadService
    runs: RunService


async def seed(services: Services) -> None:
    """Make the demo thread of the local tenant and start its run, unless that was done before on this database.

    Items outlive their threads, so a demo that was deleted does not come back. Two processes that start at once make one
    run: the second is refused, because the thread is busy or already waits.
    """
    if not services.settings.examples:
        return
    async with services.database.transaction() as tx:
        seeded = await tx.scalar(
            select(
                exists().where(Run.thread_id == DEMO_THREAD) | exists().where(InboxItem.thread_id == DEMO_THREAD),
            )
        )
        if seeded:
            return
    try:
        async with services.database.transaction() as tx:
            await services.threads.create(
                tx, LOCAL, thread_id=DEMO_THREAD, metadata={"title": "Demo: a refund that waits"}, if_exists="do_nothing"
            )
        await services.runs.create(LOCAL, DEMO_THREAD, DEMO_RUN)
    except Conflict:
        return
