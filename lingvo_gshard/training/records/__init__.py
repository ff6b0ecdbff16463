"""What a run records about itself besides its metrics: launches, sharding, evaluations, memory."""
