"""README.md tells of everything there is: each setting, error code, route and event; and of nothing that is not there.

`python tests/test_docs.py` writes the tables of settings and routes anew, and adds a row for each new error code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from app import errors
from app.inbox.decisions import ENDS
from app.main import HTTP_CODES, create_app
from app.runs.schemas import StreamMode
from app.settings import Settings

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


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
    for path, operations in create_app(Settings(), "postgresql://nowhere").openapi()["paths"].items():
        rows += [f"| `{method.upper()} {path}` | {operation['summary']} |" for method, operation in operations.items()]
    return "\n".join(rows) + "\n"


def error_codes() -> set[str]:
    """Every code that the source can put into an error body or a run's error."""
    codes = {cls.code for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.AppError)}
    codes |= {*HTTP_CODES.values(), *(status.value for status in ENDS)}
    for file in (ROOT / "app").rglob("*.py"):
        tree = ast.parse(file.read_text("utf-8"))
        helpers = {
            node.name: [argument.arg for argument in node.args.args].index("code")
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and "code" in [argument.arg for argument in node.args.args]
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                codes |= set(_of_call(node, helpers))
            elif isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                codes |= {c for key, value in pairs if _constant(key) == "code" and (c := _constant(value))}
    return codes


def _of_call(call: ast.Call, helpers: dict[str, int]) -> Iterator[str]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    arguments = [_constant(argument) for argument in call.args]
    if isinstance(call.func, ast.Attribute) and name == "of" and getattr(call.func.value, "id", "") == "NotFound":
        yield f"{arguments[0]}_not_found".lower().replace(" ", "_")
    at = {"ModelError": 0, **helpers}.get(name, len(arguments))
    yield from filter(None, arguments[at : at + 1])
    yield from filter(None, (_constant(keyword.value) for keyword in call.keywords if keyword.arg == "code"))


def _constant(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


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
