"""Plans with the loads that routers had: the slowest device, dropped tokens, and a placement."""
