"""Loads a `langgraph.json`: graphs and tools by file or module, environment and import paths. Fails loudly, in one line."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import structlog
from dotenv import dotenv_values
from langgraph.graph import StateGraph
from langgraph.pregel import Pregel

from app.errors import AppError

log = structlog.get_logger(__name__)

BUILT_IN = frozenset({"react", "graph", "extract"})
"""Kinds of agents that are configured rather than written; a project's graph may not take their names."""

SUPPORTED = frozenset({"graphs", "tools", "env", "dependencies", "$schema"})
GRAPH_ID = re.compile(r"^[a-zA-Z0-9_-]{1,64}$")


class ProjectError(AppError):
    """The project cannot be served; the message is one line that says why."""

    code = "project_error"


@dataclass(frozen=True, slots=True)
class GraphSource:
    """A graph of a project, or a function that makes one from the run configuration of an assistant."""

    graph_id: str
    target: Any
    takes_config: bool = False
    is_factory: bool = False

    def make(self, config: Mapping[str, Any]) -> StateGraph[Any, Any, Any, Any] | Pregel[Any, Any, Any, Any]:
        """The graph for one configuration."""
        made = self.target
        if self.is_factory:
            made = made(dict(config)) if self.takes_config else made()
        if isinstance(made, StateGraph | Pregel):
            return made
        if inspect.iscoroutine(made):
            made.close()
        raise ProjectError(
            f"graph {self.graph_id}: the factory must return a StateGraph or a compiled graph, not {_kind(made)}"
        )


@dataclass(frozen=True, slots=True)
class Project:
    """What a `langgraph.json` offers."""

    path: Path | None = None
    graphs: dict[str, GraphSource] = field(default_factory=dict)
    tools: dict[str, Any] = field(default_factory=dict)


async def load_project(path: Path) -> Project:
    """Load the project. Modules are imported here and now, so that a mistake in one stops the start."""
    content = _read(path)
    for key in sorted(set(content) - SUPPORTED):
        log.warning("langgraph_json_key_ignored", key=key, hint=f"Keyturn does not use {key!r} of {path.name}.")
    _prepare(content, path)
    tools = {str(name): _resolve(ref, path, f"tools.{name}") for name, ref in _mapping(content, "tools", path).items()}
    graphs: dict[str, GraphSource] = {}
    for graph_id, entry in _mapping(content, "graphs", path).items():
        if graph_id in BUILT_IN or not GRAPH_ID.match(graph_id):
            why = "is a built-in name" if graph_id in BUILT_IN else "may hold only letters, digits, _ and -"
            raise ProjectError(f"{path.name}: graphs.{graph_id}: {why}; choose another")
        reference = entry.get("path") if isinstance(entry, dict) else entry
        graphs[graph_id] = await _source(graph_id, _resolve(reference, path, f"graphs.{graph_id}"), path)
    return Project(path, graphs, tools)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProjectError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ProjectError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ProjectError(f"{path}: must be a JSON object")
    return content


def _mapping(content: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    value = content.get(key) or {}
    if not isinstance(value, dict):
        raise ProjectError(f"{path.name}: {key}: must be an object of name to './file.py:attribute'")
    return value


def _prepare(content: Mapping[str, Any], path: Path) -> None:
    """Environment variables that are not set yet, and directories to import from."""
    env = content.get("env")
    if isinstance(env, str):
        file = path.parent / env
        if not file.is_file():
            raise ProjectError(f"{path.name}: env: {env} does not exist")
        env = dotenv_values(file)
    for name, value in (env or {}).items():
        if value is not None:
            os.environ.setdefault(str(name), str(value))
    for dependency in content.get("dependencies") or []:
        directory = (path.parent / str(dependency)).resolve()
        if str(dependency).startswith(".") or directory.is_dir():
            if not directory.is_dir():
                raise ProjectError(f"{path.name}: dependencies: {dependency} is not a directory")
            for entry in (directory, directory / "src"):
                if entry.is_dir() and str(entry) not in sys.path:
                    sys.path.insert(0, str(entry))
        elif importlib.util.find_spec(re.split(r"[^\w.]", str(dependency))[0].replace("-", "_")) is None:
            log.warning("langgraph_json_dependency_missing", dependency=dependency, hint="Install it beside Keyturn.")


def _resolve(reference: Any, path: Path, where: str) -> Any:
    """The object at `./file.py:attribute` or `package.module:attribute`."""
    if not isinstance(reference, str) or reference.count(":") < 1:
        raise ProjectError(f"{path.name}: {where}: must be './file.py:attribute' or 'package.module:attribute'")
    source, _, attribute = reference.rpartition(":")
    is_file = source.endswith(".py") or "/" in source
    try:
        module = _load_file(path.parent / source) if is_file else importlib.import_module(source)
    except ProjectError as error:
        raise ProjectError(f"{path.name}: {where}: {error}") from None
    except Exception as error:
        raise ProjectError(f"{path.name}: {where}: importing {source} failed: {type(error).__name__}: {error}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ProjectError(f"{path.name}: {where}: {source} has no {attribute!r}") from None


def _load_file(path: Path) -> ModuleType:
    """Import a file under a name of its own, once. Its types are then found by name, as annotations need it."""
    path = path.resolve()
    if not path.is_file():
        raise ProjectError(f"{path} does not exist")
    for module in tuple(sys.modules.values()):
        if (file := getattr(module, "__file__", None)) and file == str(path):
            return module
    name = f"keyturn_project_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ProjectError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


async def _source(graph_id: str, target: Any, path: Path) -> GraphSource:
    if isinstance(target, StateGraph | Pregel):
        return GraphSource(graph_id, target)
    where = f"{path.name}: graphs.{graph_id}"
    if not callable(target):
        raise ProjectError(f"{where}: {_kind(target)} is neither a graph nor a function that makes one")
    required = [
        p
        for p in inspect.signature(target).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(required) > 1:
        raise ProjectError(f"{where}: a function that makes a graph takes the configuration, or nothing")
    if inspect.iscoroutinefunction(target):
        if required:
            raise ProjectError(f"{where}: an async function that makes a graph cannot take the configuration")
        try:
            async with asyncio.timeout(60):
                return await _source(graph_id, await target(), path)
        except TimeoutError:
            raise ProjectError(f"{where}: the function took more than a minute") from None
    return GraphSource(graph_id, target, takes_config=bool(required), is_factory=True)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
