"""What watches a training run step by step: the protocol, and observers that need it."""
