"""Checks an answer against the item that it answers. What passes here cannot break the graph; what does not is never stored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import orjson
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from app.errors import FieldError, Invalid
from app.graphs.review import args_hash
from app.inbox.models import InboxItem
from app.inbox.payloads import FLAGS, Answer, Kind

SAFE_INTEGER = 2**53
"""Above this, JavaScript clients change an integer by reading and sending it."""

MAX_DEPTH = 64
MAX_ERRORS = 20
ALIASES = {"respond": "response"}


@dataclass(frozen=True, slots=True)
class Checked:
    """An answer that fits its item. `args_hash` is that of the call which will run, if one will."""

    answer: Answer
    args_hash: str | None = None
    diff: list[dict[str, Any]] = field(default_factory=list)


def check(item: InboxItem, answer: Answer) -> Checked:
    """The answer as it will be stored, or Invalid with the path of each fault. Never changes a value."""
    verb = ALIASES.get(answer.type, answer.type)
    flag = FLAGS.get(verb)
    if flag is None:
        raise _wrong("type", f"unknown; use one of {', '.join(FLAGS)}")
    if not item.config.get(flag):
        allowed = ", ".join(v for v, f in FLAGS.items() if item.config.get(f))
        raise _wrong("type", f"this question does not allow {verb}; allowed: {allowed}", code="verb_not_allowed")
    answer = Answer(verb, _as_stored(answer.args, "args"), answer.given)
    if verb == "ignore":
        if answer.args is not None:
            raise _wrong("args", "must be null with ignore")
        return Checked(answer)
    if verb == "response":
        return _response(item, answer)
    if verb == "accept":
        return _accept(item, answer)
    return _edit(item, answer)


def same(a: Any, b: Any) -> bool:
    """Equality of JSON data: `1` is `1.0`, but no boolean is a number."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def differences(before: Any, after: Any, path: str = "args") -> list[dict[str, Any]]:
    """What was changed: `{path, before, after}` for each value, without `before` where something was added."""
    if isinstance(before, dict) and isinstance(after, dict):
        found: list[dict[str, Any]] = []
        for key in [*before, *(k for k in after if k not in before)]:
            where = f"{path}.{key}"
            if key not in after:
                found.append({"path": where, "before": before[key]})
            elif key not in before:
                found.append({"path": where, "after": after[key]})
            else:
                found += differences(before[key], after[key], where)
        return found
    return [] if same(before, after) else [{"path": path, "before": before, "after": after}]


def _response(item: InboxItem, answer: Answer) -> Checked:
    if item.kind == Kind.tool:
        if not isinstance(answer.args, str) or not answer.args.strip():
            raise _wrong("args", "must be a text that is not empty: what to tell the agent")
        return Checked(answer)
    if not answer.given:
        raise _wrong("args", "is missing; null is an answer too, if you say so")
    if item.args_schema:
        _against_schema(item.args_schema, answer.args, "args", closed=False)
    return Checked(answer)


def _accept(item: InboxItem, answer: Answer) -> Checked:
    if answer.args is not None and not same(answer.args, item.action_request):
        _refuse_rounded(item.action_request, answer.args, "args")
        raise _wrong(
            "args", "must be null or the action request as shown; use edit to change it", code="action_request_differs"
        )
    return Checked(answer, item.args_hash)


def _edit(item: InboxItem, answer: Answer) -> Checked:
    request, edited = item.action_request or {}, answer.args
    if not isinstance(edited, dict) or edited.keys() != {"action", "args"} or not isinstance(edited["args"], dict):
        raise _wrong("args", "must be {action, args}, with all arguments of the call")
    if edited["action"] != request["action"]:
        raise _wrong("args.action", f"must stay {request['action']}", code="action_request_differs")
    _refuse_rounded(request["args"], edited["args"], "args.args")
    if item.args_schema:
        _against_schema(item.args_schema, edited["args"], "args.args", closed=True)
    return Checked(answer, args_hash(edited["action"], edited["args"]), differences(request["args"], edited["args"]))


def _against_schema(schema: dict[str, Any], value: Any, path: str, *, closed: bool) -> None:
    """Refuse what the schema refuses. Nothing is coerced, and no reference is fetched from anywhere."""
    if closed:
        schema = _closed(schema)
    kind = validator_for(schema)
    errors: dict[str, FieldError] = {}
    try:
        kind.check_schema(schema)
        for error in kind(schema, registry=Registry()).iter_errors(value):
            errors |= {f["path"]: f for f in _fields(error, path)}
            if len(errors) >= MAX_ERRORS:
                break
    except (SchemaError, Unresolvable) as broken:
        raise _wrong(path, "cannot be checked: the schema of this question is broken", code="schema_unusable") from broken
    if errors:
        first = next(iter(errors.values()))
        raise Invalid(f"{first['path']}: {first['message']}", errors=errors.values())


def _fields(error: ValidationError, path: str) -> Iterator[FieldError]:
    """The wrong fields behind one error of the schema."""
    where = ".".join([path, *(str(part) for part in error.absolute_path)])
    instance: Any = error.instance
    if error.validator == "required":
        names: Any = error.validator_value
        for name in names:
            if name not in instance:
                yield {"path": f"{where}.{name}", "message": "is missing"}
    elif error.validator == "additionalProperties" and isinstance(error.schema, dict):
        for name in instance.keys() - error.schema.get("properties", {}).keys():
            yield {"path": f"{where}.{name}", "message": "is not known here"}
    else:
        yield {"path": where, "message": error.message[:300]}


def _closed(schema: Any) -> Any:
    """The schema with unknown names refused, wherever it says nothing of them. (Schemas of Python functions never do.)"""
    if not isinstance(schema, dict) or "allOf" in schema:
        return schema
    result = dict(schema)
    for key in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(key), dict):
            result[key] = {name: _closed(part) for name, part in schema[key].items()}
    for key in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(schema.get(key), list):
            result[key] = [_closed(part) for part in schema[key]]
    if "items" in schema:
        result["items"] = _closed(schema["items"])
    if "properties" in schema and not schema.keys() & {"anyOf", "oneOf", "patternProperties", "unevaluatedProperties"}:
        result.setdefault("additionalProperties", False)
    return result


def _refuse_rounded(before: Any, after: Any, path: str) -> None:
    """Refuse an integer that a client may have rounded: one beyond 2^53 that is not what was proposed."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() & after.keys():
            _refuse_rounded(before[key], after[key], f"{path}.{key}")
    elif isinstance(before, list) and isinstance(after, list):
        for i, (x, y) in enumerate(zip(before, after, strict=False)):
            _refuse_rounded(x, y, f"{path}.{i}")
    elif _number(before) and _number(after) and before != after and max(abs(before), abs(after)) > SAFE_INTEGER:
        raise _wrong(path, "is beyond 2^53 and was changed, perhaps by a client that rounds", code="unsafe_integer")


def _as_stored(value: Any, path: str, depth: int = 0) -> Any:
    """The value as the database will give it back, so that hashes agree. Refuses what would not come back at all."""
    if depth > MAX_DEPTH:
        raise _wrong(path, f"is nested deeper than {MAX_DEPTH} levels", code="too_deep")
    if isinstance(value, dict):
        return {key: _as_stored(part, f"{path}.{key}", depth + 1) for key, part in value.items()}
    if isinstance(value, list):
        return [_as_stored(part, f"{path}.{i}", depth + 1) for i, part in enumerate(value)]
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise _wrong(path, "does not fit into 64 bits; send it as a string", code="unsafe_integer")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _wrong(path, "is not a number that JSON knows")
        # jsonb keeps decimals: no exponents, and no negative zero.
        return orjson.loads(format(Decimal(orjson.dumps(value).decode()), "f")) if value else 0.0
    return value


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong(path: str, message: str, *, code: str = "invalid") -> Invalid:
    return Invalid.field(path, message, code=code)
