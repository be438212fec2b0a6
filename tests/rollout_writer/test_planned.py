"""A loop that is not ours over a plan: what it adds is stored once, however it ends, and what it does not is owed."""

from __future__ import annotations

import dataclasses
import json
import threading

import pytest
from models.fake_engine import FakeEngine
from models.outputs import plain
from models.runs import Runs, keys
from models.writers import Open, key, table

from rollgen.engines.base import SampleRequest
from rollgen.errors import UsageError
from rollgen.format.failures import read_failures
from rollgen.format.journal import list_shards
from rollgen.format.layout import CARD_FILE
from rollgen.format.manifest import read_manifest
from rollgen.format.reader import open_dataset, verify_shard


def test_planned_is_what_generate_makes(runs: Runs, planned: Open) -> None:
    """The same plan, seeds, ids and supports in every column but `text`, which the fake engine makes up."""
    runs(FakeEngine(capture="native"))
    by_command = table(runs.out)
    runs.out = runs.out.with_name("own")
    with planned() as writer:
        for request in writer.owed():
            writer.add(request, plain(request))
    by_loop = table(runs.out)
    assert by_loop.schema == by_command.schema
    assert by_loop.drop_columns(["text"]).equals(by_command.drop_columns(["text"]))
    assert len(list_shards(runs.out)) == 1
    for shard in open_dataset(runs.out).shards:
        verify_shard(shard.path, line=shard.line)


def test_a_run_is_continued_by_a_loop_and_back(runs: Runs, planned: Open) -> None:
    """`generate` makes one prompt, the loop the next two, `generate --resume` the last two."""
    runs(FakeEngine(capture="native", dtype="float32"), limit=1)
    with planned(limit=3) as writer:
        requests = list(writer.owed())
        assert [key(request) for request in requests] == [(1, 0), (1, 1), (2, 0), (2, 1)]
        for request in requests:
            writer.add(request, plain(request))
    stats = runs(FakeEngine(capture="native", dtype="float32"), resume=True)
    assert (stats.stored_before, stats.stored) == (6, 4)
    assert sorted(runs.stored()) == keys(5, 2)
    assert [attempt.engine.name for attempt in read_manifest(runs.out).attempts] == ["fake"] * 3


def test_rows_may_be_prompts(runs: Runs, planned: Open) -> None:
    """A list of mappings is planned like the file of the same rows."""
    rows = [json.loads(line) for line in runs.prompts.read_text().splitlines()]
    with planned(prompts=rows) as writer:
        assert [request.prompt.prompt_id for request in writer.owed()] == [f"p{i}" for i in range(5) for _ in range(2)]


def test_owed_shrinks_by_what_is_added(planned: Open) -> None:
    """Asked for again, also while samples wait for their commit, it names what is left."""
    with planned() as writer:
        for request in writer.owed():
            if request.sample_index == 0:
                writer.add(request, plain(request))
        assert [key(request) for request in writer.owed()] == [(i, 1) for i in range(5)]


def test_an_error_in_the_block_loses_nothing(runs: Runs, planned: Open) -> None:
    """Three samples were added when the loop failed: three are stored."""

    def loop() -> None:
        with planned() as writer:
            for number, request in enumerate(writer.owed()):
                writer.add(request, plain(request))
                assert number < 2, "the loop failed"

    with pytest.raises(AssertionError, match="the loop failed"):
        loop()
    assert runs.stored() == keys(5, 2)[:3]
    assert (runs.out / CARD_FILE).exists()


def test_flush_is_durable(runs: Runs, planned: Open) -> None:
    """A shard and its line are there on return, while the writer goes on."""
    with planned() as writer:
        requests = writer.owed()
        for _ in range(2):
            request = next(requests)
            writer.add(request, plain(request))
            writer.flush()
        assert runs.stored() == [(0, 0), (0, 1)]
        assert len(list_shards(runs.out)) == 2


def test_commits_by_time(runs: Runs, planned: Open) -> None:
    """With an interval of nothing, an `add` commits what came before it, unless that goes on already."""
    with planned(commit_interval=1e-6) as writer:
        for request in writer.owed():
            writer.add(request, plain(request))
    assert 2 <= len(list_shards(runs.out)) <= 10


def test_threads_share_a_writer(runs: Runs, planned: Open) -> None:
    """Six threads take requests from one iterator: each is made once."""
    runs.write_prompts(40)
    with planned(commit_interval=0.01) as writer:
        requests = writer.owed()

        def work() -> None:
            for request in requests:
                writer.add(request, plain(request))

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(runs.stored()) == keys(40, 2)


def test_failures_of_the_loop(runs: Runs, planned: Open) -> None:
    """`fail` records on one line what the engine said, and the sample stays owed."""
    with planned(limit=1, n=1) as writer:
        [request] = writer.owed()
        writer.fail(request, TimeoutError("no answer\nin 60 s"))
        writer.fail(request, TimeoutError())
        assert [key(request) for request in writer.owed()] == [(0, 0)]
    assert [(f.stage, f.error) for f in read_failures(runs.out)] == [
        ("engine", "no answer in 60 s"),
        ("engine", "TimeoutError"),
    ]


def test_a_sample_is_added_once(runs: Runs, planned: Open) -> None:
    """Neither twice, nor after a restart, nor by a request of another dataset."""
    with planned() as writer:
        request = next(iter(writer.owed()))
        writer.add(request, plain(request))
        with pytest.raises(UsageError, match=r"^\(p0, 0\): this writer does not owe it: it is stored already"):
            writer.add(request, plain(request))
        other = dataclasses.replace(request.prompt, prompt_id="elsewhere", prompt_index=1)
        with pytest.raises(UsageError, match=r"^\(elsewhere, 0\): this writer does not owe it"):
            writer.add(SampleRequest(other, 0), plain(request))
    with planned() as writer:
        list(writer.owed())
        with pytest.raises(UsageError, match="does not owe it"):
            writer.add(request, plain(request))
    assert runs.stored() == [(0, 0)]


def test_a_closed_writer_takes_nothing(planned: Open) -> None:
    """Closing twice is fine."""
    writer = planned()
    request = next(iter(writer.owed()))
    writer.close()
    writer.close()
    for call in (lambda: writer.add(request, plain(request)), lambda: writer.fail(request, "x"), writer.flush):
        with pytest.raises(UsageError, match="this writer is closed"):
            call()
