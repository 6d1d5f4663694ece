"""Fixtures of the event log: one Redis of the session, a place for events in each store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redisserver import RedisServer


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis that stays up."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def mortal_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of this test, to be killed."""
    with RedisServer(tmp_path) as server:
        yield server
