"""The state of threads as clients read and write it, from checkpoints and into them.

Writing needs the thread's lock and goes in one transaction with the thread's row and its open questions. On an agent with
review rules it needs the scope `threads:repair`; it can ask questions again, and never answers one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from langchain_core.messages import AIMessage, AnyMessage, ToolMessage
from langgraph.types import StateSnapshot, StateUpdate
from psycopg import Error as DriverError
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from app.assistants.service import Pinned
from app.auth import Principal
from app.codec import jsonable
from app.errors import AppError, BadRequest, Conflict, Forbidden, NotFound
from app.threads.checkpoints import Graph, in_transaction
from app.threads.messages import MESSAGES, accept_input
from app.threads.models import Thread, ThreadStatus
from app.threads.schemas import Checkpoint, HistorySearch, Superstep, ThreadCreate
from app.threads.schemas import StateUpdate as StateUpdateBody
from app.threads.service import ThreadService, without_graph
from app.threads.state import EMPTY, checkpoint_of, thread_state

WITHDRAWN = "Not carried out: the question whether to run this was withdrawn before anybody answered it."


@dataclass(slots=True)
class ThreadStates:
    """State of the threads of one process."""

    threads: ThreadService

    async def read(
        self, principal: Principal, thread_id: UUID, *, at: Checkpoint | None = None, subgraphs: bool = False
    ) -> dict[str, Any]:
        """The newest state, or that at a checkpoint. Reading the newest marks its questions as seen.

        Errors: 404 unknown thread or checkpoint.
        """
        graph = await self._graph(principal, thread_id)
        configurable = at.configurable() if at is not None else {}
        state = EMPTY
        if graph is not None:
            config: Any = {"configurable": {"thread_id": str(thread_id), **configurable}}
            snapshot = await graph.aget_state(config, subgraphs=subgraphs)
            state = thread_state(snapshot, self.threads.graphs.private_keys)
        if state is EMPTY and "checkpoint_id" in configurable:
            raise NotFound.of("Checkpoint", configurable["checkpoint_id"])
        if state["next"] and not configurable:
            async with self.threads.database.transaction() as tx:
                await self.threads.inbox.seen(tx, thread_id, principal)
        return state

    async def history(self, principal: Principal, thread_id: UUID, query: HistorySearch) -> list[dict[str, Any]]:
        """States of the thread's checkpoints, newest first."""
        graph = await self._graph(principal, thread_id)
        if graph is None:
            return []
        named = query.checkpoint.configurable() if query.checkpoint is not None else {}
        config: Any = {"configurable": {"thread_id": str(thread_id), **named}}
        before: Any = None
        if query.before is not None and query.before.checkpoint_id is not None:
            before = {"configurable": {"thread_id": str(thread_id), "checkpoint_id": str(query.before.checkpoint_id)}}
        found = graph.aget_state_history(config, filter=jsonable(query.metadata) or None, before=before, limit=query.limit)
        return [thread_state(snapshot, self.threads.graphs.private_keys) async for snapshot in found]

    async def update(self, principal: Principal, thread_id: UUID, body: StateUpdateBody) -> dict[str, Any]:
        """Write values as if a node had returned them. Open questions are superseded; what is asked then is a new item.

        Errors: 400 no graph or no such node, 403 without `threads:repair` on an agent with review rules, 404, 409
        `thread_busy`, 422 messages that a client may not write.
        """
        async with self.threads.database.transaction() as tx:
            thread = await self.threads.lock(tx, principal, thread_id)
            pinned = await self.threads.pinned(tx, principal, thread)
            if pinned is None:
                raise without_graph(thread_id)
            if thread.status == ThreadStatus.busy:
                raise Conflict(
                    "The thread is busy: wait for its runs to end, or cancel them, then write its state.", code="thread_busy"
                )
            self._may_write(principal, pinned)
            values = accept_input(body.values, principal, path="values")
            if not principal.can("threads:repair"):
                await self.threads.refuse_overwriting(
                    tx, thread_id, values, path="values", pinned=pinned, checkpoint=body.base.configurable()
                )
            ends = values is None and body.as_node == "__end__"
            await self.threads.inbox.leave(tx, thread, "turn_ended" if ends else "state_updated", principal)
            graph = self.threads.graph(pinned)
            config = {"configurable": {"thread_id": str(thread_id), **body.base.configurable()}}
            supersteps = [[StateUpdate(values, body.as_node)]]
            if ends:
                supersteps = [*await self._unanswered(tx, graph, config), *supersteps]
            made = await self._write(tx, graph, config, supersteps)
            self._pin(thread, pinned)
            await self.threads.settle(tx, principal, thread, graph)
        checkpoint = checkpoint_of(made) or {}
        return {"checkpoint": checkpoint, "configurable": checkpoint, "checkpoint_id": checkpoint.get("checkpoint_id")}

    async def create(self, principal: Principal, body: ThreadCreate) -> Thread:
        """A new thread, with state if `supersteps` are given.

        Errors: 400 no graph to write with, 409 `thread_exists`, and those of `update`.
        """
        if body.thread_id is None and not body.supersteps:
            return await self.threads.create_new(principal, body.metadata or {})
        async with self.threads.database.transaction() as tx:
            try:
                thread = await self.threads.create(tx, principal, thread_id=body.thread_id, metadata=body.metadata)
            except Conflict:
                if body.if_exists != "do_nothing" or body.thread_id is None:
                    raise
                return await self.threads.create(tx, principal, thread_id=body.thread_id, if_exists="do_nothing")
            if body.supersteps:
                await self._seed(tx, principal, thread, body.supersteps)
            return thread

    # ---------------------------------------------------------------------------------------------------------------

    async def _seed(self, tx: AsyncSession, principal: Principal, thread: Thread, supersteps: list[Superstep]) -> None:
        pinned = await self.threads.pinned(tx, principal, thread)
        if pinned is None:
            raise without_graph(thread.id)
        self._may_write(principal, pinned)
        written = [
            [
                StateUpdate(accept_input(u.written, principal, path=f"supersteps.{i}.updates.{j}.values"), u.as_node)
                for j, u in enumerate(step.updates)
            ]
            for i, step in enumerate(supersteps)
        ]
        graph = self.threads.graph(pinned)
        await self._write(tx, graph, {"configurable": {"thread_id": str(thread.id)}}, written)
        self._pin(thread, pinned)
        await self.threads.settle(tx, principal, thread, graph)
        await tx.flush()

    async def _graph(self, principal: Principal, thread_id: UUID) -> Graph | None:
        """The graph to read a thread with; None if it never ran."""
        async with self.threads.database.transaction() as tx:
            thread = await self.threads.find(tx, principal, thread_id)
            pinned = await self.threads.pinned(tx, principal, thread)
        return None if pinned is None else self.threads.graph(pinned)

    def _may_write(self, principal: Principal, pinned: Pinned) -> None:
        if self.threads.graphs.gated(pinned.graph_id, pinned.config) and not principal.can("threads:repair"):
            raise Forbidden(
                "This agent has review rules: writing its state needs the scope threads:repair.",
                code="missing_scope",
                scope="threads:repair",
            )

    @staticmethod
    def _pin(thread: Thread, pinned: Pinned) -> None:
        """From its first state on a thread belongs to an assistant version, which decides how it is read and guarded."""
        if thread.assistant_id is None:
            thread.graph_id = pinned.graph_id
            thread.assistant_id, thread.assistant_version = pinned.key

    @staticmethod
    async def _write(
        tx: AsyncSession, graph: Graph, config: dict[str, Any], supersteps: Sequence[Sequence[StateUpdate]]
    ) -> Any:
        writer = await in_transaction(tx, graph)
        try:
            return await writer.abulk_update_state(config, supersteps)  # type: ignore[arg-type]
        except (AppError, DriverError, DBAPIError):
            raise
        except Exception as error:  # the graph's own reducers run here, on values that a client chose
            raise BadRequest(f"The state cannot be written so: {error}", code="invalid_update") from error

    @staticmethod
    async def _unanswered(tx: AsyncSession, graph: Graph, config: dict[str, Any]) -> list[list[StateUpdate]]:
        """A step that answers tool calls left open, so that the conversation stays one that a model accepts."""
        if "tools" not in graph.nodes:
            return []
        reader = await in_transaction(tx, graph)
        calls = _open_calls(await reader.aget_state(config))  # type: ignore[arg-type]
        if not calls:
            return []
        messages = [ToolMessage(WITHDRAWN, tool_call_id=c["id"], name=c["name"], status="error") for c in calls]
        return [[StateUpdate({MESSAGES: messages}, "tools")]]


def _open_calls(snapshot: StateSnapshot) -> list[Any]:
    """Tool calls of the last model message that no tool message answers."""
    messages: list[AnyMessage] = snapshot.values.get(MESSAGES) or [] if isinstance(snapshot.values, dict) else []
    answered = {m.tool_call_id for m in messages if isinstance(m, ToolMessage)}
    last = next((m for m in reversed(messages) if isinstance(m, AIMessage)), None)
    return [] if last is None else [c for c in last.tool_calls if c["id"] not in answered]
