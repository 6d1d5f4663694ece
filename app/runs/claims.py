"""The runs that this process holds, and how it takes more."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from langgraph.runtime import RunControl
from sqlalchemy.ext.asyncio import AsyncSession
from uuid_utils.compat import uuid7

from app.runs import queue
from app.runs.models import Run, RunKind, StopReason
from app.runs.outcome import Outcome
from app.runs.ports import InboxPort
from app.runs.queue import Claimant
from app.threads.checkpoints import keep_base
from app.threads.models import Thread


@dataclass(slots=True, eq=False)
class Execution:
    """A run that this process holds. `stop` may be called from anywhere in the loop; the first reason counts."""

    run: Run
    answers: dict[str, Any] = field(default_factory=dict)
    control: RunControl = field(default_factory=RunControl)
    reason: StopReason | None = None
    row_version: str | None = None
    """Of the thread's row, where nobody but this run is known to have changed it. See `shortcut.py`."""
    outcome: Outcome | None = None
    """How it ended, once that is committed."""
    task: asyncio.Task[Any] | None = None
    """The task that drives the graph. Only this one is ever cancelled, so that ending a run never is."""

    def stop(self, reason: StopReason) -> None:
        """Stop at the next await."""
        self.reason = self.reason or reason
        if self.task is not None:
            self.task.cancel()

    def drain(self) -> None:
        """Stop at the end of the current superstep."""
        self.control.request_drain()


class LeaseClock:
    """When this process last renewed its leases, by a clock that goes on while the process is frozen."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.renewed = time.monotonic()

    @property
    def age(self) -> float:
        """Seconds since the last renewal."""
        return time.monotonic() - self.renewed

    def valid(self) -> bool:
        """Whether no other process can have taken over what this one held when it last looked."""
        return self.age < self.seconds


class Claims:
    """Claims runs for this process, up to its number of slots, and knows which it holds."""

    def __init__(self, *, inbox: InboxPort, lease: float, slots: int) -> None:
        self._inbox = inbox
        self._slots = slots
        self.claimant = Claimant(process_name(), lease)
        self.held: dict[UUID, Execution] = {}
        self._reserved = 0
        self.open = slots > 0
        self.released = asyncio.Event()

    @property
    def free(self) -> bool:
        """Whether this process may take another run."""
        return self.open and len(self.held) + self._reserved < self._slots

    @contextmanager
    def reserve(self) -> Iterator[None]:
        """Keep a slot for a run that is being claimed. What is claimed must be held before the block ends."""
        self._reserved += 1
        try:
            yield
        finally:
            self._reserved -= 1
            self.released.set()  # whoever waits for a slot looks whether one is free by now

    def hold(self, execution: Execution) -> None:
        """Count a claimed run."""
        self.held[execution.run.id] = execution

    def drop(self, execution: Execution) -> None:
        """The run is over, or not ours any more."""
        if self.held.get(execution.run.id) is execution:
            del self.held[execution.run.id]
            self.released.set()

    async def claim(self, tx: AsyncSession, thread: Thread, *, paused: bool) -> Execution | None:
        """Claim what the locked thread should run now. `paused`: only answers may run."""
        if not self.open:
            return None
        run = await queue.claim_next(tx, thread, self.claimant, paused=paused)
        if run is None:
            return None
        return await self.taken(tx, run)

    async def taken(self, tx: AsyncSession, run: Run) -> Execution:
        """A run that was just claimed, with the answers that it carries."""
        if run.epoch == 1 and run.base_checkpoint_id is not None and run.continues:
            await keep_base(tx, run.thread_id, run.id, run.base_checkpoint_id)
        answers = await self._inbox.answers(tx, run) if run.kind == RunKind.resume else {}
        # Cancelled while nobody held it: it is claimed only to be ended.
        return Execution(run, answers, reason=StopReason.cancelled if run.cancel is not None else None)


def process_name() -> str:
    """Name of this process as an owner of runs: host, pid namespace, pid, start time, and something unique."""
    pid = os.getpid()
    return f"{socket.gethostname()}|{_namespace()}|{pid}|{_started(pid)}|{uuid7()}"


def is_dead(owner: str) -> bool:
    """Whether an owner was a process of this machine that does not live any more. Unsure means no."""
    parts = owner.split("|")
    if len(parts) != 5 or parts[0] != socket.gethostname() or parts[1] != _namespace() or not parts[1]:
        return False
    return _started(int(parts[2])) != parts[3]


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""  # no /proc: leases alone tell


def _started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
