"""A tool with an effect that tests can count, and one that does not come back."""

from __future__ import annotations

import asyncio
from uuid import uuid4

from langchain_core.tools import tool
from langgraph.prebuilt import ToolRuntime


@tool
async def pay(amount: int, runtime: ToolRuntime) -> str:
    """Pay."""
    assert runtime.store is not None
    await runtime.store.aput(("effects",), str(uuid4()), {"amount": amount})
    return f"paid {amount}"


@tool
async def hold() -> str:
    """Wait for ever."""
    await asyncio.Event().wait()
    return ""
