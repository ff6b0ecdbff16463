"""A plan as data: its fields, its file, and two plans compared."""
