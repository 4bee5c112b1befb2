"""What was seen of a trial, on disk: schema, rank files, run folder, reader."""
