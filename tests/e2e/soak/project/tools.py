"""Tools whose effects are counted outside of Keyturn: each call that is carried out is a committed row."""

from __future__ import annotations

import asyncio
import os

import psycopg
from langchain_core.tools import tool

DATABASE = os.environ["SOAK_EFFECTS_URL"]


@tool
async def pay(key: str, n: int) -> str:
    """Pay. Gated."""
    async with await psycopg.AsyncConnection.connect(DATABASE, autocommit=True) as connection:
        await connection.execute("INSERT INTO soak_effects (key) VALUES (%s)", [f"{key}/{n}"])
    await asyncio.sleep(0.1)
    return f"paid {n}"


@tool
async def look(key: str) -> str:
    """Look. Free, and so it may be called again after a crash."""
    await asyncio.sleep(0.03)
    return f"seen {key}"


@tool
async def hold(key: str) -> str:
    """Take long."""
    await asyncio.sleep(20)
    return f"held {key}"
