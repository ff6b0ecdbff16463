"""The common part of the commands: start, flags, progress, tables, files, units."""
