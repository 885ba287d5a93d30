"""Host memory of a process that computes on the CPU."""

import ctypes
import sys

# glibc's mallopt parameters, from malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4


def keep_freed_pages() -> bool:
    """Lets the allocator keep what one step frees for the next one; True where the system's allocator can.

    By default glibc hands large buffers back to the system when they are freed, so every step of a loop pays for fresh
    zeroed pages again (a fifth of the time of the quickstart). Call it before the first array is made. The process
    keeps its peak size until it ends. Threads keep arenas of their own: sharing one halves the speed of small models.
    Does nothing outside Linux with glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    largest = 2**31 - 1
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, largest), (_TOP_PAD, 2**26))
    return all([mallopt(name, value) == 1 for name, value in settings])
