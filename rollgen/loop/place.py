"""Where an attempt writes: a directory, or the workspace of a dataset in object storage."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollgen.errors import RollgenError
from rollgen.format.commit import Part, Remote
from rollgen.format.schema import DATA_DIR
from rollgen.prompts.planned import Planned
from rollgen.remote.objects import is_url, local_path
from rollgen.remote.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Place:
    """A dataset that is written to. Its text is what the user calls it."""

    directory: Path
    remote: Remote | None = None

    @property
    def url(self) -> str | None:
        """Of a dataset in object storage."""
        return None if self.remote is None else self.remote.url

    def __str__(self) -> str:
        return self.url or str(self.directory)


@contextmanager
def open_place(
    out: str | Path, writer: str, part: Part, *, clean: bool, note: Callable[[str], None]
) -> Iterator[Place]:
    """The place that `--out` names, while a writer works there. Raises as `Workspace` does for a URL."""
    if not is_url(out):
        yield Place(local_path(out))
        return
    workspace = Workspace(
        str(out), writer, part, clean=clean, note=note, problem_in=lambda path: Planned.of_dataset(path).problem
    )
    with workspace:
        place = Place(workspace.directory, workspace)
        try:
            yield place
        except RollgenError as error:  # whoever gave a URL knows nothing of a workspace
            if not _is_of_this_machine(error):
                error.args = (_renamed(str(error), place),)
            raise


def _is_of_this_machine(error: BaseException) -> bool:
    """Whether the local disk has failed, be it full: what was to be done about that is to be done in the workspace."""
    cause = error.__cause__ or error.__context__
    if cause is None:
        return False
    return (isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)) or _is_of_this_machine(cause)


def _renamed(text: str, place: Place) -> str:
    """With the URL in place of the workspace; shards that are in that, in `data/`, are nowhere else."""
    return re.sub(rf"{re.escape(str(place.directory))}(?!/{DATA_DIR}/)", lambda _: str(place), text)
