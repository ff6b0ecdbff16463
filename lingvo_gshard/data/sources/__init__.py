"""Sources of text: readers of files, and cleaning."""
