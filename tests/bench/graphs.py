"""Deterministic graphs without latency, served and run bare alike: what is measured is everything but the model.

`react`: call 1 asks for a tool, call 2 answers. `hitl`: the same, but the tool first asks a human. `tokens` says 5,000 words
as fast as it can, `paced` says 2,000 in two seconds, `idle` says nothing for an hour.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import tool
from langgraph.types import interrupt

ANSWER = ["The ", "weather ", "in ", "Lisbon ", "is ", "sunny ", "today", "."]
QUESTION = {"messages": [{"role": "user", "content": "What is the weather in Lisbon?"}]}


class BenchModel(BaseChatModel):
    """Decides by the last message alone, so it holds no state."""

    @property
    def _llm_type(self) -> str:
        return "bench"

    def bind_tools(self, tools: Any, **_: Any) -> BenchModel:
        """Tools are known already."""
        return self

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        if isinstance(messages[-1], ToolMessage):
            message = AIMessage(content="".join(ANSWER))
        else:
            call = {"name": "get_weather", "args": {"city": "Lisbon"}, "id": f"call_{len(messages)}"}
            message = AIMessage(content="", tool_calls=[call])
        return ChatResult(generations=[ChatGeneration(message=message)])

    async def _astream(self, messages: list[BaseMessage], *_: Any, **__: Any) -> AsyncIterator[ChatGenerationChunk]:
        if isinstance(messages[-1], ToolMessage):
            for piece in ANSWER:
                yield ChatGenerationChunk(message=AIMessageChunk(content=piece))
        else:
            call = {"name": "get_weather", "args": '{"city": "Lisbon"}', "id": f"call_{len(messages)}", "index": 0}
            yield ChatGenerationChunk(message=AIMessageChunk(content="", tool_call_chunks=[call]))


@tool
async def get_weather(city: str) -> str:
    """Weather for a city."""
    return f"It is sunny in {city}."


@tool("get_weather")
async def get_weather_reviewed(city: str) -> str:
    """Weather for a city, after a human agreed."""
    interrupt(
        [
            {
                "action_request": {"action": "get_weather", "args": {"city": city}},
                "config": {"allow_accept": True, "allow_edit": True, "allow_respond": True, "allow_ignore": True},
                "description": f"The agent wants to look up the weather in {city}.",
            }
        ]
    )
    return f"It is sunny in {city}."


def make(**options: Any) -> Any:
    """The agent without a gate, with `options` for the compiler."""
    return create_agent(BenchModel(), [get_weather], **options)


react = make()
hitl = create_agent(BenchModel(), [get_weather_reviewed])


class Words(BenchModel):
    """Says many words, with a pause after every so many."""

    count: int
    every: int = 0
    pause: float = 0.0

    async def _astream(self, messages: list[BaseMessage], *_: Any, **__: Any) -> AsyncIterator[ChatGenerationChunk]:
        for i in range(self.count):
            if self.every and i % self.every == 0:
                await asyncio.sleep(self.pause)
            yield ChatGenerationChunk(message=AIMessageChunk(content="word "))


tokens = create_agent(Words(count=5000), [])
paced = create_agent(Words(count=2000, every=20, pause=0.02), [])
idle = create_agent(Words(count=1, every=1, pause=3600.0), [])
