"""Sources of text: readers of files, and reports of what became of rows."""
