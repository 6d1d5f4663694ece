"""From the body of a request to what a run keeps: checked, cleaned, and enough to execute it anywhere at any time."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from app.assistants.service import Pinned
from app.auth import Principal
from app.codec import clean
from app.errors import Forbidden, Invalid
from app.graphs.registry import Graphs
from app.outgoing import check_url
from app.runs.schemas import RunCreate
from app.settings import Settings
from app.threads.messages import accept_input

RESERVED = frozenset({"thread_id", "run_id", "assistant_id", "graph_id", "cron_id", "run_attempt"})
"""Metadata that the server writes, and that checkpoints are told apart by."""

traceparent: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""W3C's name for the span of the request that is being answered. See `app.telemetry`."""


def own_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """A client's metadata, without what only the server may say."""
    return {k: v for k, v in metadata.items() if k not in RESERVED and not k.startswith("__")}


def run_kwargs(settings: Settings, graphs: Graphs, principal: Principal, pinned: Pinned, request: RunCreate) -> dict[str, Any]:
    """What the run needs to execute anywhere at any time, checked and cleaned."""
    config = clean(request.config.model_dump(exclude_none=True))
    context = clean(request.context)
    limit = request.config.recursion_limit
    if limit is not None and limit > settings.max_recursion_limit:
        raise Invalid.field("config.recursion_limit", f"must be at most {settings.max_recursion_limit}")
    graphs.configurable(pinned.graph_id, pinned.config, config, context)
    checkpoint = request.checkpoint or ({"checkpoint_id": request.checkpoint_id} if request.checkpoint_id else None)
    wanted = context.get("user_id") or config["configurable"].get("user_id")
    kwargs: dict[str, Any] = {
        "input": accept_input(request.input, principal),
        "config": config,
        "context": context,
        "stream_mode": list(request.stream_mode),
        "stream_subgraphs": request.stream_subgraphs,
        "interrupt_before": request.interrupt_before,
        "interrupt_after": request.interrupt_after,
        "durability": request.durability,
        "checkpoint": clean(checkpoint),
        "after_seconds": request.after_seconds,
        "traceparent": traceparent.get(),
        "webhook": _webhook(request.webhook, allow_private=settings.allow_private_addresses),
        "owner": str(wanted) if wanted and principal.can("users:any") else principal.subject,
    }
    if request.command is not None and not request.resumes:
        if graphs.gated(pinned.graph_id, pinned.config) and not principal.can("threads:repair"):
            raise Forbidden(
                "This agent has review rules: writing its state needs the scope threads:repair.",
                code="missing_scope",
                scope="threads:repair",
            )
        kwargs["command"] = {
            "update": accept_input(request.command.update, principal),
            "goto": clean(request.command.goto),
        }
        _check_goto(request.command.goto)
    return {key: value for key, value in kwargs.items() if value is not None}


def _webhook(url: str | None, *, allow_private: bool) -> str | None:
    if url is not None:
        try:
            check_url(url, allow_private=allow_private)
        except ValueError as error:
            raise Invalid.field("webhook", str(error)) from None
    return url


def _check_goto(goto: Any) -> None:
    for node in goto if isinstance(goto, list) else [goto]:
        if node is None or isinstance(node, str) or (isinstance(node, dict) and isinstance(node.get("node"), str)):
            continue
        raise Invalid.field("command.goto", "must be a node's name, `{node, input}`, or a list of these")
