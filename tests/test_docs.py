"""README.md tells of everything there is: each setting, error code, route and event; and of nothing that is not there.

`python tests/test_docs.py` writes the tables of settings and routes anew, and adds a row for each new error code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from fastapi.routing import APIRoute

from app import errors
from app.main import create_app
from app.runs.schemas import StreamMode
from app.settings import Settings

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
NOT_OURS = {"/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"}


def section(name: str, text: str | None = None) -> str:
    """What stands between the page's `<!-- name -->` and `<!-- /name -->`."""
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", text or README.read_text("utf-8"), re.DOTALL)
    assert found, f"README.md has no part {name}"
    return found[1]


def settings_table() -> str:
    """Every setting with its default and meaning."""
    rows = ["| variable | default | |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        variable = "DATABASE_URL" if name == "database_url" else f"KEYTURN_{name.upper()}"
        default = field.get_default(call_default_factory=True)
        shown = "" if default in (None, []) else f"`{str(default).lower() if isinstance(default, bool) else default}`"
        rows.append(f"| `{variable}` | {shown} | {field.description} |")
    return "\n".join(rows) + "\n"


def routes_table() -> str:
    """Every route with its summary."""
    rows = ["| route | |", "|---|---|"]
    for method, route in routes():
        rows.append(f"| `{method} {route.path}` | {route.summary} |")
    return "\n".join(rows) + "\n"


def routes() -> Iterator[tuple[str, APIRoute]]:
    """All routes of the application."""
    for route in create_app(Settings(), "postgresql://nowhere").routes:
        if isinstance(route, APIRoute) and route.path not in NOT_OURS:
            for method in sorted(route.methods):
                yield method, route


def error_codes() -> set[str]:
    """Every code that the source can put into an error body or a run's error."""
    codes = {cls.code for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.AppError)}
    for file in (ROOT / "app").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                codes |= set(_codes(node))
    return codes


def _codes(call: ast.Call) -> Iterator[str]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    first = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
    if isinstance(call.func, ast.Attribute) and name == "of" and getattr(call.func.value, "id", "") == "NotFound":
        yield f"{str(first).lower().replace(' ', '_')}_not_found"
    if name == "ModelError" and isinstance(first, str):
        yield first
    for keyword in call.keywords:
        if keyword.arg == "code" and isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str):
            yield keyword.value.value


def documented_codes() -> list[str]:
    """The codes of the page's table."""
    return re.findall(r"^\| `(\w+)` \|", section("errors"), re.MULTILINE)


def test_every_setting_is_documented() -> None:
    assert section("settings") == settings_table()


def test_every_route_is_documented() -> None:
    assert section("routes") == routes_table()


def test_every_error_code_is_documented() -> None:
    documented = documented_codes()
    assert sorted(documented) == sorted(set(documented))
    assert set(documented) == error_codes()
    assert "TODO" not in README.read_text("utf-8")


def test_every_event_is_documented() -> None:
    events = section("events")
    for mode in get_args(StreamMode):
        assert f"`{mode}`" in events, mode
    for event in ("metadata", "error", "end", "messages/partial", "messages/complete", "messages/metadata"):
        assert f"`{event}`" in events, event


def rewrite() -> None:
    """Write the tables into the page."""
    text = README.read_text("utf-8")
    table = section("errors", text) or "| code | status | |\n|---|---|---|\n"
    missing = sorted(error_codes() - set(documented_codes()))
    parts = {
        "settings": settings_table(),
        "routes": routes_table(),
        "errors": table + "".join(f"| `{code}` | TODO | TODO |\n" for code in missing),
    }
    for name, new in parts.items():
        text = text.replace(
            f"<!-- {name} -->\n{section(name, text)}<!-- /{name} -->", f"<!-- {name} -->\n{new}<!-- /{name} -->"
        )
    README.write_text(text, "utf-8")


if __name__ == "__main__":
    rewrite()
