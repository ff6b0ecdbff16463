"""Rules: each decides from one row alone whether it is dropped."""
