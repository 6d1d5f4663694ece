"""What a client and a reviewer do, over HTTP."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

PROJECT = Path(__file__).parent / "inbox" / "project" / "langgraph.json"


class Desk:
    """What a client and a reviewer do, over HTTP."""

    def __init__(self, api: httpx.AsyncClient) -> None:
        self.api = api

    async def agent(self, *calls: dict[str, Any], review: dict[str, Any] | None = None, **config: Any) -> str:
        """An assistant whose model makes these calls in its first message. Returns its id."""
        rules = [{"if": "go", "tool_calls": list(calls)}]
        model = {"provider": "scripted", "params": {"rules": rules, "else": "Done."}}
        tools = ["transfer", "mixed", "hang", "get_weather"]
        gates = {"tools": review if review is not None else {"transfer": {}}}
        body = {"graph_id": "react", "config": {"configurable": {"model": model, "tools": tools, "review": gates, **config}}}
        made = await self.api.post("/assistants", json=body)
        assert made.status_code == 200, made.text
        return str(made.json()["assistant_id"])

    async def thread(self) -> str:
        """A new thread."""
        return str((await self.api.post("/threads", json={})).json()["thread_id"])

    async def run(self, thread: str, assistant: str, how: str | None = "wait", **body: Any) -> httpx.Response:
        """Run something on a thread: wait for its end, stream it, or (with None) only start it."""
        path = f"/threads/{thread}/runs" + (f"/{how}" if how else "")
        return await self.api.post(path, json={"assistant_id": assistant, **body})

    async def asked(self, assistant: str, value: Any = None, **body: Any) -> tuple[str, list[dict[str, Any]]]:
        """Run an assistant until it asks. Returns the thread and its open items."""
        thread = await self.thread()
        sent = {"messages": [{"role": "user", "content": "go"}]} if len(assistant) == 36 else {"value": value}
        ran = await self.run(thread, assistant, input=sent, **body)
        assert ran.status_code == 200, ran.text
        return thread, await self.items(thread)

    async def items(self, thread: str, status: str = "pending") -> list[dict[str, Any]]:
        """Items of a thread, oldest first."""
        found = await self.api.get("/inbox", params={"thread_id": thread, "status": status})
        assert found.status_code == 200, found.text
        items: list[dict[str, Any]] = found.json()["items"]
        return items

    async def item(self, id_: str) -> dict[str, Any]:
        """One item as it is now."""
        found = await self.api.get(f"/inbox/{id_}")
        assert found.status_code == 200, found.text
        item: dict[str, Any] = found.json()
        return item

    async def answer(self, item: dict[str, Any], type_: str, args: Any = None, **options: Any) -> httpx.Response:
        """Answer an item."""
        return await self.api.post(f"/inbox/{item['id']}/response", json={"type": type_, "args": args}, **options)

    async def settle(self, item: dict[str, Any], type_: str, args: Any = None) -> Any:
        """Answer an item and wait for the end of the run. Returns what the run ended with."""
        answered = await self.answer(item, type_, args)
        assert answered.status_code == 202, answered.text
        return await self.join(item["thread_id"], answered.json()["run_id"])

    async def join(self, thread: str, run: str) -> Any:
        """Wait for a run; what it ended with."""
        return (await self.api.get(f"/threads/{thread}/runs/{run}/join")).json()


def effects() -> Callable[[], list[tuple[str, int]]]:
    """What is transferred from now on."""
    transfers = importlib.import_module("bank").TRANSFERS
    transfers.clear()
    return lambda: list(transfers)
