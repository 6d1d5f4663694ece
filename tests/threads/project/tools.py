"""A tool with an effect that tests can count: it leaves an item in the store."""

from __future__ import annotations

from uuid import uuid4

from langchain_core.tools import tool
from langgraph.prebuilt import ToolRuntime


@tool
async def pay(amount: int, runtime: ToolRuntime) -> str:
    """Pay an amount."""
    assert runtime.store is not None
    await runtime.store.aput(("paid",), str(uuid4()), {"amount": amount})
    return f"paid {amount}"
