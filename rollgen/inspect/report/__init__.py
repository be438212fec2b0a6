"""The report: a dataset as one HTML file, with figures and samples, for a browser and without a network.

write_report   measures, reads some samples, and writes the page
content        all that it says, as JSON: the figures of `figures`, and the samples of `samples`, chosen by `choice` and
               spelled by `texts`
page           puts it, plotly.js, and the scripts and style sheets of `assets/` into one file that can do nothing else
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollgen.directory import inside_dataset
from rollgen.errors import DatasetError, UsageError
from rollgen.format.files import new_file, open_regular, temporary_beside
from rollgen.format.layout import OWN_PLACES
from rollgen.format.reader import open_dataset
from rollgen.inspect.curves import curves_of
from rollgen.inspect.report.content import report_content
from rollgen.inspect.report.page import BEGINNING, read_plotly, render_page
from rollgen.inspect.rewards import stored_rewards
from rollgen.inspect.stats import stats_of
from rollgen.remote.objects import is_url

_SUFFIXES: Final = (".html", ".htm")


@dataclass(frozen=True, slots=True)
class Report:
    """A page that was written."""

    file: str
    bytes: int
    shown: int
    """Samples that can be looked at in it."""
    samples: int
    """Samples of the dataset."""


def write_report(directory: Path, target: Path) -> Report:
    """Write the page of the dataset in `directory` to `target`, atomically, in place of a report of that name.

    Raises UsageError for a target that cannot be one and when plotly is not installed, before anything is read;
    DatasetError when the dataset is missing or damaged.
    """
    check_target(directory, target)
    plotly_js = read_plotly()
    dataset = open_dataset(directory)
    rewards = stored_rewards(dataset)
    stats = stats_of(dataset, rewards)
    content = report_content(dataset, stats, curves_of(dataset, stats), rewards)
    page = render_page(content, plotly_js).encode()
    temporary = temporary_beside(target)
    try:
        with new_file(temporary) as file:
            file.write(page)
        os.replace(temporary, target)
    except OSError as error:
        raise UsageError(f"--html {target}: cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # renamed, it is not there; where it cannot be removed, the error is the first one
            temporary.unlink()
    samples = content["samples"]
    return Report(str(target), len(page), len(samples["items"]), samples["of"])


def check_target(directory: Path, target: Path) -> None:
    """Raise UsageError for a place where no page of the dataset in `directory` can be, or where one would replace
    something else."""
    if is_url(target):
        raise UsageError(f"--html {target}: a report is written to a file of this machine")
    if target.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"--html {target}: name a file that ends in .html")
    try:
        target.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # a name that is too long, a loop of links, a permission
        raise UsageError(f"--html {target}: cannot be written: {error.strerror or error}") from None
    if not target.parent.is_dir():
        wrong = "is not a directory" if os.path.lexists(target.parent) else "is not there; make it first"
        raise UsageError(f"--html {target}: {target.parent} {wrong}")
    if target.is_dir():
        raise UsageError(f"--html {target}: is a directory; name a file in it")
    if os.path.lexists(target) and not _is_report(target):
        raise UsageError(f"--html {target}: is there, and no report of rollgen; name another file, or take it away")
    place = target.parent.resolve() / target.name
    home = inside_dataset(place)
    if home is not None and home != directory.resolve():
        raise UsageError(f"--html {target}: {home} is another dataset; name a file beside it")
    if home is not None and place.relative_to(home).parts[0] in OWN_PLACES:
        raise UsageError(f"--html {target}: {target.parent} is a place of the dataset's own; name one beside it")


def _is_report(target: Path) -> bool:
    """Whether this is a report's file, or an empty one. A link is none, wherever it leads."""
    if target.is_symlink():
        return False
    try:
        with open_regular(target) as file:
            return file.read(len(BEGINNING)) in (b"", BEGINNING)
    except DatasetError:  # a pipe
        return False
    except OSError as error:
        raise UsageError(f"--html {target}: cannot be read: {error.strerror or error}; name another file") from error
