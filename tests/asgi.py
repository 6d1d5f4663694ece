"""The whole application over ASGI, for tests of routes that need no socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from app.main import create_app
from app.observability import configure_logging
from app.resources import Resources
from app.settings import Settings

HI = {"messages": [{"role": "user", "content": "hi", "id": "m1"}]}


@asynccontextmanager
async def serving(url: str, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Resources]]:
    """A client of a fresh application on the migrated database `url`, and the application's resources."""
    configured = Settings(**settings)
    configure_logging(configured)
    app = create_app(configured, url)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=30) as client,
    ):
        yield client, app.state.resources


async def ran(api: httpx.AsyncClient, thread_id: str, *, mode: str = "ask", graph: str = "ask") -> Any:
    """The thread after a run; with the mode `ask` it waits for an answer."""
    done = await api.post(f"/threads/{thread_id}/runs/wait", json={"assistant_id": graph, "input": {**HI, "mode": mode}})
    assert done.status_code == 200, done.text
    return (await api.get(f"/threads/{thread_id}")).json()


async def new_thread(api: httpx.AsyncClient, **body: Any) -> str:
    made = await api.post("/threads", json=body)
    assert made.status_code == 200, made.text
    return str(made.json()["thread_id"])


async def until(api: httpx.AsyncClient, thread_id: str, status: str) -> None:
    """Wait until a thread has a status, without reading its questions."""
    while (await api.post("/threads/search", json={"ids": [thread_id], "select": ["status"]})).json() != [{"status": status}]:
        await asyncio.sleep(0.01)
