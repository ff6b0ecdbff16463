"""Configuration: Params, gin over Params, and the registry of experiments."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["names", "params_text", "registry"])
