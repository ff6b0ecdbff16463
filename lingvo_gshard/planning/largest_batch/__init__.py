"""The largest batch that generates texts within a machine's memory."""
