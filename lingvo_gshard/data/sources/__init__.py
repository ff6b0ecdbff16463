"""Sources of text: readers of files, and reports of what became of rows."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, ["compression", "readers", "text", "tsv"]
)
