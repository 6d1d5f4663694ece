"""From a model's specification to a chat model, and from what providers throw to one clear error.

A model is built when a run first needs it, so that a missing key is an error of the run. A `base_url` that stands in an
assistant never receives a credential of the operator's: whoever may write an assistant could send it anywhere.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain.chat_models import init_chat_model
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, AnyMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.tools import BaseTool
from pydantic import BaseModel, ConfigDict, Field

from app.graphs.listeners import listeners
from app.graphs.modelrun import DirectModel, is_text
from app.graphs.scripted import PatternTooSlow, Script, ScriptedChatModel

DEFAULT = "default"
SCRIPTED = "scripted"
KEYS = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}
SMALL_MODELS = {"openai": "gpt-5.4-mini", "anthropic": "claude-haiku-5-5"}
BASE_URLS = {"openai": ("OPENAI_API_BASE", "OPENAI_BASE_URL"), "anthropic": ("ANTHROPIC_API_URL", "ANTHROPIC_BASE_URL")}
CUSTOM_HEADERS = {"openai": "OPENAI_CUSTOM_HEADERS", "anthropic": "ANTHROPIC_CUSTOM_HEADERS"}
PACKAGES = {
    "openai": "langchain_openai",
    "azure_openai": "langchain_openai",
    "anthropic": "langchain_anthropic",
    "bedrock": "langchain_aws",
    "bedrock_converse": "langchain_aws",
    "cohere": "langchain_cohere",
    "deepseek": "langchain_deepseek",
    "fireworks": "langchain_fireworks",
    "google_genai": "langchain_google_genai",
    "google_vertexai": "langchain_google_vertexai",
    "groq": "langchain_groq",
    "huggingface": "langchain_huggingface",
    "mistralai": "langchain_mistralai",
    "nvidia": "langchain_nvidia_ai_endpoints",
    "ollama": "langchain_ollama",
    "openrouter": "langchain_openrouter",
    "perplexity": "langchain_perplexity",
    "together": "langchain_together",
    "xai": "langchain_xai",
}
"""Providers by the package that brings them. Only those whose package is installed can be used."""

NO_KEY = "none"
"""Sent instead of a key to a server that the operator did not choose."""


class ModelError(Exception):
    """A model could not answer. `code` is stable; the message says what to do and holds no secret."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ModelParams(BaseModel):
    """What an assistant may set on a provider's model. Keys, headers and other addresses belong to the operator."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    base_url: str | None = Field(None, pattern=r"^https?://\S+$", description="An OpenAI- or Anthropic-compatible server.")
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    timeout: float | None = Field(None, gt=0, le=3600, description="Seconds until a call is given up. Default 120.")
    max_retries: int | None = Field(None, ge=0, le=10, description="Retries of a failed call. Default 2.")
    seed: int | None = None
    stop: list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    reasoning_effort: str | None = None
    thinking: dict[str, Any] | None = None
    use_responses_api: bool | None = None
    stream_usage: bool | None = None
    disable_streaming: bool | None = None


class ModelSpec(BaseModel):
    """A model: `"provider:name"`, or an object with parameters."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    provider: str = Field(
        min_length=1, description="`openai`, `anthropic`, `scripted`, `default`, or another that is installed."
    )
    name: str | None = Field(None, min_length=1)
    params: dict[str, Any] = Field(default_factory=dict)

    def parsed(self) -> Script | ModelParams:
        """The parameters, checked. Raises pydantic's ValidationError."""
        if self.provider in (SCRIPTED, DEFAULT):
            return Script.model_validate(self.params)
        return ModelParams.model_validate(self.params)


def split(spec: str) -> dict[str, str]:
    """`provider:name` as an object. A text without a colon is a provider without a name."""
    provider, _, name = spec.partition(":")
    return {"provider": provider, "name": name} if name else {"provider": provider}


def problem(spec: ModelSpec) -> tuple[str, str] | None:
    """Why a specification can never work, as (field, sentence). Whether a key is there shows when it runs."""
    if spec.provider in (SCRIPTED, DEFAULT):
        return None
    package = PACKAGES.get(spec.provider)
    if package is None:
        known = ", ".join((SCRIPTED, *(p for p in PACKAGES if _installed(p))))
        return "provider", f"{spec.provider!r} is not a known provider; use one of {known}"
    if importlib.util.find_spec(package) is None:
        return "provider", f"{spec.provider!r} needs the package {package.replace('_', '-')}, which is not installed"
    if spec.name is None:
        return "name", f"name the model, as in {spec.provider}:<model>"
    if spec.params.get("base_url") and spec.provider not in KEYS:
        return "params.base_url", f"an address of your own works with {' and '.join(KEYS)} only"
    return None


def _installed(provider: str) -> bool:
    return importlib.util.find_spec(PACKAGES[provider]) is not None


def choose(spec: ModelSpec, default_model: str | None, env: Mapping[str, str] | None = None) -> ModelSpec:
    """What `default` stands for now: the operator's choice, else a provider that has a key, else the script."""
    if spec.provider != DEFAULT:
        return spec
    env = os.environ if env is None else env
    if default_model:
        chosen = ModelSpec.model_validate(split(default_model))
        # The operator may name the script: it is the one in the parameters.
        return ModelSpec(provider=SCRIPTED, params=spec.params) if chosen.provider in (SCRIPTED, DEFAULT) else chosen
    for provider, key in KEYS.items():
        if env.get(key):
            return ModelSpec(provider=provider, name=SMALL_MODELS[provider])
    return ModelSpec(provider=SCRIPTED, params=spec.params)


def build(spec: ModelSpec) -> BaseChatModel:
    """The chat model. Slow the first time, as it imports the provider's package: call it in a thread."""
    params = spec.parsed()
    if isinstance(params, Script):
        return ScriptedChatModel(script=params)
    if wrong := problem(spec):
        raise ModelError("model_error", f"The model cannot be used: {wrong[1]}.")
    options: dict[str, Any] = {"timeout": 120.0, "max_retries": 2, **params.model_dump(exclude_none=True)}
    options |= _credentials(spec.provider, params.base_url)
    try:
        model = init_chat_model(spec.name, model_provider=spec.provider, **options)
    except Exception as error:
        if re.search(r"api[_ ]?key|credential|token", str(error), re.IGNORECASE):
            raise ModelError("model_missing_key", f"The key of {spec.provider} is not set. {_ADVICE}") from None
        raise ModelError("model_error", f"The model {spec.provider}:{spec.name} cannot be made: {scrub(str(error))}") from None
    assert isinstance(model, BaseChatModel)
    return model


_ADVICE = "Set it in the environment of the server, or choose another model."


def _credentials(provider: str, base_url: str | None) -> dict[str, Any]:
    """Explicit credentials for a foreign address, so that nothing of the environment is sent there."""
    if provider not in KEYS:
        return {}
    env = os.environ
    if base_url is None:
        if env.get(KEYS[provider]):
            return {}
        if any(env.get(name) for name in BASE_URLS[provider]):
            return {"api_key": NO_KEY}  # the operator's own server, which wants none
        raise ModelError("model_missing_key", f"{KEYS[provider]} is not set, and {provider} needs it. {_ADVICE}")
    headers = {line.partition(":")[0].strip(): "" for line in env.get(CUSTOM_HEADERS[provider], "").splitlines() if ":" in line}
    if provider == "openai":
        headers |= {"OpenAI-Organization": "", "OpenAI-Project": ""}
    return {"api_key": NO_KEY, "default_headers": headers}


class LazyModel:
    """A model with its tools bound, built at its first call. Errors of providers come out as ModelError."""

    def __init__(self, spec: ModelSpec, tools: Sequence[BaseTool], default_model: str | None) -> None:
        self._spec = spec
        self._tools = list(tools)
        self._default = default_model
        self._bound: Runnable[LanguageModelInput, AIMessage] | None = None
        self._direct: DirectModel | None = None
        self._lock = asyncio.Lock()
        self.provider = spec.provider

    async def ainvoke(self, messages: list[AnyMessage], config: RunnableConfig) -> AIMessage:
        """Call the model. Tokens reach LangGraph's `messages` mode through the callbacks in `config`."""
        bound = self._bound or await self._build()
        heard = listeners(config)
        try:
            if self._direct is not None and heard is not None and is_text(messages):
                message = await self._direct.call(messages, config, heard)
            else:
                message = await bound.ainvoke(messages, config)
        except Exception as error:
            raise translate(error, self.provider) from error
        if is_cut(message, self.provider):
            raise ModelError("model_unavailable", f"{self.provider} ended its answer before it was complete. Try again.")
        return message

    async def _build(self) -> Runnable[LanguageModelInput, AIMessage]:
        async with self._lock:
            if self._bound is None:
                spec = choose(self._spec, self._default)
                self.provider = spec.provider
                make: Callable[[], Runnable[LanguageModelInput, AIMessage]] = lambda: self._bind(build(spec))  # noqa: E731
                self._bound = make() if spec.provider == SCRIPTED else await asyncio.to_thread(make)
                self._direct = DirectModel.of(self._bound)
            return self._bound

    def _bind(self, model: BaseChatModel) -> Runnable[LanguageModelInput, AIMessage]:
        return model.bind_tools(self._tools) if self._tools else model


def is_cut(message: AIMessage, provider: str) -> bool:
    """Whether the answer lacks the mark that both big protocols put at its end: its stream was cut without an error."""
    mark = {"openai": "finish_reason", "anthropic": "stop_reason"}.get(provider)
    metadata = message.response_metadata
    return mark is not None and not metadata.get(mark) and metadata.get("status") != "completed"


def translate(error: Exception, provider: str) -> Exception:
    """A provider's exception as ModelError. Providers share no classes, so names and status codes must do."""
    if isinstance(error, ModelError | PatternTooSlow):
        return error if isinstance(error, ModelError) else ModelError("model_error", str(error))
    names = {c.__name__ for c in type(error).__mro__}
    status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403) or names & {"AuthenticationError", "PermissionDeniedError"}:
        return ModelError("model_auth", f"{provider} refused the key (HTTP {status}). Check the key and what it may use.")
    if status == 429 or "RateLimitError" in names:
        return ModelError("model_rate_limited", f"{provider} limits the rate, or the quota is used up. Try again later.")
    if status in (408, 504) or any("Timeout" in n for n in names):
        return ModelError("model_timeout", f"{provider} did not answer in time. Try again, or raise params.timeout.")
    cut = {"TransportError", "RemoteProtocolError", "NetworkError", "APIConnectionError", "ConnectionError"}
    if (isinstance(status, int) and status >= 500) or names & cut:
        how = f"failed with HTTP {status}" if status else "cannot be reached, or ended the connection"
        return ModelError("model_unavailable", f"{provider} {how}. Try again later, or check the address.")
    if status or any(module.startswith((provider, f"langchain_{provider}")) for module in (type(error).__module__,)):
        return ModelError("model_error", f"{provider} refused the request: {scrub(str(error))}")
    return error


def scrub(text: str) -> str:
    """A foreign error text without secrets, short enough to show."""
    for name, value in os.environ.items():
        if len(value) >= 8 and re.search(r"KEY|TOKEN|SECRET|PASSWORD", name):
            text = text.replace(value, "***")
    text = re.sub(r"\b(sk|pk|key)-[\w-]{6,}", "***", text)
    return text if len(text) <= 500 else text[:500] + "…"
