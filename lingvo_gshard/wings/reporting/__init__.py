"""Reports on runs: their curves, scores, routers, sharding and environment, as data and a page."""
