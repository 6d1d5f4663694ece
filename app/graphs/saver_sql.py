"""Statements on LangGraph's checkpoint tables that concern a whole thread or a whole run. Each is one round trip.

Parameters are psycopg's. All tables are seen at the same moment, while a run may be writing. What a channel that saves only
its updates is made of stays for as long as a checkpoint needs it: such a checkpoint counts in its metadata how many
supersteps ago the channel was saved whole.
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

_DEPTH = "coalesce((SELECT max((n->>1)::int) FROM jsonb_path_query(metadata, '$.counters_since_delta_snapshot.*') AS n), 0)"
"""How many of its ancestors a checkpoint is made of."""

_ANCESTORS = """
    UNION
    SELECT p.thread_id, p.checkpoint_ns, p.checkpoint_id, p.parent_checkpoint_id, k.depth - 1
    FROM needed k JOIN checkpoints p ON p.thread_id = k.thread_id AND p.checkpoint_ns = k.checkpoint_ns
        AND p.checkpoint_id = k.parent_checkpoint_id
    WHERE k.depth > 0
"""

_DELETE_UNWANTED = """
), gone AS (
    DELETE FROM checkpoints c USING unwanted u
    WHERE c.thread_id = u.thread_id AND c.checkpoint_ns = u.checkpoint_ns AND c.checkpoint_id = u.checkpoint_id
), w AS (
    DELETE FROM checkpoint_writes w USING unwanted u
    WHERE w.thread_id = u.thread_id AND w.checkpoint_ns = u.checkpoint_ns AND w.checkpoint_id = u.checkpoint_id
), b AS (
    DELETE FROM checkpoint_blobs b USING (
        SELECT u.thread_id, u.checkpoint_ns, v.key AS channel, v.value AS version
        FROM unwanted u, jsonb_each_text(u.versions) v
        EXCEPT
        SELECT c.thread_id, c.checkpoint_ns, v.key, v.value
        FROM checkpoints c, jsonb_each_text(c.checkpoint->'channel_versions') v
        WHERE c.thread_id IN (SELECT thread_id FROM unwanted)
            AND (c.thread_id, c.checkpoint_ns, c.checkpoint_id) NOT IN (SELECT thread_id, checkpoint_ns, checkpoint_id
                                                                        FROM unwanted)
    ) AS orphan
    WHERE b.thread_id = orphan.thread_id AND b.checkpoint_ns = orphan.checkpoint_ns
        AND b.channel = orphan.channel AND b.version = orphan.version
)
UPDATE checkpoints c SET parent_checkpoint_id = NULL FROM unwanted u
WHERE c.thread_id = u.thread_id AND c.checkpoint_ns = u.checkpoint_ns AND c.parent_checkpoint_id = u.checkpoint_id
    AND (c.thread_id, c.checkpoint_ns, c.checkpoint_id) NOT IN (SELECT thread_id, checkpoint_ns, checkpoint_id FROM unwanted)
"""
"""Delete checkpoints, their writes, the values that no other checkpoint names, and what points to them."""

PRUNE_THREADS = f"""
WITH RECURSIVE heads AS (
    SELECT DISTINCT ON (thread_id, checkpoint_ns) *
    FROM checkpoints WHERE thread_id = ANY(%(threads)s)
    ORDER BY thread_id, checkpoint_ns, checkpoint_id DESC
), ended AS (
    -- The namespace of a subgraph's call lasts as long as the checkpoint that the call began at.
    SELECT h.thread_id, h.checkpoint_ns FROM heads h
    JOIN checkpoints r ON r.thread_id = h.thread_id AND r.checkpoint_ns = '' AND r.checkpoint_id = h.metadata->'parents'->>''
    JOIN heads root ON root.thread_id = h.thread_id AND root.checkpoint_ns = '' AND root.checkpoint_id <> r.checkpoint_id
    WHERE h.checkpoint_ns LIKE '%%:%%'
), needed AS (
    SELECT thread_id, checkpoint_ns, checkpoint_id, parent_checkpoint_id, {_DEPTH} AS depth
    FROM heads WHERE (thread_id, checkpoint_ns) NOT IN (SELECT thread_id, checkpoint_ns FROM ended)
    {_ANCESTORS}
), unwanted AS (
    SELECT c.thread_id, c.checkpoint_ns, c.checkpoint_id, c.checkpoint->'channel_versions' AS versions
    FROM checkpoints c WHERE c.thread_id = ANY(%(threads)s)
        AND (c.thread_id, c.checkpoint_ns, c.checkpoint_id) NOT IN (SELECT thread_id, checkpoint_ns, checkpoint_id FROM needed)
{_DELETE_UNWANTED}"""
"""All checkpoints but the newest of each namespace, and what that is made of."""

DELETE_RUNS = f"""
WITH RECURSIVE ended AS (
    SELECT thread_id, checkpoint_ns, checkpoint_id FROM checkpoints
    WHERE metadata->>'run_id' = ANY(%(runs)s) AND (%(thread)s::text IS NULL OR thread_id = %(thread)s)
), needed AS (
    SELECT c.thread_id, c.checkpoint_ns, c.checkpoint_id, c.parent_checkpoint_id, {_DEPTH} AS depth
    FROM checkpoints c JOIN ended e ON e.thread_id = c.thread_id AND e.checkpoint_ns = c.checkpoint_ns
        AND e.checkpoint_id = c.parent_checkpoint_id
    WHERE (c.metadata->>'run_id' = ANY(%(runs)s)) IS NOT TRUE
    {_ANCESTORS}
), unwanted AS (
    SELECT c.thread_id, c.checkpoint_ns, c.checkpoint_id, c.checkpoint->'channel_versions' AS versions
    FROM checkpoints c JOIN ended USING (thread_id, checkpoint_ns, checkpoint_id)
    WHERE (c.thread_id, c.checkpoint_ns, c.checkpoint_id) NOT IN (SELECT thread_id, checkpoint_ns, checkpoint_id FROM needed)
{_DELETE_UNWANTED}"""
"""The checkpoints of some runs, but for those that checkpoints of other runs are made of."""
