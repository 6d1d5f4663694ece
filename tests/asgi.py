"""The whole application over ASGI, for tests of routes that need no socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from app.main import create_app
from app.resources import Resources
from app.settings import Settings


@asynccontextmanager
async def serving(url: str, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Resources]]:
    """A client of a fresh application on the migrated database `url`, and the application's resources."""
    app = create_app(Settings(**settings), url)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=30) as client,
    ):
        yield client, app.state.resources
