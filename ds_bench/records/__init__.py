"""The files of trials and runs: schema, rank files, run folder, reader."""
