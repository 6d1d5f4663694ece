"""Templates and conditions of an agent's configuration, compiled once and rendered within limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables

from app.graphs.sandbox import BUDGET, MAX_OUTPUT, SANDBOX, TemplateProblem

__all__ = ["Condition", "TemplateProblem", "Text"]


class Text:
    """A template, ready to be rendered."""

    def __init__(self, source: str, names: Iterable[str] | None = None) -> None:
        """Compile. With `names`, the use of any other variable is an error now rather than when it is rendered."""
        tree = SANDBOX.tree(source)
        try:
            code = SANDBOX.compile(tree)
        except (TemplateSyntaxError, SyntaxError) as error:
            raise TemplateProblem(str(error.msg if isinstance(error, SyntaxError) else error.message)) from None
        self.uses = frozenset(find_undeclared_variables(tree)) - set(SANDBOX.globals)
        if names is not None and (unknown := sorted(self.uses - set(names))):
            raise TemplateProblem(f"unknown variable {unknown[0]!r}; known are {', '.join(sorted(names))}")
        self._template = Template.from_code(SANDBOX, code, SANDBOX.make_globals(None))

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text. TemplateProblem says what is missing or wrong."""
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate({**variables, "_budget": [BUDGET]}):
                parts.append(part)
                size += len(part)
                if size > MAX_OUTPUT:
                    raise TemplateProblem(f"renders to more than {MAX_OUTPUT} characters")
        except TemplateProblem:
            raise
        except TemplateError as error:
            raise TemplateProblem(str(error)) from error
        except Exception as error:  # an expression on values of unexpected types
            raise TemplateProblem(f"{type(error).__name__}: {error}") from error
        return "".join(parts)


class Condition:
    """An expression over the arguments of a call."""

    def __init__(self, source: str) -> None:
        if not source.strip():
            raise TemplateProblem("a condition cannot be empty")
        if any(mark in source for mark in ("{%", "%}", "{{", "}}", "{#", "#}")):
            raise TemplateProblem("a condition is an expression, without {{ }} around it")
        self._text = Text("{% if (" + source + "\n) %}1{% endif %}")

    def __call__(self, variables: Mapping[str, Any]) -> bool:
        """Whether it holds. One that cannot be evaluated holds: a doubt goes to a human."""
        try:
            return bool(self._text.render(variables))
        except TemplateProblem:
            return True
