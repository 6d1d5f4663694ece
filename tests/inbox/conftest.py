"""The application with a project of its own, and what tests of the inbox do all the time."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest_asyncio
from asgi import serving
from desk import PROJECT, Desk

from app.db.engine import Database
from app.resources import Resources


@pytest_asyncio.fixture
async def served(database: Database) -> AsyncIterator[tuple[httpx.AsyncClient, Resources]]:
    async with serving(database.url, config=PROJECT, examples=False) as both:
        yield both


@pytest_asyncio.fixture
async def api(served: tuple[httpx.AsyncClient, Resources]) -> httpx.AsyncClient:
    return served[0]


@pytest_asyncio.fixture
async def resources(served: tuple[httpx.AsyncClient, Resources]) -> Resources:
    return served[1]


@pytest_asyncio.fixture
async def desk(api: httpx.AsyncClient) -> Desk:
    return Desk(api)
