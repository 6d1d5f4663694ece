"""The ReAct agent as a StateGraph of its own.

agent ─Send→ tools            one task for each call that needs no review; they start at once
      ─Send→ review           one task for each gated call: it asks, and does nothing else
review ────→ apply_review     the join, when all are answered: rewrites the AI message, settles refused calls
apply_review ─Send→ tools     accepted and edited calls │ agent │ end (on_ignore)
tools ─────→ agent │ apply_review (while gated calls wait) │ review (no permit: ask again)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from langchain_core.messages import AIMessage, AnyMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.serde.base import maybe_add_typed_methods
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.graph.state import CompiledStateGraph
from langgraph.runtime import Runtime
from langgraph.store.base import BaseStore
from langgraph.types import Command, Send, interrupt
from typing_extensions import TypedDict

from app.graphs.calls import Caller, Job, answered, jobs_of, last_ai, message_for, settled
from app.graphs.config import AgentConfig
from app.graphs.edges import Edge
from app.graphs.limits import CALLS, CallLimits, Calls
from app.graphs.memory import NAMESPACE, Remembered, namespace_of, recall
from app.graphs.models import LazyModel
from app.graphs.prompts import SystemPrompt, for_provider
from app.graphs.review import NOT_CARRIED_OUT, EffectGate, Rule, with_calls
from app.graphs.tools import ToolSpec

REVIEW = "__review"
"""Private state: answers by call, and marks of calls that are asked again. It never authorises anything."""

ASKING = {"type": "ask"}

Graph = CompiledStateGraph[Any, Any, Any, Any]


def merge_answers(old: Any, new: Any) -> dict[str, Any]:
    """Answers add up until the model speaks again, which clears them."""
    return {**(old or {}), **new} if isinstance(new, dict) else {}


class AgentState(TypedDict):
    """What clients see of the state."""

    messages: Annotated[list[AnyMessage], add_messages]


FullState = TypedDict(
    "FullState",
    {
        "messages": Annotated[list[AnyMessage], add_messages],
        "__review": Annotated[dict[str, Any], merge_answers],
        "__calls": dict[str, Any],
    },
)


def build_react(
    agent: AgentConfig,
    tools: Mapping[str, ToolSpec],
    *,
    default_model: str | None,
    gate: EffectGate,
    checkpointer: BaseCheckpointSaver[Any] | None,
    store: BaseStore | None,
    name: str,
    tool_timeout: float | None = None,
) -> Graph:
    """Compile an agent. `tools` are exactly those it may use; `tool_timeout` is the seconds of a call if it sets none."""
    nodes = _Nodes(agent, tools, default_model, gate, agent.limits.tool_timeout or tool_timeout)
    state = FullState if nodes.rules or nodes.limits else AgentState
    graph: Any = StateGraph(state, input_schema=AgentState, output_schema=AgentState)
    graph.add_node("agent", nodes.agent, input_schema=state)
    graph.add_edge(START, "agent")
    if tools:
        graph.add_node("tools", nodes.tools, input_schema=state)
        beyond = ["agent"] if agent.limits.tool_calls is not None else []
        after = ["tools", *(["review"] if nodes.rules else []), *beyond, END]
        graph.add_conditional_edges("agent", Edge(nodes.after_agent), after)
        after = ["agent", END, *(["review", "apply_review"] if nodes.rules else [])]
        graph.add_conditional_edges("tools", Edge(nodes.after_tools), after)
    if nodes.rules:
        graph.add_node("review", nodes.review, input_schema=state)
        graph.add_node("apply_review", nodes.apply_review, input_schema=state)
        graph.add_edge("review", "apply_review")
        graph.add_conditional_edges("apply_review", Edge(nodes.after_review), ["tools", "agent", END])
    compiled: Graph = graph.compile(checkpointer=strict(checkpointer), store=store, name=agent.name or name)
    compiled.step_timeout = agent.limits.step_timeout
    return compiled


def strict(checkpointer: BaseCheckpointSaver[Any] | None) -> BaseCheckpointSaver[Any] | None:
    """The same saver, which rebuilds nothing but messages and plain data from what it reads."""
    if checkpointer is None:
        return None
    narrow = copy.copy(checkpointer)
    narrow.serde = maybe_add_typed_methods(JsonPlusSerializer(allowed_msgpack_modules=None))
    return narrow


class _Nodes:
    """Nodes and edges of one agent. Coroutines throughout: LangGraph would move plain functions to threads."""

    def __init__(
        self,
        agent: AgentConfig,
        tools: Mapping[str, ToolSpec],
        default_model: str | None,
        gate: EffectGate,
        tool_timeout: float | None,
    ) -> None:
        self.rules = {n: Rule(n, rule, tools[n].schema) for n, rule in agent.review.tools.items() if n in tools}
        self._name = agent.name
        self.limits = CallLimits(agent.limits)
        self._caller = Caller(tools, self.rules, gate, tool_timeout)
        self._direct = frozenset(n for n, spec in tools.items() if spec.tool.return_direct)
        self._model = LazyModel(agent.model, [spec.tool for spec in tools.values()], default_model)
        memory = agent.memory
        self._prompt = SystemPrompt(agent.prompt, block=memory is not None and memory.block)
        self._remembers = self._prompt.has_block or self._prompt.uses_memories
        self._namespace = tuple(memory.namespace) if memory is not None else NAMESPACE
        self._limit = memory.limit if memory is not None else 10

    async def agent(self, state: FullState, config: RunnableConfig, runtime: Runtime[Any]) -> dict[str, Any] | None:
        """Ask the model."""
        messages = state["messages"]
        if self._asking(state):
            return None  # a call is being asked again beside this; the model speaks when it is settled
        calls = Calls.of(state, config)
        self.limits.count_model(calls)
        memories = await self._memories(messages, config, runtime.store)
        text = self._prompt.render(messages, memories, runtime.context, config.get("configurable", {}))
        system = [SystemMessage(text)] if text else []
        reply = await self._model.ainvoke([*system, *for_provider(messages)], config)
        reply = settled(reply, messages, self._name)
        update: dict[str, Any] = {"messages": [reply]}
        if self.limits:
            update["messages"] += self.limits.count_tools(calls, jobs_of(reply))
            update[CALLS] = calls.plain()
        return {**update, REVIEW: None} if self.rules else update

    async def tools(self, state: Any, config: RunnableConfig) -> Any:
        """Run one call. One that needs a permit and has none marks itself to be asked."""
        if not (isinstance(state, dict) and "messages" in state):
            job = Job.parse(state)
            return await self._run(job, config)
        # Sent here without a call, by a client's goto: whatever the last message still waits for.
        done: list[Command[Any]] = []
        for job in self._open(state):
            result = await self._run(job, config)
            for part in result if isinstance(result, list) else [result]:
                done.append(part if isinstance(part, Command) else Command(update=part))
        return done

    async def review(self, state: Any) -> dict[str, Any] | None:
        """Ask a human about one call. Runs again from here when the answer comes, so it does nothing else."""
        job = Job.parse(state)
        rule = self.rules.get(job.call["name"])
        if rule is None:
            return None
        answer = interrupt(rule.question(job.call, job.message_id, job.index), response_schema=rule.answer_type())
        return {REVIEW: {job.key: rule.check(answer)}}

    async def apply_review(self, state: FullState) -> dict[str, Any]:
        """Bring the answers into the messages. Runs no call."""
        message = last_ai(state["messages"])
        if message is None:
            return {}
        edits: dict[int, dict[str, Any]] = {}
        updates: list[AnyMessage] = []
        for job in self._open(state):
            answer = self._answer(state, job)
            if answer.get("type") == "edit" and (args := answer["args"]["args"]) != job.call["args"]:
                edits[job.index] = {"args": args}
            elif answer.get("type") == "response":
                updates.append(message_for(job, answer["args"], additional_kwargs={"review": "response"}))
            elif answer.get("type") == "ignore":
                updates.append(message_for(job, NOT_CARRIED_OUT, additional_kwargs={"review": "ignore"}))
        if edits:
            original = {message.tool_calls[i]["id"]: message.tool_calls[i]["args"] for i in edits}
            updates.insert(0, with_calls(message, edits, {"reviewed_from": original}))
        return {"messages": updates}

    async def after_agent(self, state: FullState) -> list[Send] | str:
        """A task for each call of the new message, but for those that the agent refused itself."""
        last = state["messages"][-1] if state["messages"] else None
        refused = self.limits and isinstance(last, ToolMessage)
        if not (refused or isinstance(last, AIMessage)) or self._asking(state):
            return END
        sent = [Send("review" if self._caller.gated(job) else "tools", job.payload()) for job in self._open(state)]
        return sent or ("agent" if refused else END)

    async def after_tools(self, state: FullState) -> list[Send] | str:
        """On with the model, unless calls of the message must be asked, or wait for their review."""
        message = last_ai(state["messages"])
        if message is None:
            return "agent"
        if self.rules:
            jobs = self._open(state)
            asked = [job for job in jobs if self._answer(state, job) == ASKING]
            if asked:
                return [Send("review", job.payload()) for job in asked]
            if any(self._caller.gated(job) and not self._answer(state, job) for job in jobs):
                return "apply_review"
            if self._ends(state, message):
                return END
        return END if any(call["name"] in self._direct for call in message.tool_calls) else "agent"

    async def after_review(self, state: FullState) -> list[Send] | str:
        """Run what is not settled; the gate decides again. Else the turn goes on, or ends as `on_ignore` says."""
        message = last_ai(state["messages"])
        if message is None:
            return END
        if jobs := self._open(state):
            return [Send("tools", self._decided(state, job, message).payload()) for job in jobs]
        return END if self._ends(state, message) else "agent"

    async def _run(self, job: Job, config: RunnableConfig) -> Any:
        result = await self._caller.run(job, config)
        return {REVIEW: {job.key: ASKING}} if result is None else result

    async def _memories(self, messages: list[AnyMessage], config: RunnableConfig, store: BaseStore | None) -> list[Remembered]:
        if not self._remembers or not self._limit or store is None or not config.get("configurable", {}).get("user_id"):
            return []
        said = next((m.text for m in reversed(messages) if m.type == "human"), "")
        return await recall(store, namespace_of(config, self._namespace), said, self._limit)

    def _open(self, state: Any) -> list[Job]:
        """Calls of the newest AI message that have no result yet."""
        message = last_ai(state["messages"])
        if message is None:
            return []
        done = answered(state["messages"], message)
        return [job for job in jobs_of(message) if job.call["id"] not in done]

    def _answer(self, state: Any, job: Job) -> dict[str, Any]:
        """What was decided on a call. State may have been written from outside: anything may stand there."""
        answer = (state.get(REVIEW) or {}).get(job.key)
        rule = self.rules.get(job.call["name"])
        if not isinstance(answer, dict) or rule is None:
            return {}
        if answer == ASKING:
            return ASKING
        try:
            return rule.check(answer)
        except ValueError:
            return {}

    def _asking(self, state: Any) -> bool:
        """Whether a call of the newest message is being asked again. The user's next words end that."""
        if not self.rules or not state["messages"] or not isinstance(state["messages"][-1], AIMessage | ToolMessage):
            return False
        return any(self._answer(state, job) == ASKING for job in self._open(state))

    def _ends(self, state: Any, message: AIMessage) -> bool:
        return any(
            self._answer(state, job).get("type") == "ignore" and self.rules[job.call["name"]].ends_when_ignored
            for job in jobs_of(message)
            if job.call["name"] in self.rules
        )

    def _decided(self, state: Any, job: Job, message: AIMessage) -> Job:
        original = message.response_metadata.get("reviewed_from")
        before = original.get(job.call["id"]) if isinstance(original, dict) else None
        return replace(job, reviewed=bool(self._answer(state, job)), edited_from=before if isinstance(before, dict) else None)
