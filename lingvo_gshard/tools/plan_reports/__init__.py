"""Prints what gshard-plan reports: plans, differences, searches and the paper's figures."""
