"""From what LangGraph streams to the events of the wire: names, shapes, order.

Knows the shapes of `astream` alone. Events that carry a question are held back: they may only be seen once the question is
an item of the inbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.messages import AIMessageChunk, BaseMessage, message_chunk_to_message
from langgraph.types import Interrupt

from app.codec import dumps, message_dict

INTERRUPT = "__interrupt__"
CACHED = "__metadata__"
LANGGRAPH = {"values", "updates", "custom", "messages", "tasks", "checkpoints", "debug"}
Event = tuple[str, bytes]


class ChunkEncoder:
    """Encodes one run. `modes` are those of the request; values and updates are always asked for, to know the outcome."""

    def __init__(self, modes: list[str], *, subgraphs: bool, private: frozenset[str] = frozenset()) -> None:
        self._wanted = set(modes)
        self._subgraphs = subgraphs
        self._private = private
        asked = {"messages" if mode == "messages-tuple" else mode for mode in modes} & LANGGRAPH
        self.langgraph_modes: list[str] = sorted(asked | {"values", "updates"})
        self.last_values: dict[str, Any] | None = None
        self.interrupts: list[Interrupt] = []
        self.paused = False
        self._asked: list[tuple[str, Mapping[str, Any]]] = []  # questions as they came: (suffix of the namespace, payload)
        self._metadata: tuple[Any, Any, bytes] | None = None
        self._partial: dict[str, AIMessageChunk] = {}
        self._announced: set[str] = set()

    def encode(self, namespace: tuple[str, ...], mode: str, payload: Any) -> list[Event]:
        """Events to publish now, in the order of the wire."""
        suffix = "|" + "|".join(namespace) if namespace else ""
        if mode == "values":
            return self._values(suffix, payload)
        if mode == "updates":
            return self._updates(suffix, payload)
        if mode == "messages":
            return self._messages(suffix, *payload)
        if mode in ("tasks", "debug", "checkpoints"):
            payload = self._inner(mode, payload)
        return [(mode + suffix, dumps(payload))] if mode in self._wanted else []

    @property
    def held(self) -> list[Event]:
        """What is told about the questions, once they are in the inbox.

        One `updates` and one `values` a question. The values are the last ones: what ran beside the question is in them.
        """
        events: list[Event] = []
        for suffix, interrupts in self._asked:
            question = {INTERRUPT: list(interrupts)}
            if "updates" in self._wanted:
                events.append(("updates" + suffix, dumps(question)))
            if "values" in self._wanted and interrupts and not suffix:
                events.append(("values", dumps({**self._public(self.last_values or {}), **question})))
        return events

    # -- modes

    def _values(self, suffix: str, payload: Any) -> list[Event]:
        if isinstance(payload, Mapping) and INTERRUPT in payload:
            return []  # told with `held`
        if not suffix:
            self.last_values = payload if isinstance(payload, dict) else {"__root__": payload}
        if "values" not in self._wanted:
            return []
        return [("values" + suffix, dumps(self._public(payload)))]

    def _updates(self, suffix: str, payload: Mapping[str, Any]) -> list[Event]:
        if INTERRUPT in payload:
            if not suffix:
                self.paused = True
                self.interrupts.extend(payload[INTERRUPT])
            self._asked.append((suffix, payload[INTERRUPT]))
            return []
        # On a resume LangGraph repeats what finished tasks wrote before the pause. Clients have seen it.
        if "updates" not in self._wanted or CACHED in payload:
            return []
        return [("updates" + suffix, dumps({node: self._public(delta) for node, delta in payload.items()}))]

    def _messages(self, suffix: str, message: BaseMessage, metadata: dict[str, Any]) -> list[Event]:
        events: list[Event] = []
        if "messages-tuple" in self._wanted:
            data = b"[" + dumps(message_dict(message)) + b"," + self._encoded(metadata) + b"]"
            events.append(("messages" + suffix, data))
        if "messages" in self._wanted and message.id:
            events += self._cumulative(suffix, message.id, message, metadata)
        return events

    def _cumulative(self, suffix: str, id_: str, message: BaseMessage, metadata: dict[str, Any]) -> list[Event]:
        """The older form: metadata once a message, then the message so far with each chunk."""
        events: list[Event] = []
        if id_ not in self._announced:
            self._announced.add(id_)
            events.append(
                ("messages/metadata" + suffix, b"{" + dumps(id_) + b':{"metadata":' + self._encoded(metadata) + b"}}")
            )
        if isinstance(message, AIMessageChunk):
            known = self._partial.get(id_)
            whole = self._partial[id_] = message if known is None else known + message
            events.append(("messages/partial" + suffix, dumps([message_chunk_to_message(whole)])))
        else:
            events.append(("messages/complete" + suffix, dumps([message])))
        return events

    # -- parts

    def _encoded(self, metadata: dict[str, Any]) -> bytes:
        """Metadata as JSON. It is one dictionary for all tokens of a step, so it is encoded once."""
        if self._metadata is not None and self._metadata[0] is metadata:
            return self._metadata[2]
        shown = {k: v for k, v in metadata.items() if not k.startswith(("__", "langgraph_auth_"))}
        if self._metadata is not None and self._metadata[1] == shown:
            self._metadata = (metadata, shown, self._metadata[2])
        else:
            self._metadata = (metadata, shown, dumps(shown))
        return self._metadata[2]

    def _public(self, state: Any) -> Any:
        """A state, or an update of it, without what is the graph's own business."""
        if not isinstance(state, Mapping):
            return state
        return {k: v for k, v in state.items() if k not in self._private and not (isinstance(k, str) and k.startswith("__"))}

    def _inner(self, mode: str, payload: Any) -> Any:
        """Task, checkpoint and debug payloads without private keys and internal configuration."""
        if not isinstance(payload, Mapping):
            return payload
        shown = dict(payload)
        if mode == "debug" and isinstance(shown.get("payload"), Mapping):
            shown["payload"] = self._inner("", shown["payload"])
            return shown
        for key in ("input", "result", "values"):
            if key in shown:
                shown[key] = self._public(shown[key])
        for key in ("config", "parent_config"):
            if isinstance(config := shown.get(key), Mapping):
                configurable = config.get("configurable") or {}
                shown[key] = {"configurable": {k: v for k, v in configurable.items() if k in CHECKPOINT}}
        return shown


CHECKPOINT = ("thread_id", "checkpoint_id", "checkpoint_ns", "checkpoint_map")
