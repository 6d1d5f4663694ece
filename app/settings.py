"""All settings, typed. Every one is an environment variable `KEYTURN_<NAME>`; `DATABASE_URL` is read without prefix too.

The command line only overrides fields of this class: there is no second way to configure the server.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AliasChoices, Field, SecretStr
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

LOCAL_ORIGINS = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


def is_loopback(host: str) -> bool:
    """True when a server bound to `host` can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Settings(BaseSettings):
    """Settings of one process. Times are seconds, sizes are bytes."""

    model_config = SettingsConfigDict(env_prefix="KEYTURN_", extra="ignore", populate_by_name=True)

    host: str = Field("127.0.0.1", description="Address to listen on. Beyond loopback an API key must exist.")
    port: int = Field(8123, ge=0, le=65535, description="Port to listen on.")
    data_dir: Path | None = Field(None, description="Where the embedded Postgres lives. Default: `.keyturn` in the checkout.")
    config: Path | None = Field(None, description="A `langgraph.json` whose graphs and tools are served.")
    database_url: SecretStr | None = Field(
        None,
        validation_alias=AliasChoices("KEYTURN_DATABASE_URL", "DATABASE_URL", "database_url"),
        description="Postgres to use instead of the embedded one.",
    )
    database_direct_url: SecretStr | None = Field(
        None,
        description="Postgres itself, where `DATABASE_URL` is PgBouncer in transaction mode: for LISTEN, jobs and migrations.",
    )
    database_pool_size: int = Field(20, ge=4, le=500, description="Connections of one process to Postgres.")
    examples: bool = Field(True, description="Offer the shipped example assistants.")
    default_model: str | None = Field(None, description="Model of the examples, as `provider:name`.")
    bootstrap_key: SecretStr | None = Field(None, description="An API key created at start if it is not there yet.")
    cors_origins: Annotated[list[str], NoDecode] = Field(
        default_factory=list, description="Further browser origins, comma separated; loopback is always allowed."
    )
    bare_resume: Literal["checked", "strict"] = Field(
        "checked", description="`strict` refuses every resume that does not name the interrupt it answers."
    )
    worker: bool = Field(True, description="Execute runs in the server's processes too. Off: `keyturn worker` does it.")
    workers: int = Field(1, ge=1, le=256, description="Server processes behind the port, each with pools and slots of its own.")
    health_port: int | None = Field(None, ge=0, le=65535, description="Port on which `keyturn worker` answers `GET /ok`.")
    max_concurrent_runs: int = Field(50, ge=0, le=10_000, description="Runs that this process executes at once.")
    allow_private_addresses: bool = Field(
        False, description="Let webhooks reach this machine and its private networks. Link-local addresses stay closed."
    )
    max_body_bytes: int = Field(8 * 2**20, ge=1024, description="Largest request body.")
    recursion_limit: int = Field(25, ge=1, le=1000, description="Supersteps of a run that sets no limit of its own.")
    max_recursion_limit: int = Field(200, ge=1, le=10_000, description="Highest limit that a run or an assistant may ask for.")
    lease_seconds: float = Field(30.0, gt=0, description="A run whose process gave no sign for this long is taken over.")
    max_attempts: int = Field(5, ge=1, description="Takeovers after which a run ends in an error.")
    tool_timeout: float = Field(
        300.0, ge=0, description="Seconds that a tool call of a built-in agent may take, unless its limits say so. 0: no limit."
    )
    blocked_seconds: float = Field(
        2.0, ge=0, description="Code of a graph or tool that blocks the event loop for this long ends in an error. 0: never."
    )
    shutdown_seconds: float = Field(3.0, ge=0, description="How long running steps may finish after SIGTERM.")
    redis_url: SecretStr | None = Field(
        None, description="Redis for the events of streams instead of Postgres, as `redis://host:6379/0`. It may go away."
    )
    event_retention_hours: float = Field(24.0, gt=0, description="How long the events of a run can be replayed after its end.")
    heartbeat_seconds: float = Field(5.0, gt=0, description="Interval of the keep-alive comment in streams.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")
    log_format: Literal["auto", "json", "text"] = Field("auto", description="`auto` is text on a terminal, JSON elsewhere.")

    def __init__(self, **values: object) -> None:
        if isinstance(origins := values.get("cors_origins"), str):
            values["cors_origins"] = [o.strip() for o in origins.split(",") if o.strip()]
        super().__init__(**values)  # type: ignore[arg-type]

    def direct_url(self, url: str) -> str:
        """Where a session of one's own is to be had: `url`, unless that is a pooler's."""
        return self.database_direct_url.get_secret_value() if self.database_direct_url is not None else url

    @property
    def loopback_only(self) -> bool:
        """Whether the configured address can only be reached from this machine."""
        return is_loopback(self.host)
