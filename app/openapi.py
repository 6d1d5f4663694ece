"""The one error body in OpenAPI, and the statuses that a route can answer with."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

REASONS = {
    400: "The request makes no sense as a whole.",
    401: "No API key, or one that is not known.",
    403: "The API key lacks the scope, or the thing is not yours to change.",
    404: "It does not exist, or belongs to somebody else.",
    409: "The present state of things speaks against it.",
    410: "It was there, and will not come back.",
    412: "`If-Match` names an older version.",
    413: "The body is larger than this server takes.",
    422: "A field is wrong; `errors` names each.",
    428: "This server demands `If-Match`.",
    503: "The database is away, or the server is stopping.",
}

ALWAYS = (401, 403, 422, 503)
"""Every route is authenticated, scoped and validated, and needs the database."""


class FieldErrorBody(BaseModel):
    """One wrong field."""

    path: str = Field(examples=["config.configurable.model"])
    message: str


class ErrorBody(BaseModel):
    """The body of every error. `detail` repeats `message` for LangGraph's clients."""

    model_config = ConfigDict(
        title="Error",
        json_schema_extra={
            "examples": [
                {
                    "code": "thread_not_found",
                    "message": "Thread 0190a8f0-3c1e-7d2a-9a51-6f0c2a9b1e44 does not exist.",
                    "detail": "Thread 0190a8f0-3c1e-7d2a-9a51-6f0c2a9b1e44 does not exist.",
                    "request_id": "0190a8f0-3c1e-7d2a-9a51-000000000000",
                }
            ]
        },
    )

    code: str = Field(description="Stable, for programs.")
    message: str = Field(description="One sentence, for people.")
    detail: str = Field(description="The same sentence.")
    request_id: str | None = None
    errors: list[FieldErrorBody] | None = Field(None, description="With 422: what is wrong with which field.")


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses=` of a route: the given error statuses and those that every route has."""
    return {s: {"model": ErrorBody, "description": REASONS[s]} for s in sorted({*ALWAYS, *statuses})}
