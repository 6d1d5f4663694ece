"""The HTTP application: its routers, error bodies and middleware. No logic of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.telemetry import TelemetryConfig
from psycopg_pool import PoolTimeout
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolExhausted
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from app import __version__, observability
from app.assistants.router import router as assistants_router
from app.codec import clean
from app.edge import Edge, error_response
from app.errors import AppError, Invalid, Unavailable
from app.examples.seed import seed
from app.hot import HotRoutes
from app.inbox.router import router as inbox_router
from app.resources import open_resources
from app.runs.router import many as many_runs_router
from app.runs.router import router as runs_router
from app.settings import LOCAL_ORIGINS, Settings
from app.store.router import router as store_router
from app.threads.router import router as threads_router

log = structlog.get_logger(__name__)

DESCRIPTION = """Persistent threads, streamed runs and an interrupt inbox for LangGraph agents.

The routes under `/assistants`, `/threads` and `/store` speak the LangGraph Agent Server's protocol, so that its SDKs work
unchanged. `/inbox` is Keyturn's own: every question an agent asks a human is an item there, answered by its id.
"""
EXPOSED = ["Location", "Content-Location", "X-Pagination-Total", "X-Pagination-Next", "ETag", "X-Request-Id"]
UNTOLD: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
"""The framework's own OpenTelemetry is off: ours also knows the routes of HotRoutes, and leaves out probes."""
HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 400: "bad_request"}


def create_app(settings: Settings, database_url: str) -> FastAPI:
    """The application on a migrated database. Its lifespan opens and closes all resources."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_resources(settings, database_url, on_broken=lambda: app.state.side_task_broke()) as resources:
            app.state.resources = resources
            app.state.authenticator = resources.authenticator
            await seed(resources)
            yield

    app = FastAPI(
        title="Keyturn",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        telemetry=UNTOLD,
    )
    app.state.settings = settings
    app.state.side_task_broke = lambda: None  # set by whoever runs the process
    for router in (
        assistants_router,
        threads_router,
        runs_router,
        many_runs_router,
        inbox_router,
        store_router,
        observability.router,
    ):
        app.include_router(router)
    add_error_handlers(app)
    app.add_middleware(HotRoutes)
    app.add_middleware(Edge, limit=settings.max_body_bytes)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.cors_origins,
        allow_origin_regex=LOCAL_ORIGINS,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=EXPOSED,
        allow_private_network=True,
    )
    if (telemetry := observability.find_telemetry()) is not None:
        app.add_middleware(telemetry.middleware)
    return app


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error with the one body."""
    app.add_exception_handler(AppError, _app_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    for outage in (
        *(OperationalError, InterfaceError, PoolExhausted),
        *(PoolTimeout, psycopg.OperationalError, psycopg.InterfaceError),
    ):
        app.add_exception_handler(outage, _outage)


async def _app_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, AppError)
    return error_response(error)


async def _validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    fields = [{"path": ".".join(str(p) for p in e["loc"][1:]) or str(e["loc"][0]), "message": e["msg"]} for e in error.errors()]
    if any(e["type"] == "json_invalid" for e in error.errors()):
        return error_response(Invalid("Invalid JSON in request body.", code="invalid_json"))
    first = fields[0]
    return error_response(Invalid(f"{first['path']}: {first['message']}", errors=clean(fields), code="invalid"))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"There is no route {request.method} {request.url.path}. GET /openapi.json lists them all."
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.url.path} does not take {request.method}. Use {allowed}."
    answer = AppError(message, code=HTTP_CODES.get(error.status_code, "http_error"), headers=dict(error.headers or {}))
    answer.status = error.status_code
    return error_response(answer)


async def _outage(_: Request, error: Exception) -> Response:
    log.warning("database_unavailable", error=str(error))
    return error_response(Unavailable("The database does not answer. Try again in a moment.", code="database_unavailable"))
