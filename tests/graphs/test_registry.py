"""The built-in kind, as the rest of the server sees it."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4, uuid5

import pytest
from graphs.harness import Agents

from app.errors import Invalid
from app.examples.assistants import EXAMPLES
from app.graphs.project import ProjectError
from app.graphs.registry import CACHED_GRAPHS, Graphs
from app.settings import Settings

DESK: dict[str, Any] = {
    "configurable": {
        "tools": ["refund", "audit"],
        "memory": {"limit": 3},
        "review": {"tools": {"audit": {}}},
        "recursion_limit": 9,
    }
}


@pytest.fixture
async def graphs(agents: Agents) -> Graphs:
    return agents.graphs()


def test_what_a_run_may_set(graphs: Graphs) -> None:
    setup = graphs.configurable(
        "react", DESK, {"configurable": {"tone": "kind", "__x": 1}}, {"name": "Ada", "checkpoint_id": "x"}
    )
    assert setup.configurable == {"tone": "kind"}
    assert setup.context == {"tone": "kind", "name": "Ada"}
    assert setup.recursion_limit == 9
    assert graphs.configurable("react", DESK, {"recursion_limit": 4}).recursion_limit == 4
    assert graphs.configurable("react", {"recursion_limit": 6}, {}).recursion_limit == 6
    assert graphs.configurable("react", DESK, {}).context is None


@pytest.mark.parametrize("key", ["model", "prompt", "tools", "review", "memory", "recursion_limit"])
def test_a_run_cannot_change_the_agent(graphs: Graphs, key: str) -> None:
    with pytest.raises(Invalid) as caught:
        graphs.configurable("react", DESK, {"configurable": {key: {}}})
    assert caught.value.extra["errors"][0]["path"] == f"config.configurable.{key}"
    with pytest.raises(Invalid) as caught:
        graphs.configurable("react", DESK, {}, {key: {}})
    assert caught.value.extra["errors"][0]["path"] == f"context.{key}"


def test_gates_and_schemas_of_tools(graphs: Graphs) -> None:
    assert graphs.gated("react", DESK)
    assert not graphs.gated("react", {"configurable": {"review": {"tools": {}}}})
    assert not graphs.gated("react", {})
    assert not graphs.gated("other", DESK)
    schema = graphs.tool_schema("react", DESK, "audit")
    assert schema is not None
    assert schema["required"] == ["order_id", "amount"]
    assert schema["additionalProperties"] is False
    assert graphs.tool_schema("react", DESK, "get_weather") is None
    assert graphs.tool_schema("react", DESK, None) is None
    assert graphs.tool_schema("other", DESK, "audit") is None


def test_schemas_hide_private_state(graphs: Graphs) -> None:
    schemas = graphs.schemas("react", (uuid4(), 1), DESK)
    for name in ("input_schema", "output_schema", "state_schema"):
        assert list(schemas[name]["properties"]) == ["messages"]
    assert "review" in schemas["config_schema"]["properties"]
    assert schemas["graph_id"] == "react"
    assert graphs.private_keys == {"__review", "__calls"}


def test_the_drawing_shows_the_review(graphs: Graphs) -> None:
    drawn = graphs.drawing("react", (uuid4(), 1), DESK, xray=True)
    assert [n["id"] for n in drawn["nodes"]] == ["__start__", "agent", "tools", "review", "apply_review", "__end__"]
    assert {"source": "review", "target": "apply_review"} in drawn["edges"]
    plain = graphs.drawing("react", (uuid4(), 1), {"configurable": {}})
    assert [n["id"] for n in plain["nodes"]] == ["__start__", "agent", "__end__"]


def test_limits_of_the_server_hold(graphs: Graphs) -> None:
    with pytest.raises(Invalid, match=r"config\.recursion_limit"):
        graphs.validate("react", {"recursion_limit": 10_000})
    with pytest.raises(Invalid, match=r"config\.configurable\.recursion_limit"):
        graphs.validate("react", {"configurable": {"recursion_limit": 10_000}})


def test_graphs_are_compiled_once_per_revision(graphs: Graphs) -> None:
    key = (uuid4(), 1)
    graph = graphs.graph("react", key, {})
    assert graphs.graph("react", key, {}) is graph
    assert graphs.graph("react", (key[0], 2), {}) is not graph
    for i in range(CACHED_GRAPHS):
        graphs._compiled[(uuid4(), i)] = graph
    graphs.graph("react", (uuid4(), 1), {})
    assert len(graphs._compiled) == CACHED_GRAPHS


async def test_the_examples_are_valid(agents: Agents) -> None:
    plain = agents.graphs()
    graphs = Graphs(
        settings=agents.settings, checkpointer=plain._checkpointer, store=plain._store, gate=plain._gate, examples=EXAMPLES
    )
    await graphs.load()
    assert graphs.system[0].id == uuid5(UUID("6ba7b821-9dad-11d1-80b4-00c04fd430c8"), "react")
    for assistant in graphs.system:
        graphs.validate(assistant.graph_id, assistant.config, assistant.context)
        graphs.graph(assistant.graph_id, (assistant.id, 1), assistant.config)


@pytest.mark.parametrize("model", ["nobody:x", "openai", ""])
async def test_a_default_model_that_cannot_work_stops_the_start(agents: Agents, model: str) -> None:
    agents.settings = Settings(default_model=model)
    graphs = agents.graphs()
    if model:
        with pytest.raises(ProjectError, match="KEYTURN_DEFAULT_MODEL: "):
            await graphs.load()
    else:
        await graphs.load()
