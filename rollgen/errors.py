"""Every error rollgen raises on purpose, as one tree. Catch `RollgenError` to catch them all.

    RollgenError                exit 1   the run failed
    ├── UsageError              exit 2   a flag, a config key or an input row is wrong; raised before a model loads
    ├── ResumeRefused           exit 4   a run or a state is not what this would continue, or the run is alive
    ├── DatasetError            exit 1   a dataset directory or file is damaged, missing or not rollgen's
    │   ├── MissingFile         exit 1   it is not there: removed, replaced, or never copied
    │   ├── Unreadable          exit 1   the machine could not read it: nothing is known about its content
    │   └── Unsent              exit 1   the storage did not take it: sent again, it may arrive
    ├── EngineError             exit 1   the inference engine could not start, died or stalled
    │   └── UnfitEngine         exit 1   it runs but cannot give what was asked for: starting it again would not help
    ├── CaptureError            exit 1   one completion came back without an exact, complete support
    │   └── IncompleteSupport   exit 1   a tie may reach past the logprobs returned: ask again for more of them
    └── TooManyFailures         exit 1   more samples failed than the run was told to accept

A run that finishes but leaves samples unmade exits 3, an interrupted one 130 (SIGINT), 143 (SIGTERM) or 129 (SIGHUP):
these are outcomes, not errors. The message is one line: what is wrong, where (FILE:LINE when there is one), what to do.
Adding a class: pick the exit code by what the user has to do next, and draw it above.
"""

from __future__ import annotations

from typing import ClassVar


class RollgenError(Exception):
    """Base of all errors raised by rollgen; `exit_code` is what the command line exits with."""

    exit_code: ClassVar[int] = 1


class UsageError(RollgenError, ValueError):
    """A flag, a config key or an input row is wrong. Nothing has been generated."""

    exit_code = 2


class ResumeRefused(RollgenError):
    """Going on would mix two runs in one directory, or read another dataset from the place that a state says."""

    exit_code = 4


class DatasetError(RollgenError):
    """A dataset cannot be trusted; names the file, and the row group where there is one."""


class MissingFile(DatasetError):
    """A file of a dataset is not there: nothing that skipping damage could make up for."""


class Unreadable(DatasetError):
    """The machine failed, not the file: memory ran out, the disk or a permission refused. Neither damaged nor sound."""


class Unsent(DatasetError):
    """A storage failed or refused to write or remove something, or spoiled it. It may not when it is asked again."""


class EngineError(RollgenError):
    """The engine could not start, or died. What was finished is committed; the rest is owed to `--resume`."""


class UnfitEngine(EngineError):
    """The engine answers, but as it was started no answer can hold what is asked for. Restarting it changes nothing."""


class CaptureError(RollgenError):
    """A completion lacks an exact support for some token. It is recorded as a failure and never stored."""


class IncompleteSupport(CaptureError):
    """No excluded id was among the logprobs of some token: ask for the same sample (same seed) with more of them."""


class TooManyFailures(RollgenError):
    """More samples failed than `max_failures` accepts. What was finished is committed."""


EXIT_CODES_HELP = (
    "Exit codes: 0 done · 1 failed, or (verify, repair) something is wrong · 2 usage, bad input or a model that "
    "cannot be had (before any model loads) · 3 done, but some samples failed · 4 resume refused, or another run is "
    "writing there · 129/130/143 interrupted, finished samples committed."
)
