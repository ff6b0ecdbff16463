"""Configures the memory allocator of this process."""

import ctypes
import sys

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NONE, _NEVER = 0, -1


def keep_pages() -> bool:
    """Makes glibc reuse freed memory instead of returning it to the kernel.

    By default glibc gets each large buffer from the kernel and returns it. For the temporaries and
    results of a compiled step this costs 0.3 s per GiB, while writing a GiB takes 0.04 s. The
    process keeps its peak size in exchange. Call this before the first large allocation.

    Returns:
      Whether the allocator was configured. False without glibc.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_M_MMAP_MAX, _NONE) and mallopt(_M_TRIM_THRESHOLD, _NEVER))
