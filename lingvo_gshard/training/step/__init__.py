"""The training step as pure functions. Nothing here knows of a run that takes the steps."""
