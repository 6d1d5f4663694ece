"""What a client is told when a run fails. Messages of unknown exceptions stay in the log: they may hold secrets."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
from langgraph.errors import EmptyInputError, GraphRecursionError, InvalidUpdateError
from psycopg_pool import PoolTimeout
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from app.errors import AppError
from app.graphs.models import ModelError
from app.watchdog import BlockedLoop

# Classes whose text is written for the person who wrote or called the graph.
SHOWN = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RuntimeError,
    TimeoutError,
    InvalidUpdateError,
    EmptyInputError,
    ModelError,
)
MASKED = "An internal error occurred. The server's log has the details under this run's id."


def describe(error: BaseException) -> dict[str, Any]:
    """The body of an `error` event and of `__error__`: `{error, message, code}`. `error` is the exception's class."""
    name = type(error).__name__
    if isinstance(error, GraphRecursionError):
        message = "The run took more supersteps than its recursion_limit allows. Raise the limit or simplify the task."
        return {"error": name, "message": message, "code": "recursion_limit"}
    if isinstance(error, AppError):
        return {"error": name, "message": error.message, "code": error.code}
    if isinstance(error, ModelError):
        return {"error": name, "message": str(error), "code": error.code}
    if isinstance(error, BlockedLoop):
        return {"error": name, "message": str(error), "code": "blocked_event_loop"}
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return {"error": name, "message": str(error) or "A step took longer than allowed.", "code": "timeout"}
    if isinstance(error, EmptyInputError):
        return {"error": name, "message": str(error), "code": "empty_input"}
    if not isinstance(error, Exception):
        return {"error": name, "message": f"The graph raised {name}, which is not for a graph to raise.", "code": "graph_error"}
    return {"error": name, "message": str(error) if isinstance(error, SHOWN) else MASKED, "code": "graph_error"}


def is_outage(error: BaseException) -> bool:
    """Whether the database was away. The run is then not over: it goes on from its last checkpoint."""
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    return isinstance(
        error, psycopg.OperationalError | psycopg.InterfaceError | PoolTimeout | OperationalError | InterfaceError
    )
