"""Files on local disks and in buckets (gs://, s3://): the one place that knows where they are.

`paths` tells buckets from disks, `stores` opens them, `objects` reads and writes files of both, and
`copies` keeps local copies for code that needs a file on a disk.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, ["atomic", "cached", "objects", "regular", "stores"]
)
