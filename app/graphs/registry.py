"""All graphs that a process serves: the built-in `react` kind and those of the project, compiled once per revision."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID, uuid5

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.store.base import BaseStore
from pydantic import TypeAdapter

from app.errors import FieldError, Invalid, NotFound
from app.graphs.config import AGENT_KEYS, PATH, AgentConfig, parse, refuse
from app.graphs.limits import CALLS
from app.graphs.memory import NAMESPACE, memory_tools
from app.graphs.project import Project, ProjectError, load_project
from app.graphs.react import REVIEW, AgentState, build_react
from app.graphs.review import EffectGate
from app.graphs.saver_messages import append_only
from app.graphs.tools import ToolProblem, ToolRegistry, ToolSpec
from app.settings import Settings

REACT = "react"
IDS = UUID("6ba7b821-9dad-11d1-80b4-00c04fd430c8")
"""Namespace of the ids of system assistants, the same as other servers of this protocol use."""

CACHED_GRAPHS = 512
SERVER_KEYS = frozenset({"thread_id", "run_id", "assistant_id", "graph_id", "run_attempt"})
RESERVED_PREFIXES = ("__", "checkpoint", "langgraph_auth_", "langgraph_request_id")

Graph = CompiledStateGraph[Any, Any, Any, Any]
Key = tuple[UUID, int]


@dataclass(frozen=True, slots=True)
class SystemAssistant:
    """An assistant that every tenant has and nobody changes."""

    id: UUID
    graph_id: str
    name: str
    description: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    context: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunSetup:
    """What a run adds to its graph: LangGraph's `configurable` and `context`, without anything reserved."""

    configurable: dict[str, Any]
    context: dict[str, Any] | None
    recursion_limit: int | None
    tags: list[str]


class Graphs:
    """Knows what configurations mean. Compiled graphs carry the saver and the store."""

    private_keys = frozenset({REVIEW, CALLS})

    def __init__(
        self,
        *,
        settings: Settings,
        checkpointer: BaseCheckpointSaver[Any],
        store: BaseStore,
        gate: EffectGate,
        examples: Sequence[SystemAssistant] = (),
    ) -> None:
        self._settings = settings
        self._checkpointer = checkpointer
        self._store = store
        self._gate = gate
        self._examples = tuple(examples)
        self._project = Project()
        self._compiled: OrderedDict[Key, Graph] = OrderedDict()
        self.tools = ToolRegistry()

    async def load(self, default: Path | None = None) -> None:
        """Load the project of `settings.config`, else the default one. ProjectError says in one line what is wrong."""
        if model := self._settings.default_model:
            try:
                self.validate(REACT, {"configurable": {"model": model}})
            except Invalid as error:
                raise ProjectError(f"KEYTURN_DEFAULT_MODEL: {error.extra['errors'][0]['message']}") from None
        path = self._settings.config or default
        if path is not None:
            self._project = await load_project(path)
            for name, value in self._project.tools.items():
                try:
                    self.tools.add(name, value)
                except ToolProblem as error:
                    raise ProjectError(f"{path.name}: tools: {error}") from None
        for assistant in self.system:
            if assistant.graph_id == REACT:
                self._agent(assistant.config)

    @property
    def graph_ids(self) -> list[str]:
        """Ids that an assistant may name."""
        return [REACT, *self._project.graphs]

    @property
    def system(self) -> list[SystemAssistant]:
        """One assistant for each graph, and the examples. A project's graph comes before an example of the same name."""
        graphs = [SystemAssistant(uuid5(IDS, graph_id), graph_id, graph_id) for graph_id in self.graph_ids]
        return [*graphs, *(e for e in self._examples if e.name not in self.graph_ids)]

    def validate(self, graph_id: str, config: Mapping[str, Any], context: Mapping[str, Any] | None = None) -> None:
        """Refuse a configuration that could not run: NotFound for the graph, Invalid with the path of each wrong field."""
        self._known(graph_id)
        limit = config.get("recursion_limit")
        if limit is not None and limit > self._settings.max_recursion_limit:
            raise Invalid.field("config.recursion_limit", f"must be at most {self._settings.max_recursion_limit}")
        if graph_id == REACT:
            self._agent(config)
            return
        source = self._project.graphs[graph_id]
        if source.is_factory:
            try:
                source.make(self._factory_config(config))
            except Exception as error:
                raise Invalid.field(PATH, f"the graph cannot be made with it: {type(error).__name__}: {error}") from error

    def graph(self, graph_id: str, key: Key, config: Mapping[str, Any]) -> Graph:
        """The compiled graph of one revision of an assistant. Never change it: runs share it."""
        if (known := self._compiled.get(key)) is not None:
            self._compiled.move_to_end(key)
            return known
        self._known(graph_id)
        compiled = self._compiled[key] = self._react(config) if graph_id == REACT else self._own(graph_id, config)
        while len(self._compiled) > CACHED_GRAPHS:
            self._compiled.popitem(last=False)
        return compiled

    def configurable(
        self,
        graph_id: str,
        assistant_config: Mapping[str, Any],
        run_config: Mapping[str, Any],
        run_context: Mapping[str, Any] | None = None,
    ) -> RunSetup:
        """What a run may set. The configuration of a built-in kind belongs to its assistant: Invalid if a run touches it."""
        own = _free(assistant_config.get("configurable") or {})
        asked = _free(run_config.get("configurable") or {})
        context = _free(run_context or {})
        tags = list(dict.fromkeys([*(assistant_config.get("tags") or []), *(run_config.get("tags") or [])]))
        limit = run_config.get("recursion_limit") or assistant_config.get("recursion_limit")
        if graph_id == REACT:
            _refuse_agent_keys(asked, context)
            seen = {**asked, **context}
            return RunSetup(dict(asked), seen or None, limit or own.get("recursion_limit"), tags)
        # `configurable` and `context` are one thing under two names.
        merged = {**own, **asked, **context}
        return RunSetup(merged, merged or None, limit, tags)

    def gated(self, graph_id: str, config: Mapping[str, Any]) -> bool:
        """Whether the agent has review rules."""
        if graph_id != REACT:
            return False
        review = (config.get("configurable") or {}).get("review")
        return bool(isinstance(review, dict) and review.get("tools"))

    def tool_schema(self, graph_id: str, config: Mapping[str, Any], tool_name: str | None) -> dict[str, Any] | None:
        """JSON Schema of the arguments of an agent's tool, for checking an edit. None where it is not known."""
        if graph_id != REACT or tool_name is None:
            return None
        spec = self._tools(self._agent(config)).get(tool_name)
        return spec.schema if spec else None

    def schemas(self, graph_id: str, key: Key, config: Mapping[str, Any]) -> dict[str, Any]:
        """JSON Schemas of a graph, without private state."""
        graph = self.graph(graph_id, key, config)
        if graph_id == REACT:
            state: dict[str, Any] | None = TypeAdapter(AgentState).json_schema()
            settings: dict[str, Any] | None = AgentConfig.model_json_schema()
            context: dict[str, Any] | None = {
                "title": "Context",
                "type": "object",
                "description": "Variables of the prompt template.",
            }
        else:
            builder = getattr(graph, "builder", None)
            state = _schema_of(getattr(builder, "state_schema", None))
            settings = context = graph.get_context_jsonschema()
        return {
            "graph_id": graph_id,
            "input_schema": graph.get_input_jsonschema(),
            "output_schema": graph.get_output_jsonschema(),
            "state_schema": state,
            "config_schema": settings,
            "context_schema": context,
        }

    def drawing(self, graph_id: str, key: Key, config: Mapping[str, Any], *, xray: bool | int = False) -> dict[str, Any]:
        """Nodes and edges, in the shape of the wire."""
        drawn = self.graph(graph_id, key, config).get_graph(xray=xray)
        nodes = [
            {"id": n.id} if n.id == "__end__" else {"id": n.id, "type": "runnable", "data": {"name": n.name}}
            for n in drawn.nodes.values()
        ]
        edges: list[dict[str, Any]] = []
        for e in drawn.edges:
            edge: dict[str, Any] = {"source": e.source, "target": e.target}
            if e.data is not None:
                edge["data"] = str(e.data)
            if e.conditional:
                edge["conditional"] = True
            edges.append(edge)
        return {"nodes": nodes, "edges": edges}

    def _known(self, graph_id: str) -> None:
        if graph_id not in self.graph_ids:
            raise NotFound(
                f"Graph '{graph_id}' does not exist. Known graphs: {', '.join(self.graph_ids)}.", code="graph_not_found"
            )

    def _agent(self, config: Mapping[str, Any]) -> AgentConfig:
        return parse(config.get("configurable") or {}, self.tools, self._settings.max_recursion_limit)

    def _tools(self, agent: AgentConfig) -> dict[str, ToolSpec]:
        found = {name: self.tools[name] for name in agent.all_tools}
        if agent.memory is not None and tuple(agent.memory.namespace) != NAMESPACE:
            found |= {t.name: ToolSpec.of(t) for t in memory_tools(agent.memory.namespace)}
        return found

    def _react(self, config: Mapping[str, Any]) -> Graph:
        agent = self._agent(config)
        graph = build_react(
            agent,
            self._tools(agent),
            default_model=self._settings.default_model,
            gate=self._gate,
            checkpointer=self._checkpointer,
            store=self._store,
            name=REACT,
            tool_timeout=self._settings.tool_timeout or None,
        )
        return append_only(graph)

    def _own(self, graph_id: str, config: Mapping[str, Any]) -> Graph:
        made = self._project.graphs[graph_id].make(self._factory_config(config))
        if isinstance(made, StateGraph):
            return append_only(made.compile(checkpointer=self._checkpointer, store=self._store, name=graph_id))
        # The project's object is shared: it is copied, never changed.
        update = {"checkpointer": self._checkpointer, "store": self._store, "name": graph_id}
        return append_only(made.copy(update=update))  # type: ignore[arg-type]

    @staticmethod
    def _factory_config(config: Mapping[str, Any]) -> dict[str, Any]:
        return {**config, "configurable": dict(config.get("configurable") or {})}


def _free(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without the keys that only the server sets."""
    return {k: v for k, v in values.items() if k not in SERVER_KEYS and not str(k).startswith(RESERVED_PREFIXES)}


def _refuse_agent_keys(configurable: Mapping[str, Any], context: Mapping[str, Any]) -> None:
    # `name` is a fair name for a variable of the prompt.
    found = [("config.configurable", k) for k in configurable if k in AGENT_KEYS]
    found += [("context", k) for k in context if k in AGENT_KEYS - {"name"}]
    if found:
        why = "belongs to the assistant; a run cannot change it"
        errors: list[FieldError] = [{"path": f"{prefix}.{k}", "message": why} for prefix, k in found]
        raise refuse(errors)


def _schema_of(type_: Any) -> dict[str, Any] | None:
    if type_ is None:
        return None
    try:
        return TypeAdapter(type_).json_schema()
    except Exception:  # a state may hold anything, also what has no JSON Schema
        return None
