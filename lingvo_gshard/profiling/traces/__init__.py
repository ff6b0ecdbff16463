"""Traces: how they are recorded, read from XProf files and written for Perfetto."""
