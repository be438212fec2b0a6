"""`Exporter`: what a trainer's module says. Options are its fields, checked by pydantic wherever they come from.

A subclass names the trainer and the version whose code it follows, says where each column of a dataset goes (`places`:
whatever is not named there is reported as lost, so that nothing can be forgotten), and writes the files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field

from rollgen.exporters.records import Records

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""An option that counts something: small enough for every array and file that it goes into."""
MAX_RANKS: Final = 1 << 16
"""Bound of an option that counts machines: there is a file, or a token of padding, for each."""


class Exporter(BaseModel, ABC):
    """Writes Records as files of one trainer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    follows: ClassVar[str]
    """The version of the trainer whose code was read."""
    needs_reward: ClassVar[bool]
    """Whether the trainer has no use for samples without one."""
    takes_advantages: ClassVar[bool] = True
    """Whether advantages go into the files; a trainer that does not take them makes its own of the rewards."""

    @property
    def takes_experts(self) -> bool:
        """Whether blocks are to have the experts of their tokens."""
        return False

    @property
    @abstractmethod
    def places(self) -> Mapping[str, str]:
        """By column of the dataset, or `reward` or `advantage`: where it is in the files, in the trainer's words.

        PATH, here and in what `write` returns, is the directory of the export, which may be moved.
        """

    @abstractmethod
    def write(self, records: Records, directory: Path) -> Sequence[str]:
        """Write everything into an empty directory, one block in memory at a time.

        Returns what the trainer must be told to read it, a line each. Raises UsageError, with the fix, for what the
        trainer would train on wrongly; the directory is then removed.
        """


class ExpertsExporter(Exporter):
    """Of a trainer that can replay the routing of tokens to experts."""

    routed_experts: bool = Field(False, description="Write the experts of each token: some hundred numbers a token.")

    @property
    def takes_experts(self) -> bool:
        return self.routed_experts
