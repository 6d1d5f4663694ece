"""Who is asking: API keys, the Principal they stand for, and the two helpers that every route and select uses.

The tenant comes from the credential, never from a body or a path. Another owner's row does not exist.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeVar
from uuid import UUID

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyHeader, HTTPBearer
from sqlalchemy import DateTime, LargeBinary, Select, func, select, text
from sqlalchemy.dialects.postgresql import ARRAY, TEXT
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, MaybeTimestamp, Owned, Timestamp, Uuid7
from app.db.engine import Database
from app.errors import Forbidden, Invalid, Unauthenticated
from app.settings import LOCAL_ORIGINS, Settings, is_loopback

SCOPES = frozenset(
    {
        "assistants:read",
        "assistants:write",
        "threads:read",
        "threads:write",
        "threads:repair",
        "runs:read",
        "runs:write",
        "inbox:read",
        "inbox:decide",
        "store:read",
        "store:write",
        "users:any",
    }
)
"""`threads:repair` may write state under a gate; `users:any` may act for any `user_id`."""

DEFAULT_TENANT = "default"
KEYS_CHANNEL = "keyturn_keys"
CACHE_SECONDS = 5.0

M = TypeVar("M", bound=Owned)


class ApiKey(Owned, Base):
    """An API key. Only its SHA-256 is kept: the key has 256 random bits, so nothing slower is needed."""

    __tablename__ = "api_keys"

    id: Mapped[Uuid7]
    subject: Mapped[str]
    name: Mapped[str]
    prefix: Mapped[str]
    key_hash: Mapped[bytes] = mapped_column(LargeBinary, unique=True)
    scopes: Mapped[list[str]] = mapped_column(ARRAY(TEXT))
    created_at: Mapped[Timestamp]
    expires_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    revoked_at: Mapped[MaybeTimestamp]


@dataclass(frozen=True, slots=True)
class Principal:
    """Who acts (`subject`), for whom (`tenant`), and what they may do."""

    tenant: str
    subject: str
    scopes: frozenset[str] = field(default_factory=frozenset)

    def can(self, scope: str) -> bool:
        """Whether this principal has the scope."""
        return scope in self.scopes


LOCAL = Principal(DEFAULT_TENANT, "local", SCOPES)


def owned(model: type[M], principal: Principal) -> Select[M]:
    """The select that every read of a tenant's rows starts from."""
    return select(model).where(model.tenant_id == principal.tenant)


def hash_key(key: str) -> bytes:
    """What is stored of a key."""
    return hashlib.sha256(key.encode()).digest()


async def create_key(
    tx: AsyncSession,
    *,
    tenant: str = DEFAULT_TENANT,
    subject: str,
    name: str = "",
    scopes: Iterable[str] = SCOPES,
    expires_in: timedelta | None = None,
    key: str | None = None,
) -> tuple[ApiKey, str]:
    """Store a new key and return it with its text, which cannot be read again. `key` is given only for a bootstrap key."""
    wanted = sorted(set(scopes))
    if unknown := set(wanted) - SCOPES:
        raise Invalid.field("scopes", f"unknown: {', '.join(sorted(unknown))}. Known: {', '.join(sorted(SCOPES))}")
    if key is not None and len(key) < 16:
        raise Invalid.field("key", "a key needs at least 16 characters")
    key = key or f"kt_{secrets.token_urlsafe(32)}"
    row = ApiKey(
        tenant_id=tenant,
        subject=subject,
        name=name,
        prefix=key[:7],
        key_hash=hash_key(key),
        scopes=wanted,
        expires_at=datetime.now(UTC) + expires_in if expires_in else None,
    )
    tx.add(row)
    await tx.flush()
    await notify_keys(tx)
    return row, key


async def list_keys(tx: AsyncSession) -> list[ApiKey]:
    """All keys, oldest first. The keys themselves are not stored and so cannot be listed."""
    return list((await tx.execute(select(ApiKey).order_by(ApiKey.created_at, ApiKey.id))).scalars())


async def revoke_key(tx: AsyncSession, key_id: UUID) -> bool:
    """Revoke a key at once, on every process. Returns whether there was one to revoke."""
    row = await tx.get(ApiKey, key_id)
    if row is None or row.revoked_at is not None:
        return False
    row.revoked_at = datetime.now(UTC)
    await notify_keys(tx)
    return True


async def ensure_bootstrap_key(tx: AsyncSession, key: str) -> None:
    """Make `KEYTURN_BOOTSTRAP_KEY` valid. Several processes may do this at once."""
    await tx.execute(text("SELECT pg_advisory_xact_lock(hashtext('keyturn-bootstrap-key'))"))
    if await tx.scalar(select(ApiKey.id).where(ApiKey.key_hash == hash_key(key))) is None:
        await create_key(tx, subject="bootstrap", name="KEYTURN_BOOTSTRAP_KEY", key=key)


async def any_key(tx: AsyncSession) -> bool:
    """Whether a key was ever made. A revoked or expired key still counts, or revoking the last one would open the door."""
    return await tx.scalar(select(ApiKey.id).limit(1)) is not None


async def notify_keys(tx: AsyncSession) -> None:
    """Tell every process to forget what it knows of keys. In the transaction itself: keys change seldom, and at once."""
    await tx.execute(select(func.pg_notify(KEYS_CHANNEL, "")))


class Authenticator:
    """Turns credentials into principals. Remembers answers for a few seconds; a change of keys clears them at once."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings = settings
        self._database = database
        self._known: dict[bytes, tuple[float, Principal | None]] = {}
        self._closed = False  # a key exists: once seen, anonymous access never comes back in this process
        self._checked = 0.0
        origins = [LOCAL_ORIGINS, *(re.escape(o) for o in settings.cors_origins)]
        self._origins = re.compile("|".join(f"(?:{o})" for o in origins))

    def forget(self, _: str | None = None) -> None:
        """Look everything up again. Callback of the listener."""
        self._known.clear()
        self._checked = 0.0

    async def identify(self, request: Request, key: str | None) -> Principal:
        """The principal of a request, or Unauthenticated."""
        if not await self.closed():
            self._refuse_foreign_pages(request)
            return LOCAL
        if not key:
            raise Unauthenticated("This server needs an API key. Send it as X-Api-Key.", headers={"WWW-Authenticate": "Bearer"})
        hashed = hash_key(key)
        now = time.monotonic()
        until, principal = self._known.get(hashed, (0.0, None))
        if now >= until:
            principal = await self._look_up(hashed)
            if len(self._known) > 10_000:
                self._known.clear()
            self._known[hashed] = (now + CACHE_SECONDS, principal)
        if principal is None:
            raise Unauthenticated(
                "The API key is unknown, revoked or expired. Make one with `keyturn keys create`.",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return principal

    async def closed(self) -> bool:
        """Whether a key is needed: always beyond loopback, and as soon as one exists."""
        if self._closed or not self._settings.loopback_only:
            return True
        if time.monotonic() >= self._checked:
            async with self._database.transaction() as tx:
                self._closed = await any_key(tx)
            self._checked = time.monotonic() + CACHE_SECONDS
        return self._closed

    async def _look_up(self, hashed: bytes) -> Principal | None:
        async with self._database.transaction() as tx:
            row = await tx.scalar(select(ApiKey).where(ApiKey.key_hash == hashed))
        if row is None or row.revoked_at is not None or (row.expires_at and row.expires_at <= datetime.now(UTC)):
            return None
        return Principal(row.tenant_id, row.subject, frozenset(row.scopes))

    def _refuse_foreign_pages(self, request: Request) -> None:
        """Without keys, a page from elsewhere must not reach the server through the user's browser.

        A foreign `Host` is DNS rebinding, a foreign `Origin` is a cross-site request.
        """
        host = request.headers.get("host", "")
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if host and not is_loopback(name):
            raise Forbidden(
                f"The host {name} is not this machine. Create an API key to serve other names.", code="foreign_host"
            )
        origin = request.headers.get("origin")
        if origin and not self._origins.fullmatch(origin):
            raise Forbidden(f"The origin {origin} is not allowed. Add it to KEYTURN_CORS_ORIGINS.", code="foreign_origin")


_header = APIKeyHeader(name="X-Api-Key", auto_error=False, description="An API key made by `keyturn keys create`.")
_bearer = HTTPBearer(auto_error=False, description="The same key as a bearer token.")


async def identify(request: Request) -> Principal:
    """The principal of this request, looked up once."""
    known: Principal | None = getattr(request.state, "principal", None)
    if known is None:
        key = request.headers.get("x-api-key")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        authenticator: Authenticator = request.app.state.authenticator
        known = await authenticator.identify(request, key or (token.strip() if scheme.lower() == "bearer" else None))
        request.state.principal = known
    return known


class _Require:
    """Dependency that checks one scope. Its `scope` is read by the test that walks all routes."""

    def __init__(self, scope: str) -> None:
        self.scope = scope

    async def __call__(
        self, request: Request, _key: Annotated[Any, Security(_header)] = None, _token: Annotated[Any, Security(_bearer)] = None
    ) -> Principal:
        principal = await identify(request)
        if not principal.can(self.scope):
            raise Forbidden(f"The API key lacks the scope {self.scope}.", code="missing_scope", scope=self.scope)
        return principal


def require(scope: str) -> Any:
    """Dependency: the principal of the request, who must have `scope`. Declared in the signature of each route."""
    assert scope in SCOPES, scope
    return Depends(_Require(scope))
