"""Save and restore error state: side files, files of shards, validation."""
