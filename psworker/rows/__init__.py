"""Row tables: embeddings of which a step pulls and pushes only the rows that it touches."""
