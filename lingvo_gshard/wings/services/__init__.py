"""Services of a training run, which watch its steps: progress, routers, trackers, roll backs."""
