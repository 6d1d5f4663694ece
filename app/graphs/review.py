"""Human review of tool calls: what is asked, which answers fit, and what an answer does to the messages.

Pure functions and the port to the effect gate. The nodes that use them are in `react.py`. State never authorises a call:
only a permit that the gate hands out does.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from jsonschema import Draft202012Validator
from langchain_core.messages import AIMessage, ToolCall
from pydantic import BeforeValidator, WithJsonSchema

from app.graphs.config import ReviewRule
from app.graphs.templates import Condition, TemplateProblem, Text

VERBS = {"accept": "allow_accept", "edit": "allow_edit", "response": "allow_respond", "ignore": "allow_ignore"}
SPOKEN = ("edit", "response")
"""Verbs that cannot do without `args`."""

NOT_CARRIED_OUT = "Not carried out: the reviewer decided that this call is not to be made."
UNKNOWN_OUTCOME = (
    "The outcome of this call is not known: it was started once and never reported back. It was not run again. "
    "Find out what happened before asking for it again."
)


@dataclass(frozen=True, slots=True)
class GatedCall:
    """One call that needs a permit, by the place it stands at. A provider's call id names nothing: some repeat."""

    thread_id: str
    message_id: str
    index: int
    action: str
    args: dict[str, Any]
    args_hash: str
    run_id: str | None
    epoch: int | None


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a call that was carried out said: the fields of its tool message."""

    message: dict[str, Any]


class LeaseLost(Exception):
    """The run belongs to another process by now, or may: this one must neither carry out a call nor write its state."""


class EffectGate(Protocol):
    """Hands out leave to carry out a gated call, once. Each method is one committed statement of its own."""

    async def spend(self, call: GatedCall) -> Literal["granted", "absent", "unknown"] | Receipt:
        """Take the permit. `granted`: run it now. `absent`: ask. Receipt: it ran. `unknown`: it started, never run it again."""

    async def receipt(self, call: GatedCall, message: dict[str, Any]) -> None:
        """Keep the tool message of a call that was carried out."""

    async def release(self, call: GatedCall) -> None:
        """Give the permit back, since the tool itself paused and starts anew later."""


def args_hash(action: str, args: Mapping[str, Any]) -> str:
    """Names an action with its arguments. Numbers that JSON cannot tell apart (1500 and 1500.0) are the same."""
    text = json.dumps({"action": action, "args": _canonical(args)}, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _canonical(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(k): _canonical(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(v) for v in value]
    return value


class Rule:
    """A review rule with its templates compiled and its tool's argument schema."""

    def __init__(self, tool: str, rule: ReviewRule, schema: Mapping[str, Any]) -> None:
        self.tool = tool
        self.config = {flag: bool(getattr(rule, flag)) for flag in VERBS.values()}
        self.ends_when_ignored = rule.on_ignore == "end"
        self.schema = schema
        self._when = Condition(rule.when) if rule.when is not None else None
        self._description = Text(rule.description) if rule.description is not None else None

    def gates(self, args: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments must be reviewed."""
        return self._when is None or self._when(self._variables(args))

    def question(self, call: ToolCall, message_id: str, index: int) -> list[dict[str, Any]]:
        """The interrupt's value: a list of one HumanInterrupt, with the identity of the call."""
        return [
            {
                "action_request": {"action": self.tool, "args": call["args"]},
                "config": self.config,
                "description": self._describe(call["args"]),
                "type": "tool_review",
                "tool_call_id": call["id"],
                "message_id": message_id,
                "call_index": index,
            }
        ]

    def answer_type(self) -> Any:
        """The type of an answer, for `interrupt(response_schema=...)`: LangGraph refuses others before it stores them."""
        return Annotated[Any, BeforeValidator(self.check), WithJsonSchema(self.answer_schema())]

    def check(self, answer: Any) -> dict[str, Any]:
        """A HumanResponse that fits, as `{type, args}`. ValueError says what does not. A list of one is taken too."""
        if isinstance(answer, list) and len(answer) == 1:
            answer = answer[0]
        if not isinstance(answer, dict) or answer.get("type") not in VERBS:
            raise ValueError(f"an answer is {{type, args}} with a type of {', '.join(VERBS)}")
        verb, args = answer["type"], answer.get("args")
        if not self.config[VERBS[verb]]:
            raise ValueError(f"{verb} is not allowed for {self.tool}")
        if verb == "response" and not (isinstance(args, str) and args.strip()):
            raise ValueError("args of a response are the reviewer's words")
        if verb == "edit":
            if not isinstance(args, dict) or args.get("action") != self.tool or not isinstance(args.get("args"), dict):
                raise ValueError(f"args of an edit are {{action, args}} with the action {self.tool}")
            for error in Draft202012Validator(self.schema).iter_errors(args["args"]):
                raise ValueError(f"args.args{error.json_path[1:]}: {error.message}")
        return {"type": verb, "args": args if verb in SPOKEN else None}

    def answer_schema(self) -> dict[str, Any]:
        """JSON Schema of the answers that are allowed."""
        schema = _inlined({k: v for k, v in self.schema.items() if k != "$defs"}, self.schema.get("$defs") or {})
        shapes: dict[str, dict[str, Any]] = {
            "accept": {"anyOf": [{"type": "null"}, _object(action={"const": self.tool}, args={"type": "object"})]},
            "edit": _object(action={"const": self.tool}, args=schema),
            "response": {"type": "string", "minLength": 1},
            "ignore": {"type": "null"},
        }
        allowed = [
            {**_object(type={"const": verb}, args=shapes[verb]), "required": ["type", "args"] if verb in SPOKEN else ["type"]}
            for verb, flag in VERBS.items()
            if self.config[flag]
        ]
        return {"title": "HumanResponse", "anyOf": allowed}

    def _describe(self, args: Mapping[str, Any]) -> str:
        if self._description is not None:
            try:
                return self._description.render(self._variables(args))
            except TemplateProblem:
                pass  # the reviewer must be asked whatever the model wrote
        return f"The agent wants to run {self.tool}. It waits for your decision."

    def _variables(self, args: Mapping[str, Any]) -> dict[str, Any]:
        return {**args, "args": dict(args), "tool": self.tool}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _inlined(schema: Any, definitions: Mapping[str, Any], within: tuple[str, ...] = ()) -> Any:
    """The schema without references, since pydantic publishes only its own. What refers to itself may be anything."""
    if isinstance(schema, list):
        return [_inlined(part, definitions, within) for part in schema]
    if not isinstance(schema, dict):
        return schema
    reference = schema.get("$ref")
    if isinstance(reference, str):
        name = reference.removeprefix("#/$defs/")
        return {} if name in within else _inlined(definitions.get(name, {}), definitions, (*within, name))
    return {k: _inlined(v, definitions, within) for k, v in schema.items()}


def with_calls(
    message: AIMessage, changes: Mapping[int, Mapping[str, Any]], metadata: dict[str, Any] | None = None
) -> AIMessage:
    """A copy with other ids or arguments of its calls, wherever a provider's integration may look for them.

    `changes` names calls by index: first the valid ones, then those whose arguments could not be read.
    """
    every = [*message.tool_calls, *message.invalid_tool_calls]
    changed = [{**call, **changes.get(i, {})} for i, call in enumerate(every)]
    cut = len(message.tool_calls)

    def counterpart() -> Callable[[Any], int | None]:
        """Copies of calls stand in the same order; equal ids are told apart by it."""
        places: dict[Any, deque[int]] = defaultdict(deque)
        for i, call in enumerate(every):
            places[call["id"]].append(i)
        return lambda id_: places[id_].popleft() if places[id_] else None

    content = message.content
    if isinstance(content, list):
        find = counterpart()
        content = [_block(b, changed, changes, find) if isinstance(b, dict) else b for b in content]
    extra = dict(message.additional_kwargs)
    if isinstance(extra.get("tool_calls"), list):
        find = counterpart()
        extra["tool_calls"] = [_raw_call(c, changed, changes, find) for c in extra["tool_calls"]]
    return message.model_copy(
        update={
            "tool_calls": changed[:cut],
            "invalid_tool_calls": changed[cut:],
            "content": content,
            "additional_kwargs": extra,
            "response_metadata": {**message.response_metadata, **(metadata or {})},
        }
    )


def _block(block: dict[str, Any], calls: list[Any], changes: Mapping[int, Any], find: Callable[[Any], int | None]) -> Any:
    if block.get("type") not in ("tool_use", "tool_call", "function_call"):
        return block
    key = "call_id" if "call_id" in block else "id"
    index = find(block.get(key))
    if index is None or index not in changes:
        return block
    args = calls[index]["args"]
    new = {k: v for k, v in block.items() if k != "partial_json"} | {key: calls[index]["id"]}
    if block["type"] == "tool_use":
        return {**new, "input": args}
    if block["type"] == "tool_call":
        return {**new, "args": args}
    return {**new, "arguments": args if isinstance(args, str) else json.dumps(args)}


def _raw_call(raw: Any, calls: list[Any], changes: Mapping[int, Any], find: Callable[[Any], int | None]) -> Any:
    index = find(raw.get("id")) if isinstance(raw, dict) else None
    if index is None or index not in changes:
        return raw
    args = calls[index]["args"]
    function = {**raw.get("function", {}), "arguments": args if isinstance(args, str) else json.dumps(args)}
    return {**raw, "id": calls[index]["id"], "function": function}


def edit_note(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What the model is told of an edit, so that it does not take the result for that of its own arguments."""
    said = [
        f"set {key} to {_json(after[key])}" if key not in before
        else f"removed {key}" if key not in after
        else f"changed {key} from {_json(before[key])} to {_json(after[key])}"
        for key in {**before, **after}
        if before.get(key, ...) != after.get(key, ...)
    ]  # fmt: skip
    return f"Note: a reviewer {', '.join(said)} before this call was run." if said else ""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
