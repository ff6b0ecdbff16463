"""Flags that several commands share, and the options of the API that they fill."""
