"""The sharding that XLA gives each tensor of a step, and the lines of code behind it."""
