"""The errors a client can see, and the one body that all of them have.

AppError
├── BadRequest 400        the request makes no sense as a whole
├── Unauthenticated 401   no key, or one that is not known
├── Forbidden 403         the key lacks a scope
├── NotFound 404          not there, or another owner's
├── Conflict 409          the state of things speaks against it
├── Gone 410              it was there, and will not come back
├── PreconditionFailed 412  `If-Match` names an older version
├── TooLarge 413          the body is larger than allowed
├── Invalid 422           a field is wrong; `errors` names each
├── PreconditionRequired 428  the deployment demands `If-Match`
├── Internal 500          our fault; the body says only the request id
└── Unavailable 503       the database is away, or the server is stopping

The body is `{code, message, detail, request_id}`; `detail` repeats the message for LangGraph clients. Further keys
(`errors`, `item`, `items`, ...) come from the error. Services raise these; only `main.py` turns them into responses.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypedDict


class FieldError(TypedDict):
    """One wrong field. `path` is dotted, as in `config.configurable.model`."""

    path: str
    message: str


class AppError(Exception):
    """Base of every error that has a status. The message is one sentence that says what to do next."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, code: str | None = None, headers: dict[str, str] | None = None, **extra: Any) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
        self.headers = headers or {}
        self.extra = extra

    def body(self, request_id: str | None) -> dict[str, Any]:
        """The JSON body of the response."""
        return {"code": self.code, "message": self.message, "detail": self.message, "request_id": request_id, **self.extra}


class BadRequest(AppError):
    status, code = 400, "bad_request"


class Unauthenticated(AppError):
    status, code = 401, "unauthenticated"


class Forbidden(AppError):
    status, code = 403, "forbidden"


class NotFound(AppError):
    status, code = 404, "not_found"

    @classmethod
    def of(cls, kind: str, id_: object) -> NotFound:
        """The usual sentence for a thing that is not there (or belongs to another tenant)."""
        return cls(f"{kind} {id_} does not exist.", code=f"{kind.lower().replace(' ', '_')}_not_found")


class Conflict(AppError):
    status, code = 409, "conflict"


class Gone(AppError):
    status, code = 410, "gone"


class PreconditionFailed(AppError):
    status, code = 412, "stale_version"


class TooLarge(AppError):
    status, code = 413, "too_large"


class Invalid(AppError):
    status, code = 422, "invalid"

    def __init__(self, message: str, *, errors: Iterable[FieldError] = (), code: str | None = None, **extra: Any) -> None:
        super().__init__(message, code=code, errors=list(errors), **extra)

    @classmethod
    def field(cls, path: str, message: str, *, code: str | None = None) -> Invalid:
        """The error for a single wrong field."""
        return cls(f"{path}: {message}", errors=[{"path": path, "message": message}], code=code)


class PreconditionRequired(AppError):
    status, code = 428, "precondition_required"


class Internal(AppError):
    status, code = 500, "internal_error"

    def __init__(self) -> None:
        super().__init__("Internal error. Give the request id to whoever runs this server.")


class Unavailable(AppError):
    status, code = 503, "unavailable"
