"""Runs a trainer's steps: on one device, over a mesh, with workers, or on a TPU's cores."""
