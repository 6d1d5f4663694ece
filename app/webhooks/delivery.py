"""Delivers what is in the outbox: any process that executes runs does, each message at least once, until it was received.

An attempt that fails is repeated after seconds, then minutes, then hours, for about a day. A host that does not answer takes
a few of a process' connections at most: others get theirs.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx
import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from app import __version__
from app.db.engine import Database
from app.db.listen import Listener
from app.outgoing import AddressRefused, GuardedTransport
from app.webhooks import outbox
from app.webhooks.outbox import CHANNEL, Message

log = structlog.get_logger(__name__)

TIMEOUT = 10.0
"""Seconds for one attempt, from the resolution of the name to the answer."""
LEASE = 30.0
"""Seconds after which an attempt of a process that died is repeated."""
POLL = 30.0
"""Seconds between looks at the outbox when nobody says that there is something."""
OUTAGE_PAUSE = 3.0
AT_ONCE = 64
PER_HOST = 4
"""A host to which so many attempts are under way gets no more; a claim takes as many, so it may be almost twice that."""
FIRST_DELAY, LONGEST_DELAY = 2.0, 4 * 3600.0
ATTEMPTS = 18
"""With delays that double from the first to the longest, the last attempt comes about a day after the first."""
ANSWER_BYTES = 16 * 1024
"""What is read of an answer's body, and thrown away, so that a receiver which is still writing is not cut off."""
KEEP = 7 * 86400.0
TIDY_EVERY = 3600.0

FINAL = frozenset({400, 410, 413, 415, 422})
"""Answers after which nothing is repeated: the receiver has read the message and does not take it, or is gone for good.

Other refusals (401, 403, 404, redirects, ...) are repeated like errors of a server. They come from what stands before a
receiver while that is deployed or misconfigured, and a few needless requests cost less than a message that is lost.
"""
RETRY_AFTER = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class Attempt:
    """What came of one attempt. `retry_after`: seconds that the receiver asks to be left alone for."""

    status: int | None = None
    error: str | None = None
    final: bool = False
    retry_after: float = 0.0


class Deliverer:
    """Sends messages of the outbox. One per process."""

    def __init__(self, database: Database, listener: Listener, *, allow_private: bool) -> None:
        self._database = database
        self._allow_private = allow_private
        self._wake = asyncio.Event()
        self._open = True
        self._task: asyncio.Task[None] | None = None
        self._in_flight: dict[asyncio.Task[None], str] = {}
        self._tidied = time.monotonic()
        listener.subscribe(CHANNEL, self._on_hint)

    async def run(self) -> None:
        """Deliver until drained or cancelled."""
        self._task = asyncio.current_task()
        transport = GuardedTransport(allow_private=self._allow_private, max_connections=AT_ONCE)
        async with (
            httpx.AsyncClient(transport=transport, timeout=TIMEOUT, follow_redirects=False, trust_env=False) as client,
            asyncio.TaskGroup() as group,
        ):
            while self._open:
                self._wake.clear()
                try:
                    pause = await self._round(group, client)
                except (DBAPIError, PoolTimeout) as error:
                    log.warning("webhooks_wait_for_database", error=str(error))
                    pause = OUTAGE_PAUSE
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wake.wait()

    async def drain(self, seconds: float) -> None:
        """Start nothing more, and let what is under way end for up to `seconds`. The rest is repeated by whoever is next."""
        self._open = False
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=seconds)

    def _on_hint(self, _: str | None) -> None:
        self._wake.set()

    async def _round(self, group: asyncio.TaskGroup, client: httpx.AsyncClient) -> float | None:
        """Start what is due. Returns for how many seconds there is nothing to look for; None: until something ends."""
        while (free := AT_ONCE - len(self._in_flight)) > 0 and self._open:
            limit = min(free, PER_HOST)
            async with self._database.transaction() as tx:
                claimed = await outbox.claim(tx, limit=limit, lease=LEASE, busy=self._busy())
            for message in claimed:
                task = group.create_task(self._deliver(client, message), name=f"webhook-{message.id}")
                self._in_flight[task] = message.host
                task.add_done_callback(self._ended)
            if len(claimed) < limit:
                return await self._pause()
        return None

    def _busy(self) -> list[str]:
        """Hosts that get nothing more for now."""
        return [host for host, count in Counter(self._in_flight.values()).items() if count >= PER_HOST]

    async def _pause(self) -> float:
        async with self._database.transaction() as tx:
            due = await outbox.next_in(tx, self._busy())
            if time.monotonic() - self._tidied > TIDY_EVERY:
                self._tidied = time.monotonic()
                await outbox.tidy(tx, keep=KEEP)
        return POLL if due is None else min(max(due, 0.05), POLL)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._in_flight[task]
        self._wake.set()  # there is room, and more for that host may wait

    async def _deliver(self, client: httpx.AsyncClient, message: Message) -> None:
        attempt = await self._attempt(client, message)
        again = None if attempt.final or message.attempts >= ATTEMPTS else max(delay(message.attempts), attempt.retry_after)
        try:
            async with self._database.transaction() as tx:
                if attempt.error is None:
                    await outbox.delivered(tx, message, attempt.status or 200)
                else:
                    await outbox.failed(tx, message, status=attempt.status, error=attempt.error, again=again)
        except (DBAPIError, PoolTimeout) as error:
            log.warning("webhook_outcome_not_stored", delivery_id=str(message.id), error=str(error))  # it comes again
            return
        if attempt.error is None:
            log.info("webhook_delivered", delivery_id=str(message.id), run_id=str(message.run_id), attempt=message.attempts)
        else:
            log.warning(
                "webhook_failed" if again is None else "webhook_postponed",
                delivery_id=str(message.id),
                run_id=str(message.run_id),
                attempt=message.attempts,
                error=attempt.error,
                retry_in=again,
            )

    async def _attempt(self, client: httpx.AsyncClient, message: Message) -> Attempt:
        now = datetime.now(UTC)
        body = message.payload[:-1] + f',"webhook_sent_at":"{now.isoformat()}"}}'
        attempt: Attempt | None = None
        try:
            async with (
                asyncio.timeout(TIMEOUT),
                client.stream("POST", message.url, content=body.encode(), headers=headers(message, now)) as answer,
            ):
                attempt = judged(answer)
                await _discard(answer)
        except AddressRefused as error:
            attempt = Attempt(error=str(error), final=True)
        except TimeoutError:
            attempt = attempt or Attempt(error=f"No answer within {TIMEOUT:g} seconds")
        except Exception as error:  # whatever an odd address leads to, it must not stop the others
            attempt = attempt or Attempt(error=f"{type(error).__name__}: {error}")
        return attempt


async def _discard(answer: httpx.Response) -> None:
    size = 0
    async for part in answer.aiter_raw():
        if (size := size + len(part)) > ANSWER_BYTES:
            return


def headers(message: Message, now: datetime) -> dict[str, str]:
    """Headers of one attempt, after the Standard Webhooks specification. (Signed messages add `webhook-signature` here.)"""
    return {
        "content-type": "application/json",
        "user-agent": f"Keyturn/{__version__}",
        "webhook-id": str(message.id),
        "webhook-timestamp": str(int(now.timestamp())),
    }


def judged(answer: httpx.Response) -> Attempt:
    """What an answer means for the message."""
    status = answer.status_code
    if answer.is_success:
        return Attempt(status)
    asked = retry_after(answer.headers.get("retry-after")) if status in RETRY_AFTER else 0.0
    return Attempt(status, f"The receiver answered {status}", status in FINAL, asked)


def retry_after(value: str | None) -> float:
    """Seconds that a `Retry-After` header asks for, as a number or as a date; 0 if it says nothing, at most a few hours."""
    if value is None:
        return 0.0
    try:
        seconds = float(value) if value.strip().isdigit() else parsedate_to_datetime(value).timestamp() - time.time()
    except ValueError:
        return 0.0
    return min(max(seconds, 0.0), LONGEST_DELAY)


def delay(attempts: int) -> float:
    """Seconds until the next attempt: twice as long each time, and not at the same moment for all that failed together."""
    return min(FIRST_DELAY * 2.0 ** (attempts - 1), LONGEST_DELAY) * random.uniform(0.75, 1.25)
