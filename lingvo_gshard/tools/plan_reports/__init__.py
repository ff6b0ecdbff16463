"""Prints what gshard-plan reports: plans, differences and searches."""
