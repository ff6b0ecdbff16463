"""Formats of sources: catalogs, translation memories, quoted rows, archives and the like."""
