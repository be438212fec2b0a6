"""How much Arrow holds at most, whatever its allocator keeps for later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

_POOLS: list[pa.MemoryPool] = []
"""All that there were: what was made with one may outlive the test, and is given back to it then."""


@contextmanager
def counted() -> Iterator[pa.MemoryPool]:
    """A pool of its own, whose `max_memory()` is of what was made meanwhile."""
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    _POOLS.append(pool)
    pa.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pa.set_memory_pool(usual)
