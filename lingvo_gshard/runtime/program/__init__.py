"""Programs: a compiled step as data, its file, and its executable."""
