"""Subcommands of gshard-experts."""
