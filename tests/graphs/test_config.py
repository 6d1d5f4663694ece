"""The configuration of an agent: what is taken, and which field an error names."""

from __future__ import annotations

from typing import Any

import pytest

from app.errors import Invalid
from app.graphs.config import PATH, parse
from app.graphs.tools import ToolRegistry

TOOLS = ToolRegistry()
LONG = {
    "type": "template",
    "text": "{% for m in memories %}{{ m.text }}{% endfor %}{{ context.tone }} {{ user_id }} {{ now.year }}",
}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"model": "openai:gpt-x"},
        {"model": "anthropic:claude-x", "prompt": "Braces {are} {{ plain }} in a text."},
        {"model": {"provider": "openai", "name": "x", "params": {"base_url": "http://localhost:1/v1", "temperature": 0.5}}},
        {"model": {"provider": "scripted", "params": {"rules": [], "else": "hi"}}},
        {"model": {"provider": "default"}},
        {"prompt": LONG},
        {"prompt": {"type": "template", "text": "{{ context.a.b + 1 }} {{ state.messages[-1].content }}"}},
        {"tools": ["refund"], "review": {"tools": {"refund": {"when": "amount > 5", "on_ignore": "continue"}}}},
        {"memory": {}, "review": {"tools": {"save_memory": {}}}},
        {"memory": {"limit": 3, "namespace": ["notes"], "block": False}, "tools": ["save_memory"]},
        {"recursion_limit": 10, "name": "desk"},
    ],
)
def test_what_is_taken(given: dict[str, Any]) -> None:
    agent = parse(given, TOOLS, 100)
    assert agent.review.tools.keys() <= set(agent.all_tools)


def test_memory_brings_its_tools_once() -> None:
    agent = parse({"tools": ["search_memory", "refund"], "memory": {}}, TOOLS, 100)
    assert agent.all_tools == ["search_memory", "refund", "save_memory", "delete_memory"]


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"modl": "x"}, "modl"),
        ({"model": 5}, "model"),
        ({"model": "nobody:x"}, "model.provider"),
        ({"model": "groq:x"}, "model.provider"),
        ({"model": "openai"}, "model.name"),
        ({"model": {"name": "x"}}, "model.provider"),
        ({"model": {"provider": "openai", "name": "x", "params": {"api_key": "k"}}}, "model.params.api_key"),
        (
            {"model": {"provider": "openai", "name": "x", "params": {"openai_api_base": "http://x"}}},
            "model.params.openai_api_base",
        ),
        ({"model": {"provider": "openai", "name": "x", "params": {"default_headers": {}}}}, "model.params.default_headers"),
        ({"model": {"provider": "openai", "name": "x", "params": {"base_url": "file:///x"}}}, "model.params.base_url"),
        ({"model": {"provider": "openai", "name": "x", "params": {"temperature": "hot"}}}, "model.params.temperature"),
        ({"model": {"provider": "azure_openai", "name": "x", "params": {"base_url": "http://x"}}}, "model.params.base_url"),
        ({"model": {"provider": "scripted", "params": {"rules": [{"if": "(", "reply": "x"}]}}}, "model.params.rules.0.if"),
        ({"model": {"provider": "scripted", "params": {"rules": [{"if": "x"}]}}}, "model.params.rules.0"),
        ({"prompt": {"type": "jinja", "text": ""}}, "prompt.type"),
        ({"prompt": {"type": "template", "text": "{{ nme }}"}}, "prompt"),
        ({"prompt": {"type": "template", "text": "{{ ''.__class__ }}"}}, "prompt"),
        ({"prompt": {"type": "template", "text": "{{"}}, "prompt"),
        ({"prompt": {"type": "template", "text": "{{ user + 1 }}"}}, "prompt"),
        ({"tools": "refund"}, "tools"),
        ({"tools": ["refund", "nothing"]}, "tools.1"),
        ({"tools": ["refund", "refund"]}, "tools.1"),
        ({"review": {"tools": {"refund": {}}}}, "review.tools.refund"),
        ({"tools": ["refund"], "review": {"tools": {"refund": {"when": "a =="}}}}, "review.tools.refund.when"),
        ({"tools": ["refund"], "review": {"tools": {"refund": {"description": "{{"}}}}, "review.tools.refund.description"),
        ({"tools": ["refund"], "review": {"tools": {"refund": {"allow_accept": "yes"}}}}, "review.tools.refund.allow_accept"),
        ({"tools": ["refund"], "review": {"tools": {"refund": {"on_ignore": "stop"}}}}, "review.tools.refund.on_ignore"),
        (
            {
                "tools": ["refund"],
                "review": {
                    "tools": {
                        "refund": {"allow_accept": False, "allow_edit": False, "allow_respond": False, "allow_ignore": False}
                    }
                },
            },
            "review.tools.refund",
        ),
        ({"review": {"tool": {}}}, "review.tool"),
        ({"memory": True}, "memory"),
        ({"memory": {"limit": 1000}}, "memory.limit"),
        ({"memory": {"namespace": ["a.b"]}}, "memory.namespace"),
        ({"memory": {"namespace": ["langgraph"]}}, "memory.namespace"),
        ({"recursion_limit": 101}, "recursion_limit"),
        ({"recursion_limit": 0}, "recursion_limit"),
        ({"name": "a b"}, "name"),
    ],
)
def test_the_wrong_field_is_named(given: dict[str, Any], path: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse(given, TOOLS, 100)
    errors = caught.value.extra["errors"]
    assert [e["path"] for e in errors] == [f"{PATH}.{path}"]
    assert caught.value.message.startswith(f"{PATH}.{path}: ")


def test_all_wrong_fields_are_named_at_once() -> None:
    with pytest.raises(Invalid) as caught:
        parse({"tools": ["x", "y"], "review": {"tools": {"z": {}}}, "model": "nobody:x"}, TOOLS, 100)
    assert [e["path"] for e in caught.value.extra["errors"]] == [
        f"{PATH}.{p}" for p in ("model.provider", "tools.0", "tools.1", "review.tools.z")
    ]
