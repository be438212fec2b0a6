"""`Place`, where a dataset is, and which one callers mean by a path or a URL."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TypeAlias

from rollgen.errors import Unreadable, UsageError
from rollgen.remote.objects import ObjectStore, is_url, local_path, place_name

Place: TypeAlias = Path | ObjectStore
"""A directory, or what is below a URL."""


def place_of(path: str | os.PathLike[str]) -> Place:
    """The dataset that a path or a URL means; whether one is there is left to who opens it.

    Raises UsageError for what is neither, or cannot be one, and Unreadable when the machine cannot tell.
    """
    name = place_name(path)
    if is_url(name):
        return ObjectStore(name)
    place = local_path(name).absolute()
    try:
        mode = place.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return place
    except OSError as error:
        raise Unreadable(
            f"{place}: this machine could not read it: {error.strerror}; mend that, and try again"
        ) from None
    except ValueError as error:  # a NUL, or what is no Unicode
        raise UsageError(f"{name!r}: cannot be a path: {error}") from None
    if stat.S_ISREG(mode):
        raise UsageError(f"{place}: is a file, not a dataset's directory")
    return place


def name_of(place: Place) -> str:
    """The path or the URL."""
    return place.url if isinstance(place, ObjectStore) else str(place)


def identity_of(place: Place) -> str:
    """What is the same for two names of one dataset, and of no two datasets: no link in a path, or the URL."""
    return place.url if isinstance(place, ObjectStore) else os.path.realpath(place)
