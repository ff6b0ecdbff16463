"""Checkpoints: saving, verifying, choosing and restoring the state."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["arrays", "run_item"])
