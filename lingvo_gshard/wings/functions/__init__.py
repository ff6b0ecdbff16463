"""Runs annotated functions of a user's own on the devices of a mesh."""
