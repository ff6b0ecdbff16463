"""One reader of compiled programs: operations, loops, FLOPs, traffic, collectives."""
