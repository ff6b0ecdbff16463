"""Lowers TensorFlow functions to programs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["operations"])
