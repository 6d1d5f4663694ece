"""The edge of the application, one ASGI middleware: request ids, the body limit, pages for browsers, the last resort."""

from __future__ import annotations

import re
from contextvars import ContextVar

import structlog
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uuid_utils.compat import uuid7

from app.codec import dumps
from app.dashboard.router import page, wants_page
from app.errors import AppError, Internal, TooLarge

log = structlog.get_logger(__name__)

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
SAFE_ID = re.compile(rb"[A-Za-z0-9._\-]{1,128}")


def error_response(error: AppError) -> Response:
    """The one error body."""
    return Response(
        dumps(error.body(request_id.get())), status_code=error.status, headers=error.headers, media_type="application/json"
    )


class Edge:
    """Wraps the application.

    Every response carries its request's id (`X-Request-Id`, the client's if it sent one). A body of more than `limit` bytes
    is refused, by its declared length or as it arrives. A browser that opens `/` or `/inbox` gets the page, a program JSON.
    What nobody foresaw is logged whole and answered with the request id alone.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        id_ = _id_of(scope)
        request_id.set(id_)  # uvicorn runs each request in a context of its own
        body = _Body(receive, self._limit)
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                if body.too_large:  # whatever the framework made of it, the client is told what it was
                    body.too_large = False
                    raise _BodyTooLarge
                started = True
                MutableHeaders(scope=message).append("X-Request-Id", id_)
            await send(message)

        try:
            if body.declared(scope) > self._limit:
                raise _BodyTooLarge
            app, scope = self._target(scope)
            await app(scope, body, watched)
        except _BodyTooLarge:
            await error_response(self._too_large())(scope, receive, watched)
        except Exception as error:
            log.error("request_failed", method=scope["method"], path=scope["path"], request_id=id_, exc_info=error)
            if not started:
                await error_response(Internal())(scope, receive, watched)

    def _target(self, scope: Scope) -> tuple[ASGIApp, Scope]:
        """Who answers: the application, or a page."""
        if scope["method"] == "GET" and scope["path"] in ("/", "/inbox"):
            if wants_page(Request(scope)):
                return (page() if scope["path"] == "/inbox" else RedirectResponse("/inbox", 307)), scope
            if scope["path"] == "/":
                return self._app, {**scope, "path": "/ok", "raw_path": b"/ok"}
        return self._app, scope

    def _too_large(self) -> TooLarge:
        return TooLarge(
            f"The body is larger than {self._limit} bytes. Send less, or raise KEYTURN_MAX_BODY_BYTES.",
            headers={"Connection": "close"},
        )


class _BodyTooLarge(Exception):
    """Not one of the errors that the application handles: it has to reach the edge."""


class _Body:
    """A request's body, up to a limit of bytes."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._left = limit
        self.too_large = False

    @staticmethod
    def declared(scope: Scope) -> int:
        """The length that the client announces; 0 if it does not."""
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        return int(length) if length.isdigit() else 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            self.too_large = True
            raise ClientDisconnect
        return message


def _id_of(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and SAFE_ID.fullmatch(value):
            return str(value, "ascii")
    return str(uuid7())
