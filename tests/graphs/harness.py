"""Agents on a real Postgres: the stock saver, the store, and the gate of the inbox with permits handed out by the test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

from langchain_core.messages import AIMessage, AnyMessage, ToolMessage
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.store.postgres.aio import AsyncPostgresStore
from langgraph.types import Command, Interrupt

from app.db.engine import Database
from app.graphs.registry import Graph, Graphs
from app.graphs.review import args_hash
from app.inbox.permits import PostgresEffectGate
from app.settings import Settings

ACCEPT: dict[str, Any] = {"type": "accept", "args": None}
IGNORE: dict[str, Any] = {"type": "ignore", "args": None}


def edit(action: str, **args: Any) -> dict[str, Any]:
    return {"type": "edit", "args": {"action": action, "args": args}}


def response(text: str) -> dict[str, Any]:
    return {"type": "response", "args": text}


def script(*calls: tuple[str, dict[str, Any]], end: str = "All done.", **rules: Any) -> dict[str, Any]:
    """A model that makes these calls when told to go, and then says the end."""
    first = {"if": "go", "tool_calls": [{"name": name, "args": args} for name, args in calls]}
    return {"provider": "scripted", "params": {"rules": [*rules.get("rules", ()), first], "else": end}}


@dataclass
class Agent:
    """One agent on one thread."""

    graph: Graph
    database: Database
    thread_id: str = field(default_factory=lambda: str(uuid4()))

    def config(self, **configurable: Any) -> dict[str, Any]:
        return {
            "configurable": {
                "thread_id": self.thread_id,
                "user_id": "alice",
                "__pregel_strict_resume": True,
                **configurable,
            },
            "recursion_limit": 25,
        }

    async def run(self, given: Any, context: dict[str, Any] | None = None) -> dict[str, Any]:
        return await self.graph.ainvoke(given, self.config(), context=context, durability="sync")  # type: ignore[arg-type]

    async def say(self, text: str = "go", context: dict[str, Any] | None = None) -> list[AnyMessage]:
        await self.run({"messages": [{"type": "human", "content": text}]}, context)
        return await self.messages()

    async def state(self) -> Any:
        return await self.graph.aget_state(self.config())  # type: ignore[arg-type]

    async def messages(self) -> list[AnyMessage]:
        return list((await self.state()).values.get("messages", []))

    async def questions(self) -> list[Interrupt]:
        """Open questions in the order of their calls."""
        return sorted((await self.state()).interrupts, key=lambda i: i.value[0]["call_index"])

    async def decide(self, answers: Mapping[int, Any]) -> list[AnyMessage]:
        """Answer questions by their place. As the inbox does, accept and edit make a permit."""
        questions = await self.questions()
        resume: dict[str, Any] = {}
        for place, answer in answers.items():
            question = questions[place]
            resume[question.id] = answer
            human = answer[0] if isinstance(answer, list) else answer
            if human["type"] in ("accept", "edit"):
                request = human["args"] if human["type"] == "edit" else question.value[0]["action_request"]
                await self.permit(question.value[0], request["args"])
        await self.run(Command(resume=resume))
        return await self.messages()

    async def permit(self, value: dict[str, Any], args: dict[str, Any] | None = None) -> None:
        request = value["action_request"]
        async with self.database.pool.connection() as connection:
            await connection.execute(
                "INSERT INTO effect_permits (tenant_id, thread_id, message_id, call_index, args_hash, item_id)"
                " VALUES ('default', %s, %s, %s, %s, %s)",
                [
                    UUID(self.thread_id),
                    value["message_id"],
                    value["call_index"],
                    args_hash(request["action"], request["args"] if args is None else args),
                    uuid4(),
                ],
            )

    async def permits(self) -> list[dict[str, Any]]:
        async with self.database.pool.connection() as connection:
            cursor = await connection.execute(
                "SELECT * FROM effect_permits WHERE thread_id = %s ORDER BY call_index", [UUID(self.thread_id)]
            )
            return list(await cursor.fetchall())


@dataclass
class Agents:
    """Builds agents. `effects` is what their tools did."""

    database: Database
    effects: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    settings: Settings = field(default_factory=Settings)

    def graphs(self) -> Graphs:
        """As after a start of the server: nothing is shared with an earlier one but the database."""
        graphs = Graphs(
            settings=self.settings,
            checkpointer=AsyncPostgresSaver(self.database.pool),  # type: ignore[arg-type]
            store=AsyncPostgresStore(self.database.pool),  # type: ignore[arg-type]
            gate=PostgresEffectGate(self.database),
        )
        for name in ("pay", "wipe", "mail"):
            graphs.tools.add(name, self._tool(name))
        graphs.tools.add("peek", self._tool("peek"))
        return graphs

    def agent(self, *, thread_id: str | None = None, graphs: Graphs | None = None, **configurable: Any) -> Agent:
        graph = (graphs or self.graphs()).graph("react", (uuid4(), 1), {"configurable": configurable})
        return Agent(graph, self.database, thread_id or str(uuid4()))

    def _tool(self, name: str) -> Any:
        async def act(amount: int, to: str = "nobody") -> str:
            """Does something that is counted."""
            self.effects.append((name, {"amount": amount, "to": to}))
            return f"{name} {amount}"

        return act


def paired(messages: list[AnyMessage]) -> None:
    """Every call has exactly one result, behind its message and before the next; every result has a call."""
    wanted: list[str | None] = []
    for message in messages:
        if isinstance(message, ToolMessage):
            assert message.tool_call_id in wanted, f"a second or stray result: {message}"
            wanted.remove(message.tool_call_id)
        else:
            assert not wanted, f"calls without a result: {wanted}"
        if isinstance(message, AIMessage):
            wanted = [c["id"] for c in (*message.tool_calls, *message.invalid_tool_calls)]
            assert len(set(wanted)) == len(wanted)
    assert not wanted


def results(messages: list[AnyMessage]) -> list[ToolMessage]:
    return [m for m in messages if isinstance(m, ToolMessage)]
