"""Dropless experts: each expert computes exactly the rows that tokens send to it."""
