"""Who listens to a call of a model or a tool. Where nobody traces, a short way to it tells the same to the same listeners."""

from __future__ import annotations

from langchain_core.callbacks import BaseCallbackManager
from langchain_core.runnables import RunnableConfig
from langgraph.pregel._messages import StreamMessagesHandler


def listeners(config: RunnableConfig) -> list[StreamMessagesHandler] | None:
    """LangGraph's handlers of the stream mode `messages`, none of them without it; None if somebody else listens too."""
    callbacks = config.get("callbacks")
    if not isinstance(callbacks, BaseCallbackManager):
        return None if callbacks else []
    found: list[StreamMessagesHandler] = []
    for handler in callbacks.handlers:
        if type(handler) is not StreamMessagesHandler:
            return None
        found.append(handler)
    return found
