"""The example assistants: configurations of `react`, nothing more. They are data, and a start for one's own.

Their model is `default`: a real one where a provider's key is set, else the script that stands in `params`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID, uuid5

from app.graphs.registry import SystemAssistant

PROJECT = Path(__file__).parent / "langgraph.json"
NAMESPACE = UUID("6ba7b821-9dad-11d1-80b4-00c04fd430c8")

WEATHER_SCRIPT: dict[str, Any] = {
    "rules": [
        {
            "if": r"weather.*?\b(?:in|for|at)\s+(?P<location>[^?.!,]+)",
            "tool_calls": [{"name": "get_weather", "args": {"location": "{location}"}}],
        },
        {"after_tool": "get_weather", "reply": "{result}"},
    ],
    "else": "Ask me for the weather in a place.",
}

# An amount is matched to its last digit, so that the first digits of 1500 or of 1,500 never pass for a small one.
SMALL = r"(?P<amount>\d{1,3}(?:\.\d+)?)(?![\d,.]*\d)"
LARGE = r"(?P<amount>\d{4,}(?:\.\d+)?)(?![\d,.]*\d)"
ORDER = r"order\s*#?\s*(?P<order_id>\w[\w-]*)"
REFUND_CALL = {"order_id": "{order_id}", "amount": "{amount}"}

REFUND_SCRIPT: dict[str, Any] = {
    "rules": [
        {"if": rf"refund\s+(?:of\s+)?[$€£]?\s*{SMALL}.*?{ORDER}", "tool_calls": [{"name": "refund", "args": REFUND_CALL}]},
        {"if": rf"refund\s+(?:of\s+)?[$€£]?\s*{LARGE}.*?{ORDER}", "tool_calls": [{"name": "audit", "args": REFUND_CALL}]},
        {"if": rf"refund\s+{ORDER}\D+{SMALL}", "tool_calls": [{"name": "refund", "args": REFUND_CALL}]},
        {"if": rf"refund\s+{ORDER}\D+{LARGE}", "tool_calls": [{"name": "audit", "args": REFUND_CALL}]},
        {"after_tool": "refund", "reply": "Done. {result}"},
        {"after_tool": "audit", "reply": "The audit is back: {result}"},
    ],
    "else": "Tell me what to refund, for example: refund 1500 for order 12345.",
}

REFUND_DESK: dict[str, Any] = {
    "prompt": (
        "You are a refund desk. For a refund you need the order and the amount; ask for what is missing. "
        "Call `refund` when the amount is below 1000, and `audit` when it is 1000 or more. "
        "Then tell the customer in one sentence what came of it."
    ),
    "tools": ["refund", "audit"],
    "review": {
        "tools": {
            "audit": {
                "allow_accept": True,
                "allow_edit": True,
                "allow_respond": True,
                "allow_ignore": True,
                "description": "Refund of {{ amount }} on order {{ order_id }}: 1000 or more needs a human.",
            }
        }
    },
}

MEMORY_SCRIPT: dict[str, Any] = {
    "rules": [
        {
            "if": r"\bremember\s+(?:that\s+)?(?P<fact>.+?)[.!]*\s*$",
            "tool_calls": [{"name": "save_memory", "args": {"memory": "{fact}"}}],
        },
        {"if": r"\?\s*$", "tool_calls": [{"name": "search_memory", "args": {"query": "{input}"}}]},
        {"after_tool": "save_memory", "reply": "I will remember that."},
        {"after_tool": "search_memory", "reply": "From memory: {result}"},
        {"after_tool": "delete_memory", "reply": "Forgotten."},
    ],
    "else": "Tell me something to remember, or ask me a question about it.",
}


def _example(
    name: str, description: str, *, provider: str = "default", script: dict[str, Any], **agent: Any
) -> SystemAssistant:
    model = {"provider": provider, "params": script}
    return SystemAssistant(
        id=uuid5(NAMESPACE, name),
        graph_id="react",
        name=name,
        description=description,
        config={"configurable": {"model": model, **agent}},
        context={},
    )


EXAMPLES: tuple[SystemAssistant, ...] = (
    _example(
        "weather",
        "Looks up the weather with one tool.",
        script=WEATHER_SCRIPT,
        prompt="You answer questions about the weather. Look it up with `get_weather`; never guess.",
        tools=["get_weather"],
    ),
    _example(
        "refund_desk",
        "Refunds below 1000 at once; larger ones go to an audit that a human must release.",
        script=REFUND_SCRIPT,
        **REFUND_DESK,
    ),
    _example(
        "memory",
        "Remembers what its user tells it, on every thread.",
        script=MEMORY_SCRIPT,
        prompt=(
            "You remember what your user tells you. Save lasting facts with `save_memory`, look them up with "
            "`search_memory`, and forget with `delete_memory` when asked to."
        ),
        tools=["save_memory", "search_memory", "delete_memory"],
        memory={},
    ),
    _example(
        "demo",
        "The refund desk on the scripted model: a script answers, no language model. It asks the first question in the inbox.",
        provider="scripted",
        script=REFUND_SCRIPT,
        **REFUND_DESK,
    ),
)
