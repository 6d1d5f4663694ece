"""The registry of tools."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.tools import StructuredTool, tool
from langgraph.prebuilt import ToolRuntime

from app.graphs.tools import ToolProblem, ToolRegistry


def test_the_shipped_tools() -> None:
    registry = ToolRegistry()
    assert sorted(registry) == ["audit", "delete_memory", "get_weather", "refund", "save_memory", "search_memory"]
    assert registry["search_memory"].schema["required"] == ["query"]
    assert set(registry["search_memory"].schema["properties"]) == {"query", "limit"}, "what LangGraph injects is hidden"


async def test_the_examples_answer_from_their_arguments() -> None:
    registry = ToolRegistry()
    weather = [await registry["get_weather"].tool.ainvoke({"location": place}) for place in ("Lisbon", " lisbon ")]
    assert weather[0] == weather[1].replace("lisbon", "Lisbon")
    assert await registry["refund"].tool.ainvoke({"order_id": "1", "amount": 5}) == "Refunded 5.00 on order 1."
    assert await registry["audit"].tool.ainvoke({"order_id": "1", "amount": 5}) == "Audit passed: 5.00 was refunded on order 1."


def test_arguments_are_checked() -> None:
    spec = ToolRegistry()["refund"]
    assert spec.problem({"order_id": "1", "amount": 5}) is None
    assert spec.problem({"order_id": "1", "amount": -5}) == "amount: Input should be greater than 0"
    assert spec.problem({}) == "order_id: Field required; amount: Field required"
    assert spec.schema["additionalProperties"] is False


def test_a_function_becomes_a_tool() -> None:
    registry = ToolRegistry()

    def double(x: int, runtime: ToolRuntime[Any, Any]) -> int:
        """Twice as much."""
        return 2 * x

    registry.add("twice", double)
    assert registry["twice"].tool.name == "twice"
    assert list(registry["twice"].schema["properties"]) == ["x"]

    @tool
    def triple(x: int) -> int:
        """Three times as much."""
        return 3 * x

    registry.add("thrice", triple)
    assert registry["thrice"].tool.name == "thrice"
    assert triple.name == "triple", "the project's object is not changed"


def test_a_tool_with_a_json_schema() -> None:
    registry = ToolRegistry()
    schema = {"title": "x", "type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    registry.add("raw", StructuredTool(name="raw", description="d", args_schema=schema, func=lambda x: x))
    assert registry["raw"].problem({"x": 1}) is None
    assert registry["raw"].problem({"x": "1"}) == "$.x: '1' is not of type 'integer'"


def without_docstring(x: int) -> int:
    return x


def with_runtime(runtime: str) -> str:
    """A plain argument of a name that LangGraph takes."""
    return runtime


def with_config(config: dict[str, str]) -> str:
    """A plain argument of a name that LangGraph takes."""
    return str(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("a b", with_config),
        ("refund", lambda: 1),
        ("x", 5),
        ("x", without_docstring),
        ("x", with_runtime),
        ("x", with_config),
    ],
)
def test_what_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ToolProblem):
        ToolRegistry().add(name, value)
