"""Studies: what experts are worth, and the tables of the paper. They are not installed."""
