"""The system prompt of a model call: the assistant's text or template, and what is remembered of the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import UndefinedError
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, ToolMessage

from app.graphs.templates import TemplateProblem, Text

if TYPE_CHECKING:
    from app.graphs.config import Prompt
    from app.graphs.memory import Remembered

VARIABLES = ("context", "memories", "now", "state", "thread_id", "user", "user_id")
MEMORY_BLOCK_CHARS = 20_000
NO_RESULT = "This call was not carried out."


class PromptError(ValueError):
    """The prompt cannot be rendered for this run; the message names the cause."""


def check_prompt(source: str) -> Text:
    """Compile a template and render it once. Values that only a run knows may be missing; all else is an error now."""
    template = Text(source, VARIABLES)
    sample = {
        "context": {},
        "memories": [{"key": "1", "text": "Likes tea.", "created_at": datetime.now(UTC)}],
        "now": datetime.now(UTC),
        "state": {"messages": [{"role": "user", "content": "Hello"}]},
        "thread_id": "00000000-0000-0000-0000-000000000000",
        "user": "user",
        "user_id": "user",
    }
    try:
        template.render(sample)
    except TemplateProblem as error:
        if not isinstance(error.__cause__, UndefinedError):
            raise
    return template


class SystemPrompt:
    """Makes the system prompt of each model call."""

    def __init__(self, prompt: Prompt | None, *, block: bool) -> None:
        self._text = prompt.text if prompt is not None and prompt.type == "text" else ""
        self._template = Text(prompt.text) if prompt is not None and prompt.type == "template" else None
        self.uses_memories = self._template is not None and "memories" in self._template.uses
        # A template that places the memories itself needs no block below it.
        self.has_block = block and not self.uses_memories

    def render(
        self, messages: Sequence[AnyMessage], memories: Sequence[Remembered], context: Any, configurable: Mapping[str, Any]
    ) -> str:
        """The text, empty if there is nothing to say. PromptError if the run lacks what the template needs."""
        text = self._text
        if self._template is not None:
            owner = str(configurable.get("user_id") or "")
            given = dict(context) if isinstance(context, Mapping) else {}
            variables: dict[str, Any] = {
                # Who the user is, the server says, whatever a client wrote into the context.
                "context": {**given, "user_id": owner} if "user_id" in given else given,
                "memories": [{"key": m.key, "text": m.text, "created_at": m.created_at} for m in memories],
                "now": datetime.now(UTC),
                "thread_id": str(configurable.get("thread_id") or ""),
                "user": owner,
                "user_id": owner,
            }
            if "state" in self._template.uses:
                variables["state"] = {"messages": [_plain(m) for m in messages]}
            try:
                text = self._template.render(variables)
            except TemplateProblem as error:
                raise PromptError(f"The assistant's prompt cannot be rendered: {error}.") from error
        if self.has_block and memories:
            text = "\n\n".join(filter(None, [text, _block(memories)]))
        return text


def _plain(message: BaseMessage) -> dict[str, Any]:
    role = {"human": "user", "ai": "assistant"}.get(message.type, message.type)
    return {"role": role, "content": message.text, "name": message.name or ""}


def _block(memories: Sequence[Remembered]) -> str:
    lines, size = [], 0
    for memory in memories:
        line = "- " + " ".join(memory.text.split())
        size += len(line)
        if size > MEMORY_BLOCK_CHARS:
            break
        lines.append(line)
    return "\n".join(["What you remember of the user from earlier conversations:", *lines])


def for_provider(messages: Sequence[AnyMessage]) -> list[AnyMessage]:
    """A history that providers take: right behind every message with calls stands exactly one result for each call.

    The state is not touched. Only threads that were cut off, or written from outside, look different from it.
    """
    view: list[AnyMessage] = []
    i = 0
    while i < len(messages):
        message = messages[i]
        i += 1
        if isinstance(message, ToolMessage):
            continue  # a result without a call before it
        view.append(message)
        if not isinstance(message, AIMessage) or not (calls := [*message.tool_calls, *message.invalid_tool_calls]):
            continue
        results: dict[str | None, ToolMessage] = {}
        while i < len(messages) and isinstance(result := messages[i], ToolMessage):
            results[result.tool_call_id] = result
            i += 1
        view += [
            results.get(c["id"]) or ToolMessage(NO_RESULT, name=c["name"], tool_call_id=c["id"] or "", status="error")
            for c in calls
        ]
    return view
