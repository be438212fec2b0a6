"""Disks that are full, or without hard links: neither is filled or mounted."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A limit on file sizes stands in for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


NO_HARD_LINKS = "this file system has no hard links; "


@contextmanager
def no_hard_links(number: int = errno.EPERM) -> Iterator[None]:
    """No file gets a second name meanwhile: a call says what exFAT does, or this."""

    def refuse(source: object, target: object) -> NoReturn:
        raise OSError(number, os.strerror(number), os.fspath(source), None, os.fspath(target))  # type: ignore[call-overload]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "link", refuse)
        yield
