"""LangGraph's own conformance suite for checkpointers, whole: every capability, none skipped."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.conformance.capabilities import Capability

from app.db.engine import Database
from app.graphs.saver import Saver


@pytest.mark.parametrize("capability", list(Capability))
async def test_the_saver_conforms(database: Database, capability: Capability) -> None:
    @checkpointer_test(name=f"Saver {capability}")
    async def savers() -> AsyncGenerator[Saver, None]:
        async with Saver.open(database.pool) as saver:
            yield saver

    report = await validate(savers, capabilities={capability})
    result = report.results[capability]
    assert result.detected
    assert not result.failures, result.failures
    assert result.tests_passed
