"""`rollgen.generate` and `rollgen.merge`: what the commands of these names do, from Python."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollgen.config import RunConfig, as_config
from rollgen.crews import make_crew
from rollgen.curate.compact import SHARD_TOKENS
from rollgen.curate.merge import Merged
from rollgen.curate.merge import merge as make_merged
from rollgen.errors import UsageError
from rollgen.format.manifest import Manifest
from rollgen.inspect.card import refresh_card
from rollgen.loop import run
from rollgen.loop.place import Place
from rollgen.loop.report import Phase, Reporter, RunStats
from rollgen.preflight import Preflight
from rollgen.remote.objects import local_path
from rollgen.rollout_writer import Prompts, prompt_inputs

_LOG = logging.getLogger("rollgen")


def generate(
    prompts: Prompts,
    out: str | Path,
    config: RunConfig | None = None,
    *,
    resume: bool = False,
    clean: bool = False,
    retry: str | None = None,
    reporter: Reporter | None = None,
    **settings: Any,
) -> RunStats:
    """Sample every prompt with vLLM into the dataset `out`, and return the totals.

    `out` is a directory, or a URL like `s3://bucket/run`.
    `prompts` is a path, a pattern, a row like `{"prompt": "Hello"}`, or a list of these. How to sample them is said by
    `config` or by its fields as `settings` (`model=..., n=4, top_k=50`): `rollgen.RunConfig` describes them. Unlike the
    command, neither the environment nor a file is read. `resume` continues the run in `out`, `clean` replaces it.
    `retry="finish_reason=length"` with `resume` and a larger `max_tokens` makes samples that were cut again.

    Nothing is printed: phases are info, notes warnings and progress debug messages of the logger `rollgen`, unless a
    `reporter` takes them. `RunStats.owed` says whether samples are missing, because they failed.

    Blocks until everything is made. vLLM starts processes by spawning: a script needs `if __name__ == "__main__"`.
    In the main thread SIGINT, SIGTERM and SIGHUP end the run after committing what is finished, as `Interrupted`.
    Raises a RollgenError like the command, and UsageError inside a running event loop.
    """
    _refuse_running_loop()
    return run.generate(
        prompt_inputs(prompts),
        as_config(config, settings),
        out,
        reporter=reporter or LoggingReporter(),
        make_crew=make_crew,
        resume=resume,
        clean=clean,
        retry=retry,
    )


def merge(
    datasets: Sequence[str | Path],
    out: str | Path,
    *,
    names: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    shard_tokens: int = SHARD_TOKENS,
    clean: bool = False,
    dry_run: bool = False,
) -> Merged:
    """Make one dataset, in the new directory `out`, of the current rows of several, of other models or runs too.

    A column `run` says where a row is from: `names`, or else the names of the directories; a dataset that was merged
    itself brings its own runs. All need the same tokenizer and vocabulary. Optional columns that not all have are
    refused, unless `drop` names them. `clean` replaces the dataset that `out` holds; a `dry_run` writes nothing.

    Raises UsageError for datasets that do not go together and for an `out` that holds something, ResumeRefused while a
    writer of one of them is alive, and DatasetError for damage or a full disk.
    """
    merged = make_merged(datasets, out, names=names, drop=drop, shard_tokens=shard_tokens, clean=clean, dry_run=dry_run)
    if not dry_run:
        refresh_card(local_path(out))
    return merged


class LoggingReporter:
    """`loop.report.Reporter` that tells the logger `rollgen`, which a program shows as it likes."""

    def phase(self, name: Phase) -> None:
        """See `loop.report.Reporter`; so below."""
        _LOG.info("phase: %s", name)

    def checked(self, prompts: int) -> None:
        _LOG.debug("%d prompts checked", prompts)

    def note(self, message: str) -> None:
        _LOG.warning("%s", message)

    def started(self, place: Place, preflight: Preflight, manifest: Manifest, stats: RunStats) -> None:
        _LOG.info(
            "%s (%s), capture %s: %d samples of %d prompts to %s",
            manifest.model.name,
            manifest.model.dtype,
            manifest.capture,
            preflight.summary.samples,
            preflight.summary.prompts,
            place,
        )

    def grown(self, place: Place) -> None:
        refresh_card(place.directory, remote=place.remote)

    def progress(self, stats: RunStats) -> None:
        _LOG.debug("%d of %d samples stored", stats.stored_before + stats.stored, stats.planned - stats.tombstones)


def _refuse_running_loop() -> None:
    """A run has an event loop of its own. Raises UsageError where that cannot be."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UsageError(
        "generate blocks until everything is made, which would stop the event loop that runs here: use "
        "`await asyncio.to_thread(rollgen.generate, ...)`"
    )
