"""What a command printed that ran in this process, and how it ended."""

from __future__ import annotations

from typing import NamedTuple


class Printed(NamedTuple):
    code: int
    out: str
    err: str
