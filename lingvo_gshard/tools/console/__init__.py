"""What command lines share: start, progress, tables, units."""
