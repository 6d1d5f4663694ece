"""Alembic's environment: our tables only, one transaction a revision, and short waits for locks."""

from __future__ import annotations

import os
from typing import Any

from alembic import context
from sqlalchemy import create_engine, pool, text

import app.assistants.models
import app.auth
import app.inbox.models
import app.runs.models
import app.streaming.models
import app.threads.models
import app.webhooks.models  # noqa: F401 (registers the tables)
from app.db.base import Base
from app.db.engine import sqlalchemy_url

# A migration that cannot get its lock gives up, so that it never queues the whole application behind itself.
TIMEOUTS = ("SET lock_timeout = '10s'", "SET statement_timeout = '5min'")


def ours(_object: Any, name: str | None, kind: str, _reflected: bool, _compare_to: Any) -> bool:
    """LangGraph and Procrastinate bring and migrate tables of their own."""
    return kind != "table" or name in Base.metadata.tables


def run() -> None:
    url = context.config.attributes.get("url") or os.environ["DATABASE_URL"]
    engine = create_engine(sqlalchemy_url(url), poolclass=pool.NullPool)
    with engine.connect() as connection:
        for timeout in TIMEOUTS:
            connection.execute(text(timeout))
        connection.commit()
        context.configure(
            connection=connection,
            target_metadata=Base.metadata,
            include_object=ours,
            transaction_per_migration=True,
            compare_type=True,
        )
        with context.begin_transaction():
            context.run_migrations()
    engine.dispose()


run()
