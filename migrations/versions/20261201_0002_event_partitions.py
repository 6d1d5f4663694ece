"""events by partition, and what a run finds at its start

`run_events` is partitioned by the run's id, which is a UUIDv7 and so has the time of the run in front: events of old runs go
by dropping a partition. `run_base_writes` keeps what had been written to the checkpoint that a run goes on from, so that the
run can be rolled back.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.rename_table("run_events", "run_events_before")
    op.execute("ALTER INDEX pk_run_events RENAME TO pk_run_events_before")
    op.execute("DROP INDEX ix_run_events_created_at")
    op.create_table("run_events", *columns(), postgresql_partition_by="RANGE (run_id)")
    op.execute("CREATE TABLE run_events_rest PARTITION OF run_events DEFAULT")
    op.execute("""
        INSERT INTO run_events SELECT e.* FROM run_events_before e JOIN runs r ON r.id = e.run_id
        WHERE r.finished_at IS NULL OR r.finished_at > now() - interval '1 day'
    """)
    op.drop_table("run_events_before")
    op.create_table(
        "run_base_writes",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("checkpoint_ns", sa.Text(), nullable=False),
        sa.Column("checkpoint_id", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("idx", sa.Integer(), nullable=False),
        sa.Column("task_path", sa.Text(), nullable=False),
        sa.Column("channel", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=True),
        sa.Column("blob", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_run_base_writes_run_id_runs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "checkpoint_ns", "checkpoint_id", "task_id", "idx", name="pk_run_base_writes"),
    )


def downgrade() -> None:
    op.drop_table("run_base_writes")
    op.rename_table("run_events", "run_events_parts")
    op.execute("ALTER INDEX pk_run_events RENAME TO pk_run_events_parts")
    op.create_table("run_events", *columns())
    op.create_index("ix_run_events_created_at", "run_events", ["created_at"], postgresql_using="brin")
    op.execute("INSERT INTO run_events SELECT * FROM run_events_parts")
    op.drop_table("run_events_parts")


def columns() -> list[sa.schema.SchemaItem]:
    return [
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "epoch", "seq", name="pk_run_events"),
    ]
