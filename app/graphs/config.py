"""The configuration of a `react` agent, as it stands in an assistant's `config.configurable`. Nothing is silently accepted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from app.errors import FieldError, Invalid
from app.graphs.models import DEFAULT, ModelSpec, problem, split
from app.graphs.prompts import check_prompt
from app.graphs.templates import Condition, Text

PATH = "config.configurable"
MEMORY_TOOLS = ("save_memory", "search_memory", "delete_memory")


class Strict(BaseModel):
    """Unknown fields and lax types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Prompt(Strict):
    """The system prompt: plain text, or a Jinja template."""

    type: Literal["text", "template"] = "text"
    text: str = Field(max_length=100_000)

    @model_validator(mode="after")
    def _renders(self) -> Prompt:
        if self.type == "template":
            check_prompt(self.text)
        return self


class ReviewRule(Strict):
    """How calls of one tool are reviewed before they run."""

    allow_accept: bool = True
    allow_edit: bool = True
    allow_respond: bool = True
    allow_ignore: bool = True
    description: str | None = Field(None, max_length=10_000, description="Template over the arguments, shown to the reviewer.")
    when: str | None = Field(None, max_length=10_000, description="Expression over the arguments: only then is it reviewed.")
    on_ignore: Literal["end", "continue"] = "end"

    @field_validator("description")
    @classmethod
    def _is_template(cls, text: str | None) -> str | None:
        if text is not None:
            Text(text)
        return text

    @field_validator("when")
    @classmethod
    def _is_condition(cls, text: str | None) -> str | None:
        if text is not None:
            Condition(text)
        return text

    @model_validator(mode="after")
    def _answerable(self) -> ReviewRule:
        if not (self.allow_accept or self.allow_edit or self.allow_respond or self.allow_ignore):
            raise ValueError("allow at least one of accept, edit, respond, ignore")
        return self


class Review(Strict):
    """Rules by tool name."""

    tools: dict[str, ReviewRule] = Field(default_factory=dict)


class Memory(Strict):
    """Lasting memories of the user: three tools, and a block in the prompt."""

    limit: int = Field(10, ge=0, le=100, description="Memories shown in the prompt.")
    namespace: list[str] = Field(["memories"], min_length=1, max_length=5, description="Labels before the owner's.")
    block: bool = Field(True, description="Whether memories are added to the prompt.")

    @field_validator("namespace")
    @classmethod
    def _labels(cls, labels: list[str]) -> list[str]:
        for label in labels:
            if not label or "." in label or "*" in label or label.startswith("langgraph"):
                raise ValueError("a label is text without . and *, and does not start with langgraph")
        return labels


class Limits(Strict):
    """What one run, one step and one call may take."""

    model_calls: int | None = Field(None, ge=1, description="Calls of the model, after which a run ends in an error.")
    tool_calls: int | None = Field(None, ge=1, description="Calls of tools, after which the model is told that it has no more.")
    tool_timeout: float | None = Field(None, gt=0, le=86_400, description="Seconds of one tool call, which then is an error.")
    step_timeout: float | None = Field(None, gt=0, le=86_400, description="Seconds of one step; a longer one ends the run.")


def _as_object(key: str) -> BeforeValidator:
    """A plain text is short for an object."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


class AgentConfig(Strict):
    """A ReAct agent."""

    model: Annotated[ModelSpec, BeforeValidator(lambda v: split(v) if isinstance(v, str) else v)] = ModelSpec(provider=DEFAULT)
    prompt: Annotated[Prompt, _as_object("text")] | None = None
    tools: list[str] = Field(default_factory=list, max_length=200)
    review: Review = Review()
    memory: Memory | None = None
    recursion_limit: int | None = Field(None, ge=1, description="Supersteps after which a run ends in an error.")
    limits: Limits = Limits()
    name: str | None = Field(None, pattern=r"^[a-zA-Z0-9_-]{1,64}$", description="Shown as the author of the agent's messages.")

    @property
    def all_tools(self) -> list[str]:
        """Names of the tools, those of the memory included, each once."""
        return list(dict.fromkeys([*self.tools, *(MEMORY_TOOLS if self.memory is not None else ())]))


AGENT_KEYS = frozenset(AgentConfig.model_fields)


def parse(configurable: Mapping[str, Any], tools: Collection[str], max_recursion_limit: int) -> AgentConfig:
    """The configuration, fully checked. Invalid names every field that is wrong."""
    try:
        agent = AgentConfig.model_validate(dict(configurable))
    except ValidationError as error:
        raise invalid(error, PATH) from None
    errors = _problems(agent, tools, max_recursion_limit)
    if errors:
        raise refuse(errors)
    try:
        agent.model.parsed()
    except ValidationError as error:
        raise invalid(error, f"{PATH}.model.params") from None
    return agent


def _problems(agent: AgentConfig, tools: Collection[str], max_recursion_limit: int) -> list[FieldError]:
    errors: list[FieldError] = []
    if wrong := problem(agent.model):
        errors.append({"path": f"{PATH}.model.{wrong[0]}", "message": wrong[1]})
    known = ", ".join(sorted(tools))
    for i, name in enumerate(agent.tools):
        if name not in tools:
            errors.append({"path": f"{PATH}.tools.{i}", "message": f"there is no tool {name!r}; known are {known}"})
        elif name in agent.tools[:i]:
            errors.append({"path": f"{PATH}.tools.{i}", "message": f"{name!r} is listed twice"})
    errors += [
        {"path": f"{PATH}.review.tools.{name}", "message": f"{name!r} is not among the agent's tools"}
        for name in agent.review.tools
        if name not in agent.all_tools
    ]
    if agent.recursion_limit is not None and agent.recursion_limit > max_recursion_limit:
        errors.append({"path": f"{PATH}.recursion_limit", "message": f"must be at most {max_recursion_limit}"})
    return errors


def refuse(errors: list[FieldError]) -> Invalid:
    """One error for several fields."""
    return Invalid("; ".join(f"{e['path']}: {e['message']}" for e in errors[:3]), errors=errors, code="invalid_config")


def invalid(error: ValidationError, prefix: str) -> Invalid:
    """Pydantic's errors with paths from the request's body on."""
    errors: list[FieldError] = []
    for e in error.errors(include_url=False, include_input=False):
        path = ".".join([prefix, *(str(part) for part in e["loc"])])
        message = {"extra_forbidden": "is not a known setting", "missing": "is required"}.get(e["type"])
        errors.append({"path": path, "message": message or e["msg"].removeprefix("Value error, ")})
    return refuse(errors)
