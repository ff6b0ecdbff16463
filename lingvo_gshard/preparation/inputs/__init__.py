"""Raw files: formats, surveys, and the parts of files that are read as one piece of work."""
