"""Statements on LangGraph's checkpoint tables that concern a whole thread or a whole run. Each is one round trip.

Parameters are psycopg's. All tables are seen at the same moment, while a run may be writing.
"""

COPY_THREAD = """
WITH c AS (
    INSERT INTO checkpoints (thread_id, checkpoint_ns, checkpoint_id, parent_checkpoint_id, type, checkpoint, metadata)
    SELECT %(target)s, checkpoint_ns, checkpoint_id, parent_checkpoint_id, type, checkpoint,
           CASE WHEN metadata ? 'thread_id' THEN metadata || jsonb_build_object('thread_id', %(target)s::text)
                ELSE metadata END
    FROM checkpoints WHERE thread_id = %(source)s
), b AS (
    INSERT INTO checkpoint_blobs (thread_id, checkpoint_ns, channel, version, type, blob)
    SELECT %(target)s, checkpoint_ns, channel, version, type, blob FROM checkpoint_blobs WHERE thread_id = %(source)s
)
INSERT INTO checkpoint_writes (thread_id, checkpoint_ns, checkpoint_id, task_id, task_path, idx, channel, type, blob)
SELECT %(target)s, checkpoint_ns, checkpoint_id, task_id, task_path, idx, channel, type, blob
FROM checkpoint_writes WHERE thread_id = %(source)s
"""

DELETE_THREAD = """
WITH c AS (DELETE FROM checkpoints WHERE thread_id = %(thread)s),
     b AS (DELETE FROM checkpoint_blobs WHERE thread_id = %(thread)s)
DELETE FROM checkpoint_writes WHERE thread_id = %(thread)s
"""

DELETE_RUNS = """
WITH gone AS (
    DELETE FROM checkpoints
    WHERE metadata->>'run_id' = ANY(%(runs)s) AND (%(thread)s::text IS NULL OR thread_id = %(thread)s)
    RETURNING thread_id, checkpoint_ns, checkpoint_id, checkpoint->'channel_versions' AS versions
), w AS (
    DELETE FROM checkpoint_writes w USING gone g
    WHERE w.thread_id = g.thread_id AND w.checkpoint_ns = g.checkpoint_ns AND w.checkpoint_id = g.checkpoint_id
)
DELETE FROM checkpoint_blobs b USING (
    SELECT g.thread_id, g.checkpoint_ns, v.key AS channel, v.value AS version
    FROM gone g, jsonb_each_text(g.versions) v
    EXCEPT
    SELECT c.thread_id, c.checkpoint_ns, v.key, v.value
    FROM checkpoints c, jsonb_each_text(c.checkpoint->'channel_versions') v
    WHERE c.thread_id IN (SELECT thread_id FROM gone) AND (c.metadata->>'run_id' = ANY(%(runs)s)) IS NOT TRUE
) AS orphan
WHERE b.thread_id = orphan.thread_id AND b.checkpoint_ns = orphan.checkpoint_ns
  AND b.channel = orphan.channel AND b.version = orphan.version
"""
"""The checkpoints of some runs, with their writes, and the values that no other checkpoint names."""
