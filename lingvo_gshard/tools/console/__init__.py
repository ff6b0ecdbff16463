"""What the commands share: start, flags, progress, tables, files, units."""
