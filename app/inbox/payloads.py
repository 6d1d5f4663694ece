"""The only place that knows the shapes of interrupt payloads: from a value to an item's fields, and from an answer to what
the graph expects.

A further dialect is a further branch of `read` and of `to_graph`. Nothing here touches the database.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson

from app.codec import dumps

FLAGS = {"accept": "allow_accept", "edit": "allow_edit", "response": "allow_respond", "ignore": "allow_ignore"}
"""Which flag of a HumanInterrupt's config allows which verb."""

_NATIVE = {"continue": "accept", "update": "edit", "feedback": "response"}
_DESCRIPTION = 10_000


class Kind(StrEnum):
    """What an item asks."""

    tool = "tool"  # may this call be made?
    question = "question"  # text, or an object with a `question`: answered freely
    breakpoint = "breakpoint"  # a static breakpoint: may the graph go on?
    raw = "raw"  # anything else: answered with JSON


@dataclass(frozen=True, slots=True)
class Question:
    """An interrupt's value as the inbox sees it."""

    kind: Kind
    config: dict[str, bool]
    action_request: dict[str, Any] | None = None
    description: str | None = None
    tool_call_id: str | None = None
    message_id: str | None = None
    call_index: int | None = None

    @property
    def tool(self) -> str | None:
        """Name of the tool (or action) that is asked about."""
        return self.action_request["action"] if self.action_request else None


@dataclass(frozen=True, slots=True)
class Answer:
    """A HumanResponse. `given` is false when `args` was left out, which is not the same as null."""

    type: str
    args: Any = None
    given: bool = field(default=True, compare=False)


def value_hash(value: Any) -> str:
    """Names a value. The same question asked again has the same hash."""
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()


def read(value: Any) -> Question:
    """What an interrupt's value asks. A value of no known shape is a raw question, never an error."""
    human = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(human, dict):
        found = _human_interrupt(human)
        if found is None and human is value:
            found = _question_about_call(human)
        if found is not None:
            return found
    text = value if isinstance(value, str) else value.get("question") if isinstance(value, dict) else None
    kind = Kind.question if isinstance(text, str) and text.strip() else Kind.raw
    return Question(kind, _flags("response"), description=_text(text))


def breakpoint_value(checkpoint_id: str | None, nodes: list[str]) -> dict[str, Any]:
    """The value of the item for a static breakpoint, which has no interrupt in the graph."""
    return {"breakpoint": {"checkpoint_id": checkpoint_id, "nodes": sorted(nodes)}}


def read_breakpoint(value: dict[str, Any]) -> tuple[str, Question]:
    """An id for the pause, and the question."""
    nodes = ", ".join(value["breakpoint"]["nodes"])
    question = Question(Kind.breakpoint, _flags("accept"), description=f"The graph stopped at a breakpoint; next: {nodes}.")
    return hashlib.sha256(dumps(value)).hexdigest()[:32], question


def to_graph(kind: str, value: Any, answer: Answer) -> Any:
    """The checked answer in the dialect of the graph that asked."""
    if kind == Kind.breakpoint:
        return True
    if kind != Kind.tool:
        return answer.args
    if isinstance(value, dict) and "action_request" not in value:
        return _to_native(answer)
    response = {"type": answer.type, "args": answer.args}
    return [response] if isinstance(value, list) else response


def from_client(kind: str, value: Any, answer: Any) -> Answer | None:
    """What a LangGraph client sent as a resume value for this question, or None if it is no answer to it.

    A free question is answered by the value itself, whatever it looks like.
    """
    if kind in (Kind.question, Kind.raw):
        return Answer("response", answer)
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if not isinstance(answer, dict):
        return None
    if isinstance(answer.get("type"), str) and answer.keys() <= {"type", "args"}:
        return Answer(answer["type"], answer.get("args"), "args" in answer)
    if kind == Kind.tool and isinstance(value, dict) and "tool_call" in value and answer.keys() <= {"action", "data"}:
        return _from_native(value, answer)
    return None


def _human_interrupt(human: dict[str, Any]) -> Question | None:
    """LangGraph's HumanInterrupt, with the fields that our own gate adds to it."""
    request, config = human.get("action_request"), human.get("config")
    if not isinstance(request, dict) or not isinstance(config, dict):
        return None
    action, args = request.get("action"), request.get("args", {})
    if not isinstance(action, str) or not isinstance(args, dict):
        return None
    flags = {flag: config.get(flag) is True for flag in FLAGS.values()}
    if not any(flags.values()):
        return None  # nobody could answer it; as a raw question somebody can
    index = human.get("call_index")
    return Question(
        Kind.tool,
        flags,
        action_request={"action": action, "args": args},
        description=_text(human.get("description")),
        tool_call_id=_string(human.get("tool_call_id")),
        message_id=_string(human.get("message_id")),
        call_index=index if isinstance(index, int) and not isinstance(index, bool) else None,
    )


def _question_about_call(value: dict[str, Any]) -> Question | None:
    """`{question, tool_call}`, as the guides for the functional API have it."""
    call = value.get("tool_call")
    if not isinstance(value.get("question"), str) or not isinstance(call, dict):
        return None
    name, args = call.get("name"), call.get("args", {})
    if not isinstance(name, str) or not isinstance(args, dict):
        return None
    return Question(
        Kind.tool,
        _flags("accept", "edit", "response"),
        action_request={"action": name, "args": args},
        description=_text(value["question"]),
        tool_call_id=_string(call.get("id")),
    )


def _to_native(answer: Answer) -> dict[str, Any]:
    if answer.type == "accept":
        return {"action": "continue"}
    if answer.type == "edit":
        return {"action": "update", "data": answer.args["args"]}
    return {"action": "feedback", "data": answer.args}


def _from_native(value: dict[str, Any], answer: dict[str, Any]) -> Answer | None:
    verb = _NATIVE.get(str(answer.get("action")))
    if verb == "edit":
        return Answer(verb, {"action": value["tool_call"].get("name"), "args": answer.get("data")})
    return None if verb is None else Answer(verb, answer.get("data"))


def _flags(*verbs: str) -> dict[str, bool]:
    return {flag: verb in verbs for verb, flag in FLAGS.items()}


def _text(value: Any) -> str | None:
    return value[:_DESCRIPTION] if isinstance(value, str) and value else None


def _string(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
