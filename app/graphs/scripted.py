"""A chat model that follows written rules instead of a language model: for trying and testing agents without any key.

Deterministic and stateless: everything follows from the messages it is given. It labels all it makes as `scripted`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import regex  # type: ignore[import-untyped]
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

PROVIDER = "scripted"
PATTERN_SECONDS = 0.25
"""A pattern that takes longer on a message is refused: it comes from a client and must not stop the server."""

PLACEHOLDER = re.compile(r"\{(\w+)\}")
TOKEN = re.compile(r"\s*\S+|\s+$")


class Strict(BaseModel):
    """Unknown fields and lax types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


class ScriptedCall(Strict):
    """A tool call that the script makes. Strings in `args` may hold placeholders."""

    name: str = Field(min_length=1)
    args: dict[str, Any] = Field(default_factory=dict)


class Rule(Strict):
    """When `if` matches the user's last text, or `after_tool` just answered: call tools, say something, or both."""

    if_: str | None = Field(
        None, alias="if", max_length=2000, description="Regular expression, case ignored. Named groups are placeholders."
    )
    after_tool: str | None = Field(None, description="Name of the tool whose result is the last message.")
    reply: str | None = None
    tool_calls: list[ScriptedCall] = Field(default_factory=list, max_length=50)

    @field_validator("if_")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                regex.compile(pattern, regex.IGNORECASE)
            except regex.error as error:
                raise ValueError(f"not a regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _complete(self) -> Rule:
        if (self.if_ is None) == (self.after_tool is None):
            raise ValueError("a rule has either `if` or `after_tool`")
        if self.reply is None and not self.tool_calls:
            raise ValueError("a rule needs a `reply` or `tool_calls`")
        return self


class Script(Strict):
    """Parameters of the scripted model. The first rule that matches wins; `else` is said when none does."""

    rules: list[Rule] = Field(default_factory=list, max_length=200)
    otherwise: str = Field("The script has no rule for this.", alias="else")
    latency_ms: int = Field(0, ge=0, le=60_000, description="Delay of each model call.")


class PatternTooSlow(ValueError):
    """A rule's pattern took too long on a message."""


class ScriptedChatModel(BaseChatModel):
    """Follows a `Script`. `bind_tools` tells it the types of the tools' arguments."""

    script: Script
    schemas: dict[str, dict[str, Any]] = Field(default_factory=dict, exclude=True)
    _patterns: dict[str, Any] = PrivateAttr(default_factory=dict)

    def model_post_init(self, context: Any, /) -> None:
        """Compile the patterns once."""
        super().model_post_init(context)
        self._patterns = {r.if_: regex.compile(r.if_, regex.IGNORECASE) for r in self.script.rules if r.if_ is not None}

    @property
    def _llm_type(self) -> str:
        return PROVIDER

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": PROVIDER}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return LangSmithParams(ls_provider=PROVIDER, ls_model_name=PROVIDER, ls_model_type="chat")

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The same model, knowing the tools' argument schemas. A script calls what it likes: nothing is forced."""
        functions = [convert_to_openai_tool(t)["function"] for t in tools]
        return self.model_copy(update={"schemas": {f["name"]: f.get("parameters") or {} for f in functions}})

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        time.sleep(self.script.latency_ms / 1000)
        return ChatResult(generations=[ChatGeneration(message=self.answer(messages))])

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        if self.script.latency_ms:
            await asyncio.sleep(self.script.latency_ms / 1000)
        return ChatResult(generations=[ChatGeneration(message=self.answer(messages))])

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        if self.script.latency_ms:
            await asyncio.sleep(self.script.latency_ms / 1000)
        for chunk in _chunks(self.answer(messages)):
            yield ChatGenerationChunk(message=chunk)

    def answer(self, messages: Sequence[BaseMessage]) -> AIMessage:
        """What the script says to these messages."""
        text, calls = self._apply(messages)
        seed = _seed(messages)
        tool_calls = [
            {"type": "tool_call", "name": c.name, "args": c.args, "id": f"call_{seed}_{i}"} for i, c in enumerate(calls)
        ]
        used = sum(len(m.text.split()) for m in messages)
        made = len(text.split()) + sum(len(str(c.args).split()) + 1 for c in calls)
        return AIMessage(
            content=text,
            tool_calls=tool_calls,
            usage_metadata={"input_tokens": used, "output_tokens": made, "total_tokens": used + made},
            response_metadata={
                "model_provider": PROVIDER,
                "model_name": PROVIDER,
                "finish_reason": "tool_calls" if tool_calls else "stop",
            },
        )

    def _apply(self, messages: Sequence[BaseMessage]) -> tuple[str, list[ScriptedCall]]:
        last = messages[-1] if messages else None
        values = {
            "input": next((m.text for m in reversed(messages) if isinstance(m, HumanMessage)), ""),
            "system": "\n\n".join(m.text for m in messages if isinstance(m, SystemMessage)),
        }
        if isinstance(last, ToolMessage):
            values["result"] = last.text
        for rule in self.script.rules:
            if rule.if_ is not None:
                if not isinstance(last, HumanMessage) or (groups := self._match(rule.if_, last.text)) is None:
                    continue
                values = {**groups, **values}
            elif not isinstance(last, ToolMessage) or last.name != rule.after_tool:
                continue
            calls = [ScriptedCall(name=c.name, args=self._arguments(c, values)) for c in rule.tool_calls]
            return fill(rule.reply or "", values), calls
        return fill(self.script.otherwise, values), []

    def _match(self, pattern: str, text: str) -> dict[str, str] | None:
        try:
            match = self._patterns[pattern].search(text, timeout=PATTERN_SECONDS)
        except TimeoutError:
            raise PatternTooSlow(f"The script's pattern {pattern!r} takes too long on this message. Simplify it.") from None
        return {k: v or "" for k, v in match.groupdict().items()} if match else None

    def _arguments(self, call: ScriptedCall, values: Mapping[str, str]) -> dict[str, Any]:
        properties = self.schemas.get(call.name, {}).get("properties", {})
        return {k: _argument(v, values, properties.get(k, {})) for k, v in call.args.items()}


def fill(template: str, values: Mapping[str, str]) -> str:
    """Replace `{name}` by its value, once. What has no value stays as it is, and values are never looked into."""
    return PLACEHOLDER.sub(lambda m: values.get(m[1], m[0]), template)


def _argument(value: Any, values: Mapping[str, str], schema: Mapping[str, Any]) -> Any:
    """An argument with its placeholders filled, at any depth. One that is nothing but a placeholder takes the schema's type."""
    if isinstance(value, str):
        text = fill(value, values)
        return convert(text, schema) if PLACEHOLDER.fullmatch(value) and text != value else text
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        return {k: _argument(v, values, properties.get(k, {})) for k, v in value.items()}
    if isinstance(value, list):
        return [_argument(v, values, schema.get("items") or {}) for v in value]
    return value


def convert(text: str, schema: Mapping[str, Any]) -> Any:
    """Text as the type that a JSON Schema asks for; the text itself where that cannot be."""
    kinds = [s.get("type") for s in (schema, *schema.get("anyOf", ()))]
    kind = next((k for k in kinds if k not in (None, "null")), "string")
    stripped = text.strip()
    try:
        if kind in ("integer", "number"):
            return int(stripped) if re.fullmatch(r"[+-]?\d+", stripped) else _whole(float(stripped), kind)
        if kind == "boolean":
            return {"true": True, "yes": True, "false": False, "no": False}[stripped.lower()]
        if kind in ("object", "array"):
            return json.loads(stripped)
    except (ValueError, KeyError):
        pass
    return text


def _whole(number: float, kind: str) -> float | int:
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError("not a number")
    return int(number) if kind == "integer" and number.is_integer() else number


def _seed(messages: Sequence[BaseMessage]) -> str:
    """Differs with every step of a thread, and is the same when the same step runs again."""
    last = messages[-1] if messages else None
    told = f"{len(messages)}|{last.id if last else ''}|{last.text if last else ''}"
    return hashlib.sha256(told.encode("utf-8", "replace")).hexdigest()[:12]


def _chunks(answer: AIMessage) -> Iterator[AIMessageChunk]:
    """An answer token by token, as a provider streams it."""
    for token in TOKEN.findall(answer.text):
        yield AIMessageChunk(content=token)
    for i, call in enumerate(answer.tool_calls):
        yield AIMessageChunk(
            content="",
            tool_call_chunks=[{"name": call["name"], "args": "", "id": call["id"], "index": i, "type": "tool_call_chunk"}],
        )
        text = json.dumps(call["args"], ensure_ascii=False)
        for start in range(0, len(text), 24):
            piece = text[start : start + 24]
            yield AIMessageChunk(
                content="", tool_call_chunks=[{"name": None, "args": piece, "id": None, "index": i, "type": "tool_call_chunk"}]
            )
    yield AIMessageChunk(
        content="",
        usage_metadata=answer.usage_metadata,
        response_metadata=answer.response_metadata,
        chunk_position="last",
    )
