"""The subcommands of gshard-experts."""
