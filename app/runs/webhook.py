"""Tells the webhook of a run that the run has ended: the run as clients read it, with what it left or asks."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from app.codec import dumps
from app.runs.models import Run, StopReason
from app.runs.ports import Outbox, RunFinished
from app.runs.schemas import RunRead
from app.threads.state import public

EVENT = "run.finished"


class WebhookObserver:
    """A `RunObserver` that puts a message into the outbox if the run names a webhook."""

    def __init__(self, outbox: Outbox, *, private: frozenset[str]) -> None:
        """`private`: keys of the state that clients never see."""
        self._outbox = outbox
        self._private = private

    async def run_finished(self, tx: AsyncSession, finished: RunFinished) -> None:
        """See `RunObserver`."""
        if (url := finished.run.kwargs.get("webhook")) is None:
            return
        run = await tx.get_one(Run, finished.run.id, populate_existing=True)
        await self._outbox.add(
            tx, tenant_id=run.tenant_id, run_id=run.id, url=url, event=EVENT, payload=dumps(self._payload(run, finished))
        )

    def _payload(self, run: Run, finished: RunFinished) -> dict[str, Any]:
        payload = RunRead.of(run).model_dump() | {
            "stop_reason": finished.stop_reason,
            "run_started_at": run.started_at,
            "run_ended_at": run.finished_at,
            "values": public(finished.values, self._private) if finished.values is not None else None,
            "interrupts": [
                {"id": asked.interrupt_id, "value": asked.value, "response_schema": asked.response_schema}
                for asked in finished.pending
            ],
        }
        if finished.stop_reason is StopReason.rolled_back:
            payload["status"] = "rollback"  # the run itself is gone
        return payload
