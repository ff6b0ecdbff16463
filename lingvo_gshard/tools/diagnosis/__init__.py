"""Checks of gshard-doctor: one file for each kind of thing that may be wrong with a machine."""
