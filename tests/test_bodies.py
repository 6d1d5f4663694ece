"""Bodies that nobody sends by accident: each is a clear 4xx or harmless, on every route that takes JSON."""

from __future__ import annotations

import pytest
from asgi import new_thread, serving

from app.db.engine import Database

VALUES = {
    "a deep list": "[" * 300 + "]" * 300,
    "a deeper list": "[" * 900 + "]" * 900,
    "the deepest list": "[" * 50_000 + "]" * 50_000,
    "a big integer": "1" + "0" * 40,
    "a huge integer": "1" + "0" * 5000,
    "not a number": "NaN",
    "infinity": "1e999",
    "NUL": '"a\\u0000b"',
    "a lone surrogate": '"\\ud800"',
    "a NUL in a key": '{"a\\u0000": 1}',
}
BODIES = [
    ("POST", "/threads", '{"metadata": {"x": %s}}'),
    ("POST", "/threads", '{"thread_id": %s}'),
    ("PATCH", "/threads/{thread}", '{"metadata": {"x": %s}}'),
    ("POST", "/threads/search", '{"metadata": {"x": %s}}'),
    ("POST", "/threads/search", '{"values": {"x": %s}}'),
    ("POST", "/threads/count", '{"values": {"x": %s}}'),
    ("POST", "/threads/{thread}/history", '{"metadata": {"x": %s}}'),
    ("POST", "/threads/{thread}/state", '{"values": {"x": %s}, "as_node": "agent"}'),
    ("POST", "/threads/{thread}/state/checkpoint", '{"checkpoint": {"checkpoint_ns": %s}}'),
    ("POST", "/threads/{thread}/runs/wait", '{"assistant_id": "weather", "input": {"x": %s}}'),
    ("POST", "/threads/{thread}/runs/wait", '{"assistant_id": "weather", "input": {"messages": [%s]}}'),
    ("POST", "/threads/{thread}/runs/wait", '{"assistant_id": "weather", "context": {"x": %s}, "input": {}}'),
    ("POST", "/threads/{thread}/runs/wait", '{"assistant_id": %s, "input": {}}'),
    ("POST", "/assistants", '{"graph_id": "react", "metadata": {"x": %s}}'),
    ("POST", "/assistants", '{"graph_id": "react", "config": {"configurable": {"prompt": %s}}}'),
    ("POST", "/assistants/search", '{"metadata": {"x": %s}}'),
    ("PUT", "/store/items", '{"namespace": ["a"], "key": "k", "value": {"x": %s}}'),
    ("POST", "/store/items/search", '{"namespace_prefix": ["a"], "filter": {"x": %s}}'),
    ("POST", "/inbox/00000000-0000-4000-8000-000000000000/response", '{"type": "edit", "args": %s}'),
]


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
async def test_no_body_breaks_the_server(database: Database, value: str) -> None:
    async with serving(database.url) as (api, _):
        thread = await new_thread(api)
        for method, path, body in BODIES:
            answer = await api.request(
                method,
                path.format(thread=thread),
                content=body % value,
                headers={"Content-Type": "application/json"},
            )
            assert answer.status_code < 500, (method, path, body, answer.text)
            if answer.status_code >= 400:
                assert {"code", "message", "detail", "request_id"} <= answer.json().keys()
        assert (await api.get(f"/threads/{thread}")).status_code == 200
