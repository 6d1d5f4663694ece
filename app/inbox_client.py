"""The few calls of the public API that the inbox in the terminal needs. It imports nothing else of ours, to start fast."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx


class Failure(Exception):
    """What the server or the user did makes going on impossible. The text is for the user."""


class Client:
    """The few calls that the inbox needs."""

    def __init__(self, url: str, key: str | None) -> None:
        headers = {"Accept": "application/json", **({"X-Api-Key": key} if key else {})}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(30.0, read=60.0), trust_env=False)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def pending(self) -> list[dict[str, Any]]:
        """All pending items, oldest first."""
        items: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            page = self._call("GET", "/inbox", params={"limit": 200, **({"cursor": cursor} if cursor else {})})
            items += page["items"]
            cursor = page.get("next_cursor")
            if not cursor:
                return items

    def item(self, item_id: str) -> dict[str, Any]:
        """One item by its id or its interrupt's."""
        found: dict[str, Any] = self._call("GET", f"/inbox/{item_id}")
        return found

    def answer(self, item: dict[str, Any], verb: str, args: Any) -> str:
        """Answer the item as it was read. Returns the id of the run that goes on."""
        headers = {"If-Match": f'"{item["version"]}"'}
        body = {"type": verb, "args": args}
        run_id: str = self._call("POST", f"/inbox/{item['id']}/response", json=body, headers=headers)["run_id"]
        return run_id

    def events(self, thread_id: str, run_id: str) -> Iterator[tuple[str, Any]]:
        """The events of a run from its start to its end."""
        path = f"/threads/{thread_id}/runs/{run_id}/stream"
        with self._http.stream("GET", path, headers={"Last-Event-ID": "-1", "Accept": "text/event-stream"}) as response:
            if response.is_error:
                response.read()
                raise _failure(response)
            event = ""
            for line in response.iter_lines():
                if line.startswith("event:"):
                    event = line[6:].strip()
                elif line.startswith("data:"):
                    yield event, json.loads(line[5:])

    def _call(self, method: str, path: str, **options: Any) -> Any:
        response = self._http.request(method, path, **options)
        if response.is_error:
            raise _failure(response)
        return response.json()


def _failure(response: httpx.Response) -> Failure:
    """The server's own sentence, the fields it names, and who was first."""
    try:
        body = response.json()
        lines = [f"{e['path']}: {e['message']}" for e in body.get("errors") or []] or [str(body["message"])]
        if decision := (body.get("item") or {}).get("decision"):
            lines.append(f"Decided: {decision['type']} by {decision['by']} at {decision['at']}")
        return Failure("\n".join(lines))
    except (ValueError, KeyError, TypeError):
        return Failure(f"The server answered {response.status_code}.")
