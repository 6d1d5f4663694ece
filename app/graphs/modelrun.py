"""Calls a chat model the short way: without tracing, to LangGraph's stream of messages alone, with the same result.

Whatever decides what is sent and what comes back stays the model's: its cache, its rate limit, whether it streams.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, BaseCallbackManager
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage
from langchain_core.outputs import LLMResult
from langchain_core.runnables import Runnable, RunnableBinding, RunnableConfig
from langgraph.pregel._messages import StreamMessagesHandler

OWN = ("ainvoke", "agenerate_prompt", "agenerate", "_agenerate_with_cache")
"""What a model that is called the short way must not have changed."""

TRACED = frozenset({"ls_structured_output_format", "structured_output_format", "stop"})


class ModelRun(AsyncCallbackManagerForLLMRun):
    """One call, as the model sees who listens to it."""

    async def on_llm_new_token(self, token: Any, *, chunk: Any = None, **kwargs: Any) -> None:
        """Pass a token on at once."""
        for handler in self.handlers:
            handler.on_llm_new_token(token, chunk=chunk, run_id=self.run_id, tags=self.tags)


class DirectModel:
    """A model with its tools bound, which can be called the short way."""

    def __init__(self, model: BaseChatModel, kwargs: dict[str, Any]) -> None:
        self._model = model
        self._kwargs = kwargs
        self._metadata = {**model._get_ls_params_with_defaults(stop=None, **kwargs), **(model.metadata or {})}

    @classmethod
    def of(cls, bound: Runnable[Any, AIMessage]) -> DirectModel | None:
        """The model, unless something about its calls is its own."""
        model, kwargs = bound, {}
        if isinstance(bound, RunnableBinding):
            if bound.config or bound.config_factories:
                return None
            model, kwargs = bound.bound, dict(bound.kwargs)
        if not isinstance(model, BaseChatModel) or model.callbacks or model.verbose or kwargs.keys() & TRACED:
            return None
        if any(getattr(type(model), name) is not getattr(BaseChatModel, name) for name in OWN):
            return None
        return cls(model, kwargs)

    async def call(
        self, messages: list[AnyMessage], config: RunnableConfig, handlers: list[StreamMessagesHandler]
    ) -> AIMessage:
        """The model's answer to messages whose contents are texts."""
        callbacks = config.get("callbacks")
        manager = callbacks if isinstance(callbacks, BaseCallbackManager) else None
        tags = list(dict.fromkeys([*(manager.tags if manager else ()), *(config.get("tags") or ()), *(self._model.tags or ())]))
        run_id = uuid4()
        run = ModelRun(
            run_id=run_id,
            handlers=list(handlers),
            inheritable_handlers=[],
            parent_run_id=manager.parent_run_id if manager else None,
            tags=tags,
        )
        if handlers:
            metadata = {**(manager.metadata if manager else {}), **(config.get("metadata") or {}), **self._metadata}
            for handler in handlers:
                handler.on_chat_model_start({}, [], run_id=run_id, tags=tags, metadata=metadata)
        try:
            result = await self._model._agenerate_with_cache(list(messages), run_manager=run, **self._kwargs)
        except BaseException as error:
            for handler in handlers:
                handler.on_llm_error(error, run_id=run_id)
            raise
        if handlers:
            told = LLMResult(generations=[result.generations])
            for handler in handlers:
                handler.on_llm_end(told, run_id=run_id)
        message = result.generations[0].message
        assert isinstance(message, AIMessage)
        return message


def is_text(messages: list[AnyMessage]) -> bool:
    """Whether all contents are texts. LangChain translates blocks of others into what the model's provider takes."""
    return all(isinstance(m.content, str) for m in messages)
