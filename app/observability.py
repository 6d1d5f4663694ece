"""Logs, and the routes that say how the process is: `/ok`, `/info`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import structlog
from fastapi import APIRouter, Request
from pydantic import BaseModel

from app import __version__
from app.db.migrate import is_current
from app.errors import Unavailable
from app.openapi import responses
from app.settings import Settings

if TYPE_CHECKING:
    from app.telemetry import Telemetry

router = APIRouter(tags=["server"])

DATABASE_SECONDS = 5.0
"""How long the database may take to answer a probe."""


def configure_logging(settings: Settings) -> None:
    """Structured logs on stderr: text for a person at a terminal, one JSON object a line elsewhere."""
    as_text = settings.log_format == "text" or (settings.log_format == "auto" and sys.stderr.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: list[Any] = (
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if as_text
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    # Libraries speak only when something is wrong.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


def find_telemetry() -> Telemetry | None:
    """What tells OpenTelemetry of requests and runs, where its standard variables name a receiver."""
    named = any(os.environ.get(f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT") for kind in ("", "TRACES_", "METRICS_"))
    if not named or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from app.telemetry import telemetry  # noqa: PLC0415 (an option, and slow to load)
    except ModuleNotFoundError as error:
        raise Unavailable(f"OTEL_EXPORTER_OTLP_* is set, which needs the packages of `keyturn[telemetry]`: {error}.") from error
    return telemetry()


class Ok(BaseModel):
    """The server answers."""

    ok: bool = True


class Info(BaseModel):
    """What this server is, for clients that ask before they connect."""

    version: str
    langgraph_py_version: str
    flags: dict[str, bool]
    host: dict[str, str | None]


@router.get("/ok", response_model=Ok, summary="Is the server there?", responses=responses(503))
async def ok(request: Request, check_db: bool = False) -> Ok:
    """200 while the process works; 503 while it stops, or with `check_db=1` when its database is of no use."""
    resources = request.app.state.resources
    if resources.stopping:
        raise Unavailable("The server is stopping. Try again in a moment.", code="stopping")
    if check_db:
        try:
            async with asyncio.timeout(DATABASE_SECONDS), resources.database.transaction() as tx:
                found = await is_current(tx)
        except Exception as error:
            raise Unavailable("The database does not answer. Try again in a moment.", code="database_unavailable") from error
        if not found:
            raise Unavailable("The database lacks migrations. Run `keyturn migrate`.", code="database_outdated")
    return Ok()


@router.get("/info", response_model=Info, summary="What is this server?")
async def info() -> Info:
    """Versions and abilities."""
    return Info(
        version=__version__,
        langgraph_py_version=version("langgraph"),
        flags={"assistants": True, "crons": False, "langsmith": False, "strict_resume": True, "inbox": True},
        host={"kind": "keyturn", "project_id": None, "tenant_id": None, "revision_id": None, "host_revision_id": None},
    )
