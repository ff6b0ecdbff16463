"""Routers watched while a run trains: counts, records and verdicts."""
