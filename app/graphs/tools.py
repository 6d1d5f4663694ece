"""The tools that agents may use by name: the shipped ones and those of the project. Each is built once.

The shipped tools are examples: they answer from their arguments alone and touch nothing outside.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from jsonschema import Draft202012Validator
from langchain_core.tools import BaseTool, tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, Field, ValidationError

from app.graphs.memory import memory_tools

NAME = re.compile(r"^[a-zA-Z0-9_-]{1,64}$")
HIJACKED = ("runtime", "config")
"""Arguments of these names are filled in by LangGraph, whatever they were meant for."""

Amount = Annotated[float, Field(gt=0, le=1_000_000_000, description="In the currency of the order.")]
OrderId = Annotated[str, Field(min_length=1, max_length=100)]
SKIES = ("sunny", "cloudy", "rainy", "windy")


class ToolProblem(ValueError):
    """A tool that cannot be offered, in one sentence."""


@tool
async def get_weather(location: Annotated[str, Field(min_length=1, max_length=200)]) -> str:
    """Look up the weather in a place. (Example data: the same place always has the same weather.)"""
    seed = hashlib.sha256(location.strip().casefold().encode()).digest()
    return f"It is {SKIES[seed[0] % len(SKIES)]} in {location.strip()}, {seed[1] % 25 + 8} °C."


@tool
async def refund(order_id: OrderId, amount: Amount) -> str:
    """Refund an amount on an order."""
    return f"Refunded {amount:.2f} on order {order_id}."


@tool
async def audit(order_id: OrderId, amount: Amount) -> str:
    """Have a large refund audited and, once it is released, paid out."""
    return f"Audit passed: {amount:.2f} was refunded on order {order_id}."


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool with the JSON Schema of its arguments and a check of them."""

    tool: BaseTool
    schema: dict[str, Any]
    model: type[BaseModel] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, tool: BaseTool) -> ToolSpec:
        """Look at a tool once: its schemas are slow to make."""
        function = convert_to_openai_tool(tool)["function"]
        schema: dict[str, Any] = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
        for name in HIJACKED:
            if name in schema["properties"]:
                raise ToolProblem(f"tool {tool.name}: rename the argument {name!r}, which LangGraph fills in by itself")
        model = tool.tool_call_schema
        if isinstance(model, type) and issubclass(model, BaseModel):
            schema = {k: v for k, v in model.model_json_schema().items() if k not in ("title", "description")}
            return cls(tool, {"additionalProperties": False, **schema}, model)
        return cls(tool, {"additionalProperties": False, **schema})

    def problem(self, args: Mapping[str, Any]) -> str | None:
        """Why the tool cannot be called with these arguments."""
        if self.model is not None:
            try:
                self.model.model_validate(dict(args))
            except ValidationError as error:
                return "; ".join(
                    f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False, include_input=False)
                )
            return None
        first = next(iter(Draft202012Validator(self.schema).iter_errors(dict(args))), None)
        return f"{first.json_path}: {first.message}" if first else None


class ToolRegistry(Mapping[str, ToolSpec]):
    """Tools by name."""

    def __init__(self, tools: Iterable[BaseTool] = ()) -> None:
        shipped = (get_weather, refund, audit, *memory_tools())
        self._tools = {t.name: ToolSpec.of(t) for t in (*shipped, *tools)}
        self._shipped = frozenset(t.name for t in shipped)

    def add(self, name: str, value: Any) -> None:
        """Register a project's tool: a BaseTool, or a function with a docstring and annotated arguments."""
        if not NAME.match(name):
            raise ToolProblem(f"{name!r} is not a name for a tool; use letters, digits, _ and -")
        if name in self._shipped:
            raise ToolProblem(f"{name!r} is a tool that Keyturn brings; choose another name")
        if not isinstance(value, BaseTool):
            if not callable(value):
                raise ToolProblem(f"tool {name}: {type(value).__name__} is neither a tool nor a function")
            try:
                value = tool(name)(value)
            except Exception as error:
                raise ToolProblem(f"tool {name}: {error}") from error
        if value.name != name:
            value = value.model_copy(update={"name": name})
        self._tools[name] = ToolSpec.of(value)

    def __getitem__(self, name: str) -> ToolSpec:
        return self._tools[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)
