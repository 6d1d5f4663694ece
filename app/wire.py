"""What the routes in LangGraph's shapes share: tolerant request bodies, JSON replies, paging headers."""

from __future__ import annotations

from typing import Any, TypeVar

import orjson
from fastapi import Response
from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from app.codec import clean, dumps

T = TypeVar("T")


def _unstorable() -> PydanticCustomError:
    return PydanticCustomError("not_storable", "an integer is too large, or the nesting is too deep")


def storable(data: T) -> T:
    """The same data; refused if it is JSON that neither Postgres nor we could write again."""
    try:
        orjson.dumps(data, default=lambda _: None)
    except TypeError as error:
        raise _unstorable() from error
    return data


def received(data: Any) -> Any:
    """A body as it is used: without NUL and lone surrogates, and refused if it cannot be stored."""
    try:
        return storable(clean(data))
    except RecursionError as error:
        raise _unstorable() from error


class WireModel(BaseModel):
    """Body of a LangGraph route. Fields that this server does not know are ignored: newer clients send more.

    NUL and lone surrogates, which Postgres refuses, are removed before anything else looks at the body; what cannot be
    stored at all is refused.
    """

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _clean(cls, data: Any) -> Any:
        return received(data)


def reply(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response in the one encoding that streams use too."""
    return Response(dumps(value), status_code=status, headers=headers, media_type="application/json")


def page_headers(total: int, offset: int, count: int) -> dict[str, str]:
    """`X-Pagination-Total` is the number of all matches; `X-Pagination-Next` is the next offset, if there is more."""
    headers = {"X-Pagination-Total": str(total)}
    if offset + count < total:
        headers["X-Pagination-Next"] = str(offset + count)
    return headers
