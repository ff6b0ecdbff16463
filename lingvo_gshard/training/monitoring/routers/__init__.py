"""Watches the routers of a run: which experts the tokens of a step go to."""
