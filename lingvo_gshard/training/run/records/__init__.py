"""Files of a run besides its metrics: launches, sharding, evaluations."""
