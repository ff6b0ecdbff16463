"""The training step as pure functions. Nothing here knows of a run that takes the steps."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["precision"])
