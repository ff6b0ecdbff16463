"""Text in: readers of files, and cleaning."""
