"""The busiest routes, without the framework's way to them: routing, dependencies and validation cost more than the work.

The routes themselves are those of the routers, documented there. Only what is plainly in order is answered here: whatever is
not (another content type, a body that does not fit, a missing key or scope) goes on to the framework, which says what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.auth import Principal, identify
from app.errors import AppError
from app.runs.router import service as runs_of
from app.runs.router import stream_run, wait_run
from app.runs.schemas import RunCreate
from app.threads.router import create as create_thread
from app.threads.router import service as threads_of
from app.threads.schemas import ThreadCreate
from app.threads.states import ThreadStates

Call = Callable[[Request, Principal, tuple[str, ...], Any], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Hot:
    """A POST route: its path, by the router's template too, the scope that it needs, its body, and how it is called."""

    path: re.Pattern[str]
    template: str
    scope: str
    body: type[BaseModel]
    call: Call


async def _threads(request: Request, principal: Principal, _: tuple[str, ...], body: Any) -> Response:
    return await create_thread(ThreadStates(await threads_of(request)), principal, body)


async def _stream(request: Request, principal: Principal, path: tuple[str, ...], body: Any) -> Response:
    return await stream_run(UUID(path[0]), body, await runs_of(request), principal)


async def _wait(request: Request, principal: Principal, path: tuple[str, ...], body: Any) -> Response:
    return await wait_run(UUID(path[0]), body, await runs_of(request), principal)


ID = "([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})"
HOT = (
    Hot(re.compile("/threads"), "/threads", "threads:write", ThreadCreate, _threads),
    Hot(re.compile(f"/threads/{ID}/runs/stream"), "/threads/{thread_id}/runs/stream", "runs:write", RunCreate, _stream),
    Hot(re.compile(f"/threads/{ID}/runs/wait"), "/threads/{thread_id}/runs/wait", "runs:write", RunCreate, _wait),
)


class HotRoutes:
    """ASGI middleware in front of the framework's router."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = _find(scope) if scope["type"] == "http" and scope["method"] == "POST" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        hot, path = found
        scope["keyturn.route"] = hot.template  # what the router would have told in `route`
        replay = _Replay(receive)
        response = await self._answer(hot, path, scope, replay)
        if response is None:
            replay.rewind()
            await self._app(scope, replay, send)
        else:
            await response(scope, replay, send)

    async def _answer(self, hot: Hot, path: tuple[str, ...], scope: Scope, replay: _Replay) -> Response | None:
        """The response; None where the framework should have its say."""
        request = Request(scope)
        try:
            body = hot.body.model_validate(orjson.loads(await replay.body()))
            principal = await identify(request)
        except (orjson.JSONDecodeError, ValidationError, AppError):
            return None
        if not principal.can(hot.scope):
            return None
        try:
            return await hot.call(request, principal, path, body)
        except Exception as error:
            for kind in type(error).__mro__:
                if (handler := request.app.exception_handlers.get(kind)) is not None:
                    answer: Response = await handler(request, error)
                    return answer
            raise


def _find(scope: Scope) -> tuple[Hot, tuple[str, ...]] | None:
    if not any(name == b"content-type" and value.startswith(b"application/json") for name, value in scope["headers"]):
        return None
    for hot in HOT:
        if (match := hot.path.fullmatch(scope["path"])) is not None:
            return hot, match.groups()
    return None


class _Replay:
    """A request's messages, which can be received again from the first one."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._seen: list[Message] = []
        self._again: list[Message] = []

    async def __call__(self) -> Message:
        return self._again.pop(0) if self._again else await self._receive()

    async def body(self) -> bytes:
        """The whole body."""
        while True:
            message = await self._receive()
            self._seen.append(message)
            if message["type"] != "http.request" or not message.get("more_body"):
                return b"".join(m.get("body", b"") for m in self._seen)

    def rewind(self) -> None:
        """From here on, receive what was received already."""
        self._again = self._seen
