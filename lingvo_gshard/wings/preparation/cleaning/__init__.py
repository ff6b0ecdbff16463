"""Cleaning: rules that normalize rows and drop useless ones, for inputs in memory and by parts."""
