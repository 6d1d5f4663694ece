"""first tables"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from app.db.base import XID8

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("key_hash", sa.LargeBinary(), nullable=False),
        sa.Column("scopes", postgresql.ARRAY(sa.TEXT()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("key_hash", name=op.f("uq_api_keys_key_hash")),
    )
    op.create_table(
        "assistants",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("graph_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=True),
        sa.Column("config", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("context", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("metadata", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_assistants")),
    )
    op.create_index(
        op.f("ix_assistants_tenant_id_created_at_id"), "assistants", ["tenant_id", "created_at", "id"], unique=False
    )
    op.create_index(op.f("ix_assistants_tenant_id_name"), "assistants", ["tenant_id", "name"], unique=False)
    op.create_table(
        "effect_permits",
        sa.Column("thread_id", sa.Uuid(), nullable=False),
        sa.Column("message_id", sa.Text(), nullable=False),
        sa.Column("call_index", sa.Integer(), nullable=False),
        sa.Column("args_hash", sa.Text(), nullable=False),
        sa.Column("item_id", sa.Uuid(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("spent_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("spent_run_id", sa.Uuid(), nullable=True),
        sa.Column("spent_epoch", sa.Integer(), nullable=True),
        sa.Column("receipt", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("thread_id", "message_id", "call_index", name=op.f("pk_effect_permits")),
    )
    op.create_table(
        "inbox_decisions",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("item_id", sa.Uuid(), nullable=False),
        sa.Column("item_version", sa.Integer(), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("via", sa.Text(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("args_hash", sa.Text(), nullable=True),
        sa.Column("detail", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_inbox_decisions")),
    )
    op.create_index(
        op.f("ix_inbox_decisions_tenant_id_item_id_id"), "inbox_decisions", ["tenant_id", "item_id", "id"], unique=False
    )
    op.create_table(
        "inbox_events",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("xid", XID8(), server_default=sa.text("pg_current_xact_id()"), nullable=False),
        sa.Column("item_id", sa.Uuid(), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("data", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_inbox_events")),
    )
    op.create_index(op.f("ix_inbox_events_tenant_id_xid_id"), "inbox_events", ["tenant_id", "xid", "id"], unique=False)
    op.create_index("ix_inbox_events_feed", "inbox_events", ["xid", "id"], unique=False)
    op.create_table(
        "inbox_items",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("thread_id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=True),
        sa.Column("copied_from", sa.Uuid(), nullable=True),
        sa.Column("assistant_id", sa.Uuid(), nullable=False),
        sa.Column("assistant_version", sa.Integer(), nullable=False),
        sa.Column("graph_id", sa.Text(), nullable=False),
        sa.Column("interrupt_id", sa.Text(), nullable=False),
        sa.Column("value_hash", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=True),
        sa.Column("path", postgresql.ARRAY(sa.TEXT()), server_default=sa.text("'{}'::text[]"), nullable=False),
        sa.Column("message_id", sa.Text(), nullable=True),
        sa.Column("call_index", sa.Integer(), nullable=True),
        sa.Column("tool_call_id", sa.Text(), nullable=True),
        sa.Column("tool", sa.Text(), nullable=True),
        sa.Column("action_request", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("config", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("description", sa.Text(), nullable=True),
        sa.Column("value", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("args_schema", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("args_hash", sa.Text(), nullable=True),
        sa.Column("bound", sa.Boolean(), nullable=False),
        sa.Column("seen_by", postgresql.ARRAY(sa.TEXT()), server_default=sa.text("'{}'::text[]"), nullable=False),
        sa.Column("decision", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("outcome", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("resume_run_id", sa.Uuid(), nullable=True),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("idempotency_hash", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("decided_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("settled_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_inbox_items")),
    )
    op.create_index("ix_inbox_items_interrupt", "inbox_items", ["interrupt_id"], unique=False)
    op.create_index("ix_inbox_items_list", "inbox_items", ["tenant_id", "status", "created_at", "id"], unique=False)
    op.create_index("ix_inbox_items_thread", "inbox_items", ["thread_id"], unique=False)
    op.create_index(
        "uq_inbox_items_open",
        "inbox_items",
        ["thread_id", "interrupt_id", "value_hash"],
        unique=True,
        postgresql_where=sa.text("status in ('pending', 'decided', 'resuming')"),
    )
    op.create_table(
        "run_events",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "epoch", "seq", name=op.f("pk_run_events")),
    )
    op.create_index(op.f("ix_run_events_created_at"), "run_events", ["created_at"], unique=False, postgresql_using="brin")
    op.create_table(
        "threads",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("metadata", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.Column("config", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.Column("values", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("interrupts", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("error", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("graph_id", sa.Text(), nullable=True),
        sa.Column("assistant_id", sa.Uuid(), nullable=True),
        sa.Column("assistant_version", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("state_updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_threads")),
    )
    op.create_index(
        "ix_threads_metadata",
        "threads",
        ["metadata"],
        unique=False,
        postgresql_using="gin",
        postgresql_ops={"metadata": "jsonb_path_ops"},
    )
    op.create_index(op.f("ix_threads_tenant_id_updated_at_id"), "threads", ["tenant_id", "updated_at", "id"], unique=False)
    op.create_table(
        "assistant_versions",
        sa.Column("assistant_id", sa.Uuid(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("graph_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=True),
        sa.Column("config", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("context", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("metadata", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["assistant_id"], ["assistants.id"], name=op.f("fk_assistant_versions_assistant_id_assistants"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("assistant_id", "version", name=op.f("pk_assistant_versions")),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("thread_id", sa.Uuid(), nullable=False),
        sa.Column("assistant_id", sa.Uuid(), nullable=False),
        sa.Column("assistant_version", sa.Integer(), nullable=False),
        sa.Column("graph_id", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("stop_reason", sa.Text(), nullable=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("kwargs", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.Column("metadata", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.Column("multitask_strategy", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cancel", sa.Text(), nullable=True),
        sa.Column("waiting_for", sa.Text(), nullable=True),
        sa.Column("base_checkpoint_id", sa.Text(), nullable=True),
        sa.Column("error", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["thread_id"], ["threads.id"], name=op.f("fk_runs_thread_id_threads"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
    )
    op.create_index("ix_runs_lease", "runs", ["lease_until"], unique=False, postgresql_where=sa.text("status = 'running'"))
    op.create_index(
        "ix_runs_pending",
        "runs",
        ["thread_id", "created_at", "id"],
        unique=False,
        postgresql_where=sa.text("status = 'pending'"),
    )
    op.create_index("ix_runs_thread", "runs", ["thread_id", "created_at"], unique=False)
    op.create_index(
        "uq_runs_running_thread", "runs", ["thread_id"], unique=True, postgresql_where=sa.text("status = 'running'")
    )
    # The audit is append-only for everybody, whatever the code says.
    op.execute(
        """
        CREATE FUNCTION keyturn_append_only() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION 'the table % is append-only', TG_TABLE_NAME; END $$
        """
    )
    op.execute(
        """
        CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON inbox_decisions
        FOR EACH ROW EXECUTE FUNCTION keyturn_append_only()
        """
    )


def downgrade() -> None:
    for table in (
        "runs",
        "assistant_versions",
        "threads",
        "run_events",
        "inbox_items",
        "inbox_events",
        "inbox_decisions",
        "effect_permits",
        "assistants",
        "api_keys",
    ):
        op.drop_table(table)
    op.execute("DROP FUNCTION keyturn_append_only()")
