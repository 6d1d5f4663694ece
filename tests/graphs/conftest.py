"""Fixtures of the tests of graphs."""

from __future__ import annotations

import pytest
from graphs.harness import Agents

from app.db.engine import Database


@pytest.fixture
async def agents(database: Database) -> Agents:
    """Agents on the worker's database."""
    return Agents(database)
