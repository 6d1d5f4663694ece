"""What a graph is invoked with: its configuration, and its input, on a first claim and on a takeover."""

from __future__ import annotations

from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command

from app.graphs.registry import Graphs
from app.runs.claims import Execution
from app.runs.models import Run, RunKind
from app.runs.outcome import goto_nodes
from app.runs.ports import BREAKPOINT
from app.settings import Settings
from app.threads.state import pending_interrupts

Graph = CompiledStateGraph[Any, Any, Any, Any]
NOTHING = object()
"""There is nothing left to feed to the graph: the run only has to be ended."""


def invocation(graphs: Graphs, settings: Settings, run: Run, assistant_config: dict[str, Any]) -> tuple[RunnableConfig, Any]:
    """The configuration of one invocation. Client keys were filtered; ours go over them."""
    kwargs = run.kwargs
    setup = graphs.configurable(run.graph_id, assistant_config, kwargs.get("config") or {}, kwargs.get("context") or {})
    limit = min(setup.recursion_limit or settings.recursion_limit, settings.max_recursion_limit)
    configurable = {
        **setup.configurable,
        "thread_id": str(run.thread_id),
        "run_id": str(run.id),
        "assistant_id": str(run.assistant_id),
        "graph_id": run.graph_id,
        "user_id": kwargs.get("owner") or run.subject,
        "__keyturn_epoch": run.epoch,
        "__keyturn_tenant": run.tenant_id,
        # LangGraph then refuses an answer to a question that is not asked, rather than dropping it.
        "__pregel_strict_resume": True,
    }
    if checkpoint := kwargs.get("checkpoint"):
        configurable |= {k: checkpoint[k] for k in ("checkpoint_id", "checkpoint_ns") if checkpoint.get(k)}
    return {
        "configurable": configurable,
        "recursion_limit": limit,
        "metadata": {**run.metadata_, "run_attempt": run.attempts},
        "tags": setup.tags,
        "run_id": run.id,
    }, setup.context


async def feed(execution: Execution, graph: Graph, config: RunnableConfig, *, first: bool) -> Any:
    """What to give to the graph: on a first claim the run's own input or answers, on a later one what is left of them."""
    run = execution.run
    own = _own_input(run) if run.kind == RunKind.input else Command(resume=execution.answers)
    if first:
        if BREAKPOINT in execution.answers:
            return None
        return own if run.kind == RunKind.input or execution.answers else NOTHING
    snapshot = await graph.aget_state(newest(run))
    asked = {p.interrupt_id for p in pending_interrupts(snapshot)}
    left = {k: v for k, v in execution.answers.items() if k in asked}
    head = snapshot.config.get("configurable", {}).get("checkpoint_id")
    moved = head != run.base_checkpoint_id
    if run.kind == RunKind.input and not moved:
        return own
    # The state moved on under this run, so it must go on from its newest checkpoint, wherever it started.
    config["configurable"].pop("checkpoint_id", None)
    if left:
        return Command(resume=left)
    # To go on without input would pass a breakpoint that the run had come to.
    stops = run.kwargs.get("interrupt_before") or ()
    # `next` leaves out tasks that are done and whose step is not: after a crash there may be no others.
    if asked or not snapshot.tasks or (moved and (stops == "*" or not set(stops).isdisjoint(snapshot.next))):
        return NOTHING
    return None


def _own_input(run: Run) -> Any:
    command = run.kwargs.get("command")
    if not command:
        return run.kwargs.get("input")
    return Command(update=command.get("update"), goto=goto_nodes(command.get("goto")))


def newest(run: Run) -> RunnableConfig:
    """Names the newest checkpoint of the run's thread."""
    return {"configurable": {"thread_id": str(run.thread_id)}}
