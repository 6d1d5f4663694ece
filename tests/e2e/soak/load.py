"""What clients and reviewers do meanwhile: conversations of several kinds, each with what must be true of it in the end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

CONVERSATION_SECONDS = 120.0
AGENT = {
    "graph_id": "react",
    "config": {
        "configurable": {
            "model": {
                "provider": "scripted",
                "params": {
                    "rules": [
                        {
                            "if": r"pay (?P<key>\S+)",
                            "tool_calls": [
                                {"name": "pay", "args": {"key": "{key}", "n": 1}},
                                {"name": "pay", "args": {"key": "{key}", "n": 2}},
                                {"name": "look", "args": {"key": "{key}"}},
                            ],
                        },
                        {"if": r"once (?P<key>\S+)", "tool_calls": [{"name": "pay", "args": {"key": "{key}", "n": 3}}]},
                        {"if": r"hold (?P<key>\S+)", "tool_calls": [{"name": "hold", "args": {"key": "{key}"}}]},
                        {"after_tool": "pay", "reply": "done"},
                        {"after_tool": "look", "reply": "done"},
                        {"after_tool": "hold", "reply": "held"},
                    ],
                    "else": "You said {input}",
                    "latency_ms": 20,
                },
            },
            "tools": ["pay", "look", "hold"],
            "review": {"tools": {"pay": {}}},
        }
    },
}


@dataclass
class Told:
    """What a conversation was promised: runs that were accepted, and what was said, in order."""

    thread: str
    runs: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    forgets: bool = False
    """Runs may have been rolled back: then they are gone, and what was said with them."""
    stuck: str | None = None


class Load:
    """Makes conversations on a fleet's servers."""

    def __init__(self, urls: list[str], client: httpx.AsyncClient, seed: int) -> None:
        self._urls = urls
        self._client = client
        self._random = random.Random(seed)
        self.answers: Counter[str] = Counter()
        self.told: list[Told] = []
        self.wrong: list[str] = []
        self._agent = ""

    async def prepare(self) -> None:
        """Make the agent."""
        self._agent = (await self._call("POST", "/assistants", json=AGENT)).json()["assistant_id"]

    async def go_on(self, until: float, *, at_once: int) -> None:
        """Conversations, a number of them at once, until a time of the loop."""
        loop = asyncio.get_running_loop()

        async def one_after_the_other(lane: int) -> None:
            n = 0
            while loop.time() < until:
                n += 1
                kind = self._random.choice((self._gated, self._gated, self._once, self._chat, self._supersede, self._cancel))
                try:
                    async with asyncio.timeout(CONVERSATION_SECONDS):
                        await kind(f"{lane}.{n}")
                except TimeoutError:
                    self.told[-1].stuck = kind.__name__

        await asyncio.gather(*(one_after_the_other(lane) for lane in range(at_once)))

    # -- conversations

    async def _gated(self, key: str) -> None:
        told = await self._thread()
        await self._say(told, f"pay {key}")
        await self._until_idle(told)

    async def _once(self, key: str) -> None:
        told = await self._thread()
        await self._say(told, f"once {key}")
        await self._until_idle(told)
        await self._say(told, f"then {key}")
        await self._until_idle(told)

    async def _chat(self, key: str) -> None:
        """Queued, one of them delayed."""
        told = await self._thread()
        for n in range(4):
            await self._say(told, f"chat {key} {n}")
        await self._until_idle(told)
        await self._say(told, f"later {key}", after_seconds=0.5)
        await self._until_idle(told)

    async def _supersede(self, key: str) -> None:
        told = await self._thread()
        await self._say(told, f"before {key}")
        await self._until_idle(told)
        strategy = self._random.choice(("interrupt", "rollback"))
        told.forgets = strategy == "rollback"
        await self._say(told, f"hold {key}")
        await self._say(told, f"queued {key}")
        await self._say(told, f"instead {key}", multitask_strategy=strategy)
        await self._until_idle(told)

    async def _cancel(self, key: str) -> None:
        told = await self._thread()
        run = await self._say(told, f"hold {key}")
        action = self._random.choice(("interrupt", "rollback"))
        told.forgets = action == "rollback"
        await self._call("POST", f"/threads/{told.thread}/runs/{run}/cancel", params={"action": action})
        await self._until_idle(told)
        await self._say(told, f"after {key}")
        await self._until_idle(told)

    # -- steps

    async def _thread(self) -> Told:
        told = Told((await self._call("POST", "/threads", json={})).json()["thread_id"])
        self.told.append(told)
        return told

    async def _say(self, told: Told, what: str, **more: Any) -> str:
        """Say something. A request that got no answer may have been accepted, so that each try says it in its own words."""
        for attempt in range(1000):
            text = f"{what}#{attempt}"  # one word with the key, so that what is paid twice is not paid for another try
            body = {"assistant_id": self._agent, "input": {"messages": [{"role": "user", "content": text}]}, **more}
            made = await self._once_only("POST", f"/threads/{told.thread}/runs", json=body)
            if made is not None and made.status_code == 200:
                told.runs.append(made.json()["run_id"])
                told.said.append(text)
                return told.runs[-1]
            if made is not None and made.status_code == 409:  # a try before, of which nobody told us, asks something
                await self._until_idle(told)
            await asyncio.sleep(0.2)
        raise AssertionError("the servers accept nothing")

    async def _until_idle(self, told: Told) -> None:
        while True:
            items = (await self._call("GET", "/inbox", params={"thread_id": told.thread})).json()["items"]
            # Several reviewers at once, some of whom say the same thing twice.
            await asyncio.gather(
                *(self._decide(told, item) for item in items for _ in range(self._random.choice((1, 1, 2, 3))))
            )
            thread = (await self._call("GET", f"/threads/{told.thread}")).json()
            if thread["status"] in ("idle", "error") and not items:
                return
            if thread["status"] == "interrupted" and not items and not thread["interrupts"]:
                return  # cancelled between two steps
            await asyncio.sleep(0.15)

    async def _decide(self, told: Told, item: dict[str, Any]) -> None:
        call = item["action_request"]
        verb = self._random.choice(("accept", "accept", "edit", "response", "ignore"))
        args = {
            "accept": None,
            "ignore": None,
            "response": "no",
            "edit": {"action": "pay", "args": {**call["args"], "n": call["args"]["n"] + 100}},
        }[verb]
        if self._random.random() < 0.7:
            path, body = f"/inbox/{item['id']}/response", {"type": verb, "args": args}
        else:
            answer = {item["interrupt_id"]: {"type": verb, "args": args}}
            path, body = f"/threads/{told.thread}/runs", {"assistant_id": self._agent, "command": {"resume": answer}}
        decided = await self._call("POST", path, json=body)
        self.answers[f"{decided.status_code} {decided.json().get('code', '')}".strip()] += 1

    # -- requests

    async def _call(self, method: str, path: str, **request: Any) -> httpx.Response:
        """A request that may be made again: until somebody answers."""
        while True:
            response = await self._once_only(method, path, **request)
            if response is not None:
                return response
            await asyncio.sleep(0.2)

    async def _once_only(self, method: str, path: str, **request: Any) -> httpx.Response | None:
        url = self._random.choice(self._urls)
        try:
            response = await self._client.request(method, url + path, timeout=10, **request)
        except httpx.HTTPError:
            return None
        if response.status_code == 503:
            return None
        if response.status_code >= 500:
            self.wrong.append(f"{method} {path}: {response.status_code} {response.text[:300]}")
        return response
