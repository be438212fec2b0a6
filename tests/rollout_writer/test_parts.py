"""Several writers of one dataset: their parts make a whole, and who would make the same is refused."""

from __future__ import annotations

import pytest
from models.fake_engine import FakeEngine
from models.outputs import plain
from models.runs import Runs, keys
from models.writers import Open, ids, key

from rollgen.engines.base import SampleRequest
from rollgen.errors import DatasetError, ResumeRefused, UsageError
from rollgen.format.failures import FailureLog, read_failures
from rollgen.format.layout import CARD_FILE
from rollgen.format.manifest import read_manifest


def test_skipped_rows_are_recorded_once(runs: Runs, planned: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the writer of their part, who may have had no room for the line before; they are never owed."""

    def full(log: FailureLog, *values: object) -> None:
        raise DatasetError("no room")

    runs.write_prompts(4, bad=[1, 2])
    with monkeypatch.context() as patched:
        patched.setattr(FailureLog, "record", full)
        with pytest.raises(DatasetError, match="no room"):
            planned(on_bad_row="skip", writer="a", part=(0, 2))
    with (
        planned(on_bad_row="skip", writer="b", part=(1, 2)) as one,
        planned(on_bad_row="skip", writer="a", part=(0, 2)) as other,
    ):
        assert [key(request) for request in one.owed()] == [(3, 0), (3, 1)]
        assert [key(request) for request in other.owed()] == [(0, 0), (0, 1)]
    lines = [(failure.prompt_id, failure.stage) for failure in read_failures(runs.out)]
    assert lines == [("p2", "input"), ("p1", "input")]  # a's come first


def test_parts_make_a_whole(runs: Runs, planned: Open) -> None:
    """Prompts go by their number modulo 3, groups stay together, the last writer to leave writes the card."""
    writers = [planned(writer=f"w{i}", part=(i, 3)) for i in range(3)]
    for number, writer in enumerate(writers):
        requests = list(writer.owed())
        assert {request.prompt.prompt_index % 3 for request in requests} == {number}
        for request in requests:
            writer.add(request, plain(request))
    for writer in writers[:2]:
        writer.close()
        assert not (runs.out / CARD_FILE).exists()
    writers[2].close()
    assert "10" in (runs.out / CARD_FILE).read_text()
    assert sorted(runs.stored()) == keys(5, 2)
    assert len(read_manifest(runs.out).attempts) == 3


def test_parts_go_by_id_without_a_plan(runs: Runs, planless: Open) -> None:
    """Each id is owned by one writer, and only that one makes requests for it."""
    writers = [planless(writer=f"w{i}", part=(i, 3)) for i in range(3)]
    for number in range(12):
        owners = [writer for writer in writers if writer.owns(f"p{number}")]
        assert len(owners) == 1
        request = owners[0].request(f"p{number}", [1])
        owners[0].add(request, plain(request))
        stranger = writers[(writers.index(owners[0]) + 1) % 3]
        with pytest.raises(UsageError, match=rf"^prompt 'p{number}' is not of part [012]/3; ask owns\(\) first"):
            stranger.request(f"p{number}", [1])
    for writer in writers:
        writer.close()
    assert ids(runs.out) == sorted((f"p{number}", 0) for number in range(12))


@pytest.mark.parametrize(
    ("writer", "part", "expected"),
    [
        ("w0", (0, 2), "another rollgen is writing this dataset"),
        ("w0", (1, 2), "another rollgen is writing this dataset"),
        ("w1", (0, 2), "writer 'w0' is alive and makes part 0/2 of the prompts, which part 0/2 of writer 'w1'"),
        ("w1", (1, 3), "which part 1/3 of writer 'w1' does not go with"),
        ("w1", (0, 1), "which part 0/1 of writer 'w1' does not go with"),
    ],
)
def test_live_writers_must_go_together(
    runs: Runs, planned: Open, writer: str, part: tuple[int, int], expected: str
) -> None:
    """Another name, another part, the same N; once the first has left, anything goes."""
    first = planned(part=(0, 2))
    with pytest.raises(ResumeRefused, match=expected):
        planned(writer=writer, part=part)
    first.close()
    planned(writer=writer, part=part).close()


def test_two_wholes_name_each_other(runs: Runs, planned: Open) -> None:
    """Where nothing is divided, no parts are spoken of."""
    with planned(), pytest.raises(ResumeRefused, match=r"another rollgen \(writer 'w0'\) is writing this dataset"):
        planned(writer="w1")


def test_generate_and_live_writers_exclude_each_other(runs: Runs, planned: Open) -> None:
    """The command makes the whole plan; each names the other."""
    with planned(writer="mine", part=(0, 2)), pytest.raises(ResumeRefused, match="writer 'mine' is alive"):
        runs(FakeEngine(capture="native"), resume=True)

    async def before(request: SampleRequest) -> None:
        with pytest.raises(ResumeRefused, match="writer 'w0' is alive"):
            planned(writer="mine", part=(0, 2))

    runs(FakeEngine(capture="native", before=before), resume=True)
    assert runs.engine.asked


def test_a_plan_does_not_grow_under_a_live_writer(runs: Runs, planned: Open) -> None:
    """The same plan is fine; a larger n waits until the others are gone."""
    with planned(part=(0, 2)) as first:
        planned(writer="w1", part=(1, 2)).close()
        with pytest.raises(ResumeRefused, match="cannot grow from 10 to 15 samples while writer 'w0' works on it"):
            planned(writer="w1", part=(1, 2), n=3)
        assert len(list(first.owed())) == 6  # prompts 0, 2 and 4
    with planned(writer="w1", part=(1, 2), n=3) as writer:
        assert len(list(writer.owed())) == 6  # prompts 1 and 3


def test_what_live_writers_stored_is_done(runs: Runs, planned: Open) -> None:
    """Parts change hands: w0 made some of part 1 alone; a new writer of that part owes the rest."""
    with planned() as writer:
        for request in writer.owed():
            if request.sample_index == 0:
                writer.add(request, plain(request))
    with planned(part=(0, 2)), planned(writer="w1", part=(1, 2)) as second:
        assert [key(request) for request in second.owed()] == [(1, 1), (3, 1)]
