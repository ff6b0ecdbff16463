"""Programs: partitioned functions as data, their files, and their compiled form."""
