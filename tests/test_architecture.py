"""The rules of the code that no linter knows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

APP = Path(__file__).parents[1] / "app"
FILES = sorted(APP.rglob("*.py"))
MAX_LINES = 300


def calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            yield node


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(APP)))
def test_file_is_short_and_says_what_it_owns(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= MAX_LINES
    if source.strip():
        assert ast.get_docstring(ast.parse(source)), "a module says in its docstring what it owns"


def test_only_the_unit_of_work_commits() -> None:
    guilty = [str(p.relative_to(APP)) for p in FILES for _ in calls(ast.parse(p.read_text()), "commit")]
    assert guilty == []


def test_only_the_queue_and_its_shortcut_write_a_run_s_status() -> None:
    guilty = [
        p.relative_to(APP).as_posix()
        for p in FILES
        if "UPDATE runs SET" in p.read_text() or "INSERT INTO runs" in p.read_text()
    ]
    assert guilty == ["runs/queue.py", "runs/shortcut.py"]


def test_nothing_holds_state_when_modules_are_imported() -> None:
    """Module level holds constants, classes and functions; pools, services and clients are made by `resources`."""
    made = {"create_async_engine", "AsyncConnectionPool", "FastAPI", "Settings", "AsyncClient", "Graphs", "EventLog"}
    guilty = []
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            value = getattr(node, "value", None)
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in made:
                guilty.append(f"{path.relative_to(APP)}:{node.lineno}")
    assert guilty == []
