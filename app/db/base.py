"""Declarative base, constraint names and column types that all tables share."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from sqlalchemy import DateTime, MetaData, Text, func, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import UserDefinedType
from uuid_utils.compat import uuid7

# Named constraints make migrations the same on every machine.
NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}

Json = Annotated[dict[str, Any], mapped_column(JSONB)]
Timestamp = Annotated[datetime, mapped_column(DateTime(timezone=True), server_default=func.now())]
MaybeTimestamp = Annotated[datetime | None, mapped_column(DateTime(timezone=True))]
Uuid7 = Annotated[UUID, mapped_column(primary_key=True, default=uuid7)]


class XID8(UserDefinedType[int]):
    """Postgres' 64-bit transaction id."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "xid8"


class Base(DeclarativeBase):
    """Base of all our tables. Strings are `text`; a JSON column is `jsonb`."""

    metadata = MetaData(naming_convention=NAMES)
    type_annotation_map = {str: Text(), dict[str, Any]: JSONB, list[Any]: JSONB}  # noqa: RUF012 (SQLAlchemy's own form)


class Owned:
    """A row that belongs to a tenant. Select these through `auth.owned()` only."""

    tenant_id: Mapped[str] = mapped_column(Text)


EMPTY_OBJECT = text("'{}'::jsonb")
EMPTY_LIST = text("'{}'::text[]")
