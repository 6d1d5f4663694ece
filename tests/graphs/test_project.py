"""Graphs and tools of a `langgraph.json`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from graphs.harness import Agents
from langgraph.checkpoint.memory import InMemorySaver
from structlog.testing import capture_logs

from app.errors import Invalid, NotFound
from app.graphs.project import ProjectError
from app.graphs.registry import IDS, Graphs, SystemAssistant
from app.settings import Settings

CODE = '''
from __future__ import annotations

import os

from typing import Annotated, Any
from langchain_core.runnables import RunnableConfig
from langgraph.func import entrypoint
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import interrupt
from typing_extensions import TypedDict
import helper


class State(TypedDict, total=False):
    text: str


class Context(TypedDict, total=False):
    tone: str


async def say(state: State, runtime: Runtime[Context], config: RunnableConfig) -> State:
    tone = (runtime.context or {}).get("tone")
    return {"text": f"{helper.GREETING} {state.get('text')} {tone} {config['configurable'].get('tone')}"}


builder = StateGraph(State, context_schema=Context).add_node("say", say).add_edge(START, "say")
compiled = builder.compile(checkpointer=InMemorySaver())


def factory():
    return builder


def configured(config: RunnableConfig):
    word = config["configurable"]["word"].upper()
    return StateGraph(State).add_node("say", lambda s: {"text": word}).add_edge(START, "say").compile()


async def later():
    return compiled


@entrypoint()
async def function(text: str) -> str:
    return interrupt({"question": text})


def broken(config):
    return 5


def two(a, b):
    return builder


not_a_graph = 5


def shout(text: str) -> str:
    """Says it louder."""
    return text.upper() + os.environ["SHOUT"]
'''

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Writes a project and leaves no trace of it in the process."""
    before, modules, env = list(sys.path), set(sys.modules), dict(os.environ)
    (tmp_path / "graphs.py").write_text(CODE)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "helper.py").write_text("GREETING = 'Hello'\n")

    def project(**content: Any) -> Path:
        path = tmp_path / "langgraph.json"
        path.write_text(json.dumps({"dependencies": [".", "./lib"], **content}))
        return path

    yield project
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        if name.startswith("keyturn_project_") or name in ("helper", "graphs_of_project"):
            del sys.modules[name]
    for name in set(os.environ) - set(env):
        del os.environ[name]


async def loaded(agents: Agents, path: Path, **more: Any) -> Graphs:
    graphs = agents.graphs()
    made = Graphs(
        settings=Settings(config=path),
        checkpointer=graphs._checkpointer,
        store=graphs._store,
        gate=graphs._gate,
        **more,
    )
    await made.load()
    return made


async def run(graphs: Graphs, graph_id: str, config: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    graph: Any = graphs.graph(graph_id, (uuid4(), 1), config or {})
    return await graph.ainvoke({"text": "you"}, {"configurable": {"thread_id": str(uuid4())}}, **kwargs)


async def test_every_form_of_graph(agents: Agents, write: Write) -> None:
    names = ("builder", "compiled", "factory", "later")
    graphs = await loaded(agents, write(graphs={n: f"./graphs.py:{n}" for n in names}))
    assert graphs.graph_ids == ["react", *names]
    for name in names:
        assert (await run(graphs, name, context={"tone": "kind"}))["text"] == "Hello you kind None"


async def test_a_module_and_a_description(agents: Agents, write: Write, tmp_path: Path) -> None:
    (tmp_path / "lib" / "graphs_of_project.py").write_text(CODE)
    graphs = await loaded(agents, write(graphs={"m": {"path": "graphs_of_project:builder", "description": "A graph."}}))
    assert (await run(graphs, "m"))["text"] == "Hello you None None"


async def test_a_factory_gets_the_assistants_configuration(agents: Agents, write: Write) -> None:
    graphs = await loaded(agents, write(graphs={"c": "./graphs.py:configured"}))
    config = {"configurable": {"word": "hey"}}
    graphs.validate("c", config)
    assert (await run(graphs, "c", config))["text"] == "HEY"
    with pytest.raises(Invalid, match="KeyError: 'word'"):
        graphs.validate("c", {})


async def test_a_function_with_a_question(agents: Agents, write: Write) -> None:
    graphs = await loaded(agents, write(graphs={"f": "./graphs.py:function"}))
    graph = graphs.graph("f", (uuid4(), 1), {})
    result = await graph.ainvoke("why?", {"configurable": {"thread_id": str(uuid4())}})  # type: ignore[arg-type]
    assert result["__interrupt__"][0].value == {"question": "why?"}


async def test_the_projects_object_is_copied(agents: Agents, write: Write) -> None:
    graphs = await loaded(agents, write(graphs={"g": "./graphs.py:compiled"}))
    own = graphs._project.graphs["g"].target
    served = graphs.graph("g", (uuid4(), 1), {})
    assert served is not own
    assert isinstance(own.checkpointer, InMemorySaver)
    assert not isinstance(served.checkpointer, InMemorySaver)
    key = (uuid4(), 1)
    assert graphs.graph("g", key, {}) is graphs.graph("g", key, {})


async def test_tools_and_environment(agents: Agents, write: Write, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("SHOUT='!'\nHOME=/elsewhere\n")
    home = os.environ["HOME"]
    graphs = await loaded(agents, write(tools={"shout": "./graphs.py:shout"}, env=".env"))
    assert os.environ["HOME"] == home, "what is set already stays"
    assert await graphs.tools["shout"].tool.ainvoke({"text": "hey"}) == "HEY!"
    graphs.validate("react", {"configurable": {"tools": ["shout"]}})


async def test_keys_that_are_not_used_are_named_once(agents: Agents, write: Write) -> None:
    with capture_logs() as logs:
        await loaded(agents, write(python_version="3.12", http={}, dependencies=["no-such-package-anywhere>=1"]))
    assert [(entry["event"], entry.get("key") or entry.get("dependency")) for entry in logs] == [
        ("langgraph_json_key_ignored", "http"),
        ("langgraph_json_key_ignored", "python_version"),
        ("langgraph_json_dependency_missing", "no-such-package-anywhere>=1"),
    ]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"graphs": {"react": "./graphs.py:builder"}}, "graphs.react: is a built-in name"),
        ({"graphs": {"a b": "./graphs.py:builder"}}, "graphs.a b: may hold only"),
        ({"graphs": {"g": "./graphs.py"}}, "graphs.g: must be './file.py:attribute'"),
        ({"graphs": {"g": "./nothing.py:x"}}, "nothing.py does not exist"),
        ({"graphs": {"g": "./graphs.py:nothing"}}, "graphs.g: ./graphs.py has no 'nothing'"),
        ({"graphs": {"g": "./graphs.py:not_a_graph"}}, "graphs.g: a int is neither a graph"),
        ({"graphs": {"g": "./graphs.py:two"}}, "takes the configuration, or nothing"),
        ({"graphs": {"g": "no.module:x"}}, "ModuleNotFoundError"),
        ({"graphs": []}, None),
        ({"graphs": ["x"]}, "graphs: must be an object"),
        ({"tools": {"refund": "./graphs.py:shout"}}, "'refund' is a tool that Keyturn brings"),
        ({"env": ".nothing"}, "env: .nothing does not exist"),
        ({"dependencies": ["./nothing"]}, "dependencies: ./nothing is not a directory"),
    ],
)
async def test_mistakes_stop_the_start_in_one_line(
    agents: Agents, write: Write, content: dict[str, Any], text: str | None
) -> None:
    path = write(**content)
    if text is None:
        await loaded(agents, path)
        return
    with pytest.raises(ProjectError) as caught:
        await loaded(agents, path)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["{", "[]", None])
async def test_a_file_that_is_no_project(agents: Agents, tmp_path: Path, source: str | None) -> None:
    path = tmp_path / "langgraph.json"
    if source is not None:
        path.write_text(source)
    with pytest.raises(ProjectError):
        await loaded(agents, path)


async def test_system_assistants(agents: Agents, write: Write) -> None:
    examples = [SystemAssistant(uuid4(), "react", n, "d", {"configurable": {}}) for n in ("demo", "g")]
    graphs = await loaded(agents, write(graphs={"g": "./graphs.py:builder"}), examples=examples)
    assert [(a.name, a.graph_id) for a in graphs.system] == [("react", "react"), ("g", "g"), ("demo", "react")]
    assert str(SystemAssistant(IDS, "x", "x").id) == "6ba7b821-9dad-11d1-80b4-00c04fd430c8"


async def test_schemas_and_drawing_of_a_project(agents: Agents, write: Write) -> None:
    graphs = await loaded(agents, write(graphs={"g": "./graphs.py:builder", "f": "./graphs.py:function"}))
    schemas = graphs.schemas("g", (uuid4(), 1), {})
    assert list(schemas["input_schema"]["properties"]) == ["text"]
    assert list(schemas["state_schema"]["properties"]) == ["text"]
    assert list(schemas["context_schema"]["properties"]) == ["tone"]
    assert graphs.schemas("f", (uuid4(), 1), {})["state_schema"] is None
    assert graphs.drawing("g", (uuid4(), 1), {}) == {
        "nodes": [
            {"id": "__start__", "type": "runnable", "data": {"name": "__start__"}},
            {"id": "say", "type": "runnable", "data": {"name": "say"}},
            {"id": "__end__"},
        ],
        "edges": [{"source": "__start__", "target": "say"}, {"source": "say", "target": "__end__"}],
    }


async def test_a_project_run_merges_what_it_may(agents: Agents, write: Write) -> None:
    graphs = await loaded(agents, write(graphs={"g": "./graphs.py:builder"}))
    own = {"configurable": {"tone": "kind", "model": "a"}, "tags": ["x"], "recursion_limit": 7}
    server = {"__pregel_checkpointer": 1, "checkpoint_ns": "x", "langgraph_auth_user": {}, "thread_id": "t", "run_id": "r"}
    asked = {"configurable": {"model": "b", **server}, "tags": ["y", "x"]}
    setup = graphs.configurable("g", own, asked, {"tone": "dry", "__keyturn_epoch": 9})
    assert setup.configurable == {"tone": "dry", "model": "b"}
    assert setup.context == {"tone": "dry", "model": "b"}
    assert (setup.recursion_limit, setup.tags) == (7, ["x", "y"])
    assert graphs.configurable("g", {}, {"recursion_limit": 3}).context is None


async def test_an_unknown_graph(agents: Agents) -> None:
    graphs = agents.graphs()
    for use in (lambda: graphs.validate("x", {}), lambda: graphs.graph("x", (uuid4(), 1), {})):
        with pytest.raises(NotFound, match="Known graphs: react"):
            use()
