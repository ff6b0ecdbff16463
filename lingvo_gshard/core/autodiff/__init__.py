"""Gradients: saved tensors, rematerialization and custom gradients."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["remat_policy", "remat_unit"])
