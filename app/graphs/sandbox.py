"""Jinja's sandbox, narrowed for templates that come from clients: no endless loops and no huge values.

Jinja's sandbox keeps a template from reaching Python, but not from running for ever. Here the syntax has no macros and no
recursion, and everything that loops or makes a larger value pays from one budget per rendering.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import _PassArg
from jinja2.visitor import NodeTransformer

MAX_OUTPUT = 100_000
MAX_SOURCE = 50_000
BUDGET = 1_000_000
LOOP_COST = 100
STEP_COST = 20
MAX_RANGE = 10_000
MAX_LOOP_DEPTH = 3
MAX_BRACKETS = 40
MAX_DEPTH = 80

ALLOWED_NODES = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Assign, nodes.Expr, nodes.Helper,
)  # fmt: skip
FORBIDDEN_NODES = (nodes.ImportedName, nodes.InternalName, nodes.ExtensionAttribute, nodes.EnvironmentAttribute, nodes.NSRef)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ALLOWED_FILTERS = _words(
    "abs capitalize count d default dictsort first float groupby int items join last length list lower map max min reject "
    "rejectattr replace reverse round select selectattr sort string sum title tojson trim truncate unique upper "
    "urlencode wordcount"
)
ALLOWED_ATTRIBUTES: dict[type, frozenset[str]] = {
    str: _words(
        "capitalize count endswith find isalpha isdigit lower lstrip removeprefix removesuffix rstrip split splitlines "
        "startswith strip title upper"
    ),
    dict: _words("get items keys values"),
    date: _words("year month day hour minute second isoformat isoweekday strftime weekday date time"),  # and datetime
    LoopContext: _words("index index0 first last length revindex revindex0 previtem nextitem cycle"),
}


class TemplateProblem(ValueError):
    """A template that cannot be used, in one sentence."""


def _size(value: Any, limit: int = MAX_OUTPUT) -> int:
    """How much a value holds, counted no further than a little beyond the limit."""
    total, todo = 0, [value]
    while todo and total <= limit:
        item = todo.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            todo += item.keys()
            todo += item.values()
        elif isinstance(item, list | tuple):
            todo += item
        total += 1
    return total


def _pay(context: Context, cost: int) -> None:
    purse = context.resolve("_budget")
    purse[0] -= cost
    if purse[0] < 0:
        raise SecurityError("the template does too much work")


@pass_context
def _paid(context: Context, value: Any) -> Any:
    """A value that was just made: pays for its size, and is refused when it is huge."""
    if isinstance(value, str | dict | list | tuple):
        size = _size(value)
        if size > MAX_OUTPUT + 1:
            raise SecurityError("a value in the template grows too large")
        _pay(context, size + STEP_COST)
    return value


@pass_context
def _loop(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _pay(context, LOOP_COST)
        yield value


@pass_context
def _join(context: Context, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        values = context.environment.call_filter("map", values, kwargs={"attribute": attribute}, context=context)
    parts = [str(_paid(context, v)) for v in values]
    if sum(map(len, parts)) + len(d) * len(parts) > MAX_OUTPUT:
        raise SecurityError("a value in the template grows too large")
    return d.join(parts)


@pass_context
def _concat(context: Context, values: list[Any]) -> str:
    return _join(context, values)


def _replace(value: Any, old: str, new: str, count: int = -1) -> str:
    text = str(value)
    if len(text) + text.count(old) * len(new) > MAX_OUTPUT:
        raise SecurityError("a value in the template grows too large")
    return text.replace(old, new, count)


def _tojson(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def _range(*bounds: int) -> range:
    found = range(*bounds)
    if len(found) > MAX_RANGE:
        raise SecurityError(f"a range may hold {MAX_RANGE} numbers")
    return found


def _round(value: float, precision: int = 0) -> float:
    return round(value, max(-20, min(20, precision)))


def _paying(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose arguments and result pay for their size."""
    kind = _PassArg.from_obj(plain)

    @pass_context
    def paying(context: Context, *args: Any, **kwargs: Any) -> Any:
        for arg in (*args, *kwargs.values()):
            _paid(context, arg)
        first = {
            _PassArg.context: (context,),
            _PassArg.eval_context: (context.eval_ctx,),
            _PassArg.environment: (context.environment,),
        }
        return _paid(context, plain(*(first[kind] if kind else ()), *args, **kwargs))

    return paying


def _multiply(left: Any, right: Any) -> Any:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(times, int) and _size(value) * abs(times) > MAX_OUTPUT:
            raise SecurityError("a value in the template grows too large")
    return left * right


def _power(left: Any, right: Any) -> Any:
    if abs(left) > 10**6 or abs(right) > 64:
        raise SecurityError("** is for small numbers")
    return left**right


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        raise SecurityError("% does not format text here; write {{ value }}")
    return left % right


BINARY: dict[str, Callable[[Any, Any], Any]] = {"+": lambda a, b: a + b, "*": _multiply, "**": _power, "%": _modulo}


class Sandbox(ImmutableSandboxedEnvironment):
    """Plain data only: known filters, known methods, and arithmetic that cannot explode."""

    intercepted_binops = frozenset(BINARY)

    def __init__(self) -> None:
        super().__init__(undefined=StrictUndefined, autoescape=False, finalize=_paid)
        own: dict[str, Callable[..., Any]] = {"join": _join, "replace": _replace, "round": _round, "tojson": _tojson}
        self.filters = {name: _paying(own.get(name) or FILTERS[name]) for name in ALLOWED_FILTERS}
        self.filters |= {"_paid": _paid, "_loop": _loop, "_concat": _concat}
        self.globals = {"range": _range}

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic within limits."""
        return _paid(context, BINARY[operator](left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """A few methods of plain data, and nothing else of any object."""
        return any(isinstance(obj, kind) and attr in names for kind, names in ALLOWED_ATTRIBUTES.items())

    def getattr(self, obj: Any, attribute: str) -> Any:
        """The value of a key comes before a method of the same name: `args.items` is the argument."""
        return obj[attribute] if isinstance(obj, dict) and attribute in obj else super().getattr(obj, attribute)

    def tree(self, source: str) -> nodes.Template:
        """The syntax tree with all limits built in. TemplateProblem for anything that could run away."""
        if len(source) > MAX_SOURCE:
            raise TemplateProblem(f"longer than {MAX_SOURCE} characters")
        if _brackets(source) > MAX_BRACKETS:
            raise TemplateProblem("nested too deeply")
        try:
            tree = self.parse(source)
            _check(tree)
            _Limiter().visit(tree)
        except TemplateSyntaxError as error:
            raise TemplateProblem(f"line {error.lineno}: {error.message}") from None
        except RecursionError:
            raise TemplateProblem("nested too deeply") from None
        return tree


def _brackets(source: str) -> int:
    """How deep brackets are nested. Checked first, as parsers answer with their own recursion."""
    depth = deepest = 0
    for char in source:
        depth += (char in "([{") - (char in ")]}" and depth > 0)
        deepest = max(deepest, depth)
    return deepest


def _check(tree: nodes.Template) -> None:
    level: list[nodes.Node] = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in node.iter_child_nodes()]
    if level:
        raise TemplateProblem("nested too deeply")
    for node in tree.find_all(nodes.Node):
        name = type(node).__name__.lower()
        if not isinstance(node, ALLOWED_NODES) or isinstance(node, FORBIDDEN_NODES):
            raise TemplateProblem(f"line {node.lineno}: {name} cannot be used here")
        if isinstance(node, nodes.Filter) and node.name not in ALLOWED_FILTERS:
            raise TemplateProblem(f"line {node.lineno}: there is no filter {node.name!r} here")
        if isinstance(node, nodes.Name) and (node.name.startswith("_") or node.name == "self"):
            raise TemplateProblem(f"line {node.lineno}: {node.name!r} cannot be used as a name")
        if isinstance(node, nodes.For) and node.recursive:
            raise TemplateProblem(f"line {node.lineno}: a loop cannot be recursive")
    if _depth(tree) > MAX_LOOP_DEPTH:
        raise TemplateProblem(f"loops are nested more than {MAX_LOOP_DEPTH} deep")


def _depth(node: nodes.Node) -> int:
    return isinstance(node, nodes.For) + max((_depth(child) for child in node.iter_child_nodes()), default=0)


def _through(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Limiter(NodeTransformer):
    """Sends loops, literals and concatenations through the filters that pay."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _through("_loop", node.iter)  # type: ignore[arg-type]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _through("_concat", nodes.List(node.nodes, lineno=node.lineno))

    def _literal(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else _through("_paid", node)

    visit_List = visit_Tuple = visit_Dict = _literal


SANDBOX = Sandbox()
