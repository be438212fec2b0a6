"""How many connections this process may hold open at a time: each is a file descriptor, which the system counts."""

from __future__ import annotations

import resource
from typing import Final

RESERVED: Final = 256
"""Descriptors for everything else: the dataset, its inputs, libraries, pipes."""


def afford(connections: int) -> int:
    """How many of these may be open at once. Raises the soft limit of this process where the hard one allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit, affordable = limit_for(connections, soft, hard)
    if limit != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return affordable


def limit_for(connections: int, soft: int, hard: int) -> tuple[int, int]:
    """The soft limit to have, never a lower one, and how many of the connections it allows, one at least."""
    needed = connections + RESERVED
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return soft, connections
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    return limit, max(1, limit - RESERVED)
