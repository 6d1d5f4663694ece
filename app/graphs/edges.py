"""A conditional edge as a Runnable. LangGraph would start a traced run and a task for a plain function, at every step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.types import Send

Choice = list[Send] | str


class Edge(Runnable[Any, Choice]):
    """Chooses what comes next."""

    def __init__(self, choose: Callable[[Any], Awaitable[Choice]]) -> None:
        self.name = choose.__name__
        self._choose = choose

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Choice:
        """Not for synchronous graphs."""
        raise NotImplementedError

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Choice:
        """What comes next, after this state."""
        return await self._choose(input)
