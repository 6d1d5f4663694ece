"""What the event log needs of the place where events are kept, and of the runs that they belong to.

A store keeps the events of a run in the order of their ids. Events of a claim that has been taken over since are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from app.streaming.channel import Channel, Frame, Id

Batch = tuple[UUID, Sequence[Frame]]
"""Frames of one claim of a run, in order and at least one."""
Reason = Literal["expired", "not_stored", "unavailable"]
"""Why events are missing: they are too old, they never got into the store, or the store is away."""
Woken = Callable[[Iterable[UUID] | None, bool], None]
"""Told of runs (None: of all) that something was written elsewhere; the flag says whether the store must be read for it."""


class EventStore(Protocol):
    """A place for events. Its methods raise one of `outages` while it is away."""

    atomic: bool
    """Whether the last events of a run are written by the transaction that ends it. If not, they follow its commit."""
    outages: tuple[type[Exception], ...]

    def attach(self, woken: Woken) -> None:
        """Whom to tell of what others write. Called once, before anything else."""

    async def run(self) -> None:
        """Work on the side until cancelled."""

    async def append(self, batches: Sequence[Batch]) -> None:
        """Write frames, of all runs at once. May be repeated after a failure: what is there already stays as it is."""

    async def read(self, run_id: UUID, after: Id, limit: int) -> list[Frame]:
        """Frames of a run behind an id: about `limit`, or fewer if they are large, but none only if there are none."""

    async def newest(self, run_id: UUID) -> Id:
        """Id of the last frame of a run, or START."""

    async def behind(self, positions: Mapping[UUID, Id]) -> Iterable[UUID]:
        """Which runs have frames behind an id, of those whose writers may have been missed."""

    async def finish(self, tx: AsyncSession, run_id: UUID, frames: Sequence[Frame]) -> None:
        """Write the last frames of a run with the transaction that ends it, if the store is atomic."""

    async def close(self, tx: AsyncSession, run_id: UUID, data: bytes) -> None:
        """Write the event `end` of a run that nobody executes, behind whatever it has, if the transaction commits."""

    def written(self, run_id: UUID) -> None:
        """The transaction of `finish` has committed: tell others."""

    def follow(self, run_id: UUID, after: Id) -> Channel | None:
        """Hold whatever is written behind an id from now on. None: read it when told of it."""

    def unfollow(self, run_id: UUID) -> None:
        """Nobody reads it any more."""


class Endings(Protocol):
    """Tells from the rows of runs how they ended."""

    async def ended(self, run_ids: Sequence[UUID]) -> dict[UUID, float]:
        """Those which will write no more events, with the seconds since; 0 if that is not known."""

    async def told(self, run_id: UUID, reason: Reason) -> list[Frame]:
        """How a run ended, for readers whose events are not to be had: a notice, its values or error, its end.

        Nothing of a run that is not there any more.
        """
