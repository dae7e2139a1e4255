"""Row tables: embeddings of which a step pulls and pushes only the rows that it touches."""

from psworker.rows.join import find_rows as find_rows  # It registers itself with the training.
