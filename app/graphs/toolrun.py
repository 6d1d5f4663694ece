"""Runs a tool once: the short way where that is the same, else through LangGraph's ToolNode.

Whatever a tool does, one call has one result: it may fail, block, hang or want to end the process. Only a question that it
asks, and the end of the run, pass through.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from langchain_core.messages import ToolCall, ToolMessage
from langchain_core.messages.tool import ToolOutputMixin
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import run_in_executor
from langchain_core.tools import StructuredTool
from langgraph.errors import GraphBubbleUp, is_invalid_resume
from langgraph.prebuilt import ToolNode
from langgraph.prebuilt.tool_node import ToolCallRequest
from pydantic import BaseModel

from app.graphs.listeners import listeners
from app.graphs.tools import ToolSpec


class ToolRunner:
    """Runs the tools of one agent. `timeout`: seconds that a call may take, or None."""

    def __init__(self, tools: Mapping[str, ToolSpec], timeout: float | None = None) -> None:
        self._timeout = timeout
        self._plain = {name: plain for name, spec in tools.items() if (plain := PlainTool.of(spec)) is not None}
        self._node = ToolNode([spec.tool for spec in tools.values()], handle_tool_errors=explain, awrap_tool_call=self._wrapped)

    async def run(self, call: ToolCall, config: RunnableConfig) -> Any:
        """What ToolNode gives for the call: an update of the state, or a list of updates and commands."""
        plain = self._plain.get(call["name"])
        if plain is None or listeners(config) is None:
            return await self._node.ainvoke([call], config)
        return {"messages": [await self._contained(call, plain.message(call))]}

    async def _wrapped(self, request: ToolCallRequest, execute: Callable[[ToolCallRequest], Awaitable[Any]]) -> Any:
        return await self._contained(request.tool_call, execute(request))

    async def _contained(self, call: ToolCall, work: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout) as limit:
                return await work
        except GraphBubbleUp:
            raise
        except BaseException as error:  # SystemExit would end the process, and BlockedLoop says what to change
            task = asyncio.current_task()
            if is_invalid_resume(error) or (isinstance(error, asyncio.CancelledError) and task and task.cancelling()):
                raise
            text = f"Error: {call['name']} timed out after {self._timeout:g} s." if limit.expired() else explain(error)
        return ToolMessage(text, name=call["name"], tool_call_id=call["id"], status="error")


@dataclass(frozen=True, slots=True)
class PlainTool:
    """A function of its arguments alone, which returns text: nothing has to be injected, and the text is the result."""

    function: Callable[..., Any]
    is_async: bool
    schema: type[BaseModel]

    @classmethod
    def of(cls, spec: ToolSpec) -> PlainTool | None:
        """The tool, if it is plain."""
        tool = spec.tool
        if type(tool) is not StructuredTool or tool.response_format != "content" or tool.callbacks or tool.verbose:
            return None
        function, schema = tool.coroutine or tool.func, tool.args_schema
        if function is None or spec.model is None or not (isinstance(schema, type) and issubclass(schema, BaseModel)):
            return None
        if tool.handle_tool_error or tool.handle_validation_error or schema.model_config.get("extra") == "allow":
            return None
        names = set(schema.model_fields)
        # What a model of the arguments lacks, or has and does not show to the chat model, somebody must fill in.
        if set(inspect.signature(function).parameters) != names or set(spec.model.model_fields) != names:
            return None
        if any(f.alias or f.validation_alias for f in schema.model_fields.values()) or names & {"args", "kwargs"}:
            return None
        try:
            returns = get_type_hints(function).get("return")
        except Exception:  # an annotation that cannot be resolved
            return None
        return cls(function, tool.coroutine is not None, schema) if returns is str else None

    async def message(self, call: ToolCall) -> ToolMessage:
        """Run it."""
        checked = self.schema.model_validate(call["args"])
        args = {name: getattr(checked, name) for name in self.schema.model_fields}
        if self.is_async:
            result = await self.function(**args)
        else:
            result = await run_in_executor(None, self.function, **args)
        if isinstance(result, ToolOutputMixin):
            raise TypeError(f"it is declared to return text, and returned a {type(result).__name__}")
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        return ToolMessage(text, name=call["name"], tool_call_id=call["id"])


def explain(error: BaseException) -> str:
    """What the model is told of a tool that raised."""
    text = str(error)
    return f"Error: {type(error).__name__}: {text}" if text else f"Error: {type(error).__name__}"
