"""The HTTP application: routers, error bodies, CORS, body limit, request ids. No logic of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from psycopg_pool import PoolTimeout
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolExhausted
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import __version__, observability
from app.assistants.router import router as assistants_router
from app.codec import clean, dumps
from app.dashboard.router import page, wants_page
from app.errors import AppError, Internal, Invalid, TooLarge, Unavailable
from app.examples.seed import seed
from app.inbox.router import router as inbox_router
from app.observability import RequestId, request_id
from app.resources import open_resources
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

    app = FastAPI(title="Keyturn", version=__version__, description=DESCRIPTION, lifespan=lifespan)
    app.state.settings = settings
    app.state.side_task_broke = lambda: None  # set by whoever runs the process
    for router in (assistants_router, threads_router, runs_router, inbox_router, store_router, observability.router):
        app.include_router(router)
    app.add_exception_handler(AppError, _app_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    for outage in (OperationalError, InterfaceError, PoolExhausted, PoolTimeout):
        app.add_exception_handler(outage, _outage)
    app.add_middleware(Unexpected)
    app.add_middleware(Pages)
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.cors_origins,
        allow_origin_regex=LOCAL_ORIGINS,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=EXPOSED,
        allow_private_network=True,
    )
    app.add_middleware(RequestId)
    return app


def error_response(error: AppError) -> Response:
    """The one error body."""
    return Response(
        dumps(error.body(request_id.get())), status_code=error.status, headers=error.headers, media_type="application/json"
    )


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
    answer = AppError(message, code=HTTP_CODES.get(error.status_code, "http_error"), headers=dict(error.headers or {}))
    answer.status = error.status_code
    return error_response(answer)


async def _outage(_: Request, error: Exception) -> Response:
    log.warning("database_unavailable", error=str(error))
    return error_response(Unavailable("The database does not answer. Try again in a moment.", code="database_unavailable"))


class Unexpected:
    """ASGI middleware: what nobody foresaw is logged whole, and answered with the request id alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except TooLarge:
            raise
        except Exception as error:
            if scope["type"] != "http":
                raise
            log.error("request_failed", method=scope["method"], path=scope["path"], request_id=request_id.get(), exc_info=error)
            if not started:
                await error_response(Internal())(scope, receive, send)


class BodyLimit:
    """ASGI middleware: refuses a body larger than `limit` bytes, by its declared length or as it arrives."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        declared = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
        if declared.isdigit() and int(declared) > self._limit:
            await self._refuse(scope, receive, send)
            return
        received = 0
        started = False

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise TooLarge(self._sentence())
            return message

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, counted, watched)
        except TooLarge:
            if started:
                raise
            await self._refuse(scope, receive, send)

    def _sentence(self) -> str:
        return f"The body is larger than {self._limit} bytes. Send less, or raise KEYTURN_MAX_BODY_BYTES."

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        await error_response(TooLarge(self._sentence(), headers={"Connection": "close"}))(scope, receive, send)


class Pages:
    """ASGI middleware: a browser that opens `/` or `/inbox` gets the page; programs get JSON from the same addresses."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: Any = self._app
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"] in ("/", "/inbox"):
            request = Request(scope)
            if wants_page(request):
                app = page() if scope["path"] == "/inbox" else RedirectResponse("/inbox", 307)
            elif scope["path"] == "/":
                scope = {**scope, "path": "/ok", "raw_path": b"/ok"}
        await app(scope, receive, send)
