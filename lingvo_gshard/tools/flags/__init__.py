"""Flags that several command lines share."""
