"""Tools that are gated."""

from __future__ import annotations

import asyncio
from typing import Any

from bank import STARTED, TRANSFERS
from langchain_core.tools import tool
from pydantic import BaseModel


@tool
def transfer(to: str, amount: int) -> str:
    """Transfer money."""
    TRANSFERS.append((to, amount))
    return f"Transferred {amount} to {to}."


class Address(BaseModel):
    """Where somebody lives."""

    street: str
    number: int | None = None


@tool
def mixed(to: Address, parts: list[int], ratio: float = 0.5, extra: Any = None) -> str:
    """A tool with nested arguments."""
    return f"{to} {parts} {ratio} {extra}"


@tool
async def hang(name: str) -> str:
    """Start something and never come back."""
    STARTED.append(name)
    await asyncio.Event().wait()
    return name
