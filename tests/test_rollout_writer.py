"""A generation loop that is not ours: what it adds is stored once and exactly, whatever it adds and however it ends."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from models.fake_engine import VOCAB_SIZE, FakeEngine, Key
from models.outputs import plain, sglang, vllm
from models.runs import Runs, keys

from rollgen.config import RunConfig
from rollgen.engines.base import SampleRequest
from rollgen.errors import CaptureError, IncompleteSupport, ResumeRefused, RollgenError, UnfitEngine, UsageError
from rollgen.format.commit import live_writers
from rollgen.format.failures import read_failures
from rollgen.format.journal import list_shards
from rollgen.format.layout import CARD_FILE
from rollgen.format.manifest import EngineRecord, read_manifest
from rollgen.format.reader import open_dataset, verify_shard
from rollgen.inspect.status import run_status
from rollgen.prompts.single import id_number
from rollgen.rollout_writer import RolloutWriter
from rollgen.rollouts import sample_seed
from rollgen.verify.dataset import verify_dataset

ENGINE = EngineRecord(name="fake", version="1", device="cpu", versions={}, processors="top_k, top_p")
Open = Callable[..., RolloutWriter]


@pytest.fixture
def planned(runs: Runs) -> Iterator[Open]:
    """`planned(writer="w1", ...)`: a writer of the five prompts, two samples each, in `runs.out`."""
    yield from _opener(runs, prompts=runs.prompts)


@pytest.fixture
def planless(runs: Runs) -> Iterator[Open]:
    """`planless(writer="w1", ...)`: a writer of prompts that come one by one, in `runs.out`."""
    yield from _opener(runs)


def _opener(runs: Runs, **usual: Any) -> Iterator[Open]:
    opened: list[RolloutWriter] = []

    def opener(**changes: Any) -> RolloutWriter:
        settings = {"model": str(runs.model), "max_tokens": 8, "top_k": 8, "n": 2, "engine": ENGINE}
        opened.append(RolloutWriter(runs.out, **(settings | usual | changes)))
        return opened[-1]

    yield opener
    for writer in opened:
        writer.close()


def table(directory: Path) -> pa.Table:
    """All rows, sorted by key."""
    return pq.read_table(directory / "data").sort_by([("prompt_id", "ascending"), ("sample_index", "ascending")])


def ids(directory: Path) -> list[tuple[str, int]]:
    """(prompt_id, sample_index) of all rows, sorted."""
    rows = table(directory)
    return list(zip(rows["prompt_id"].to_pylist(), rows["sample_index"].to_pylist(), strict=True))


def key(request: SampleRequest) -> Key:
    return request.prompt.prompt_index, request.sample_index


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


SPAN = [{"version": "step 1", "start": 0}]
STORED = {"weight_versions": True, "routed_experts": (2, 1, 4)}
"""Two layers of four experts, one for each token."""


def told(request: SampleRequest) -> dict[str, Any]:
    """An output of an engine that says which weights and experts made it."""
    output = plain(request)
    tokens = len(output["token_ids"])
    experts = np.ones((len(request.prompt.token_ids) + tokens - 1, 2, 1), np.uint8)
    return output | {"weight_versions": [SPAN[0] | {"end": tokens}], "routed_experts": experts}


@pytest.mark.parametrize("kind", ["planned", "planless"])
def test_weights_and_experts_are_stored(runs: Runs, request: pytest.FixtureRequest, kind: str) -> None:
    """With a plan and without: columns of the dataset from its first start, also after it is opened again."""
    opener = request.getfixturevalue(kind)
    for part in range(2):
        with opener(**STORED) as writer:
            requests = list(writer.owed())[:5] if kind == "planned" else [writer.request(f"p{part}", [1, 2, 3])]
            for one in requests:
                writer.add(one, told(one))
    rows = table(runs.out).to_pylist()
    assert len(rows) == (10 if kind == "planned" else 2)
    for row in rows:
        assert (row["weight_versions"], row["weight_version_starts"]) == (["step 1"], [0])
        assert row["routed_experts"] == [1] * 2 * (row["prompt_length"] + row["response_length"] - 1)
    assert verify_dataset(runs.out).is_clean


@pytest.mark.parametrize("kind", ["planned", "planless"])
@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (STORED, {}, "stores weight versions, which the engine here does not return"),
        (STORED, {"weight_versions": True}, "stores routed experts, 1 in each of 2 layers, which the engine"),
        ({}, STORED, "stores no weight versions: it began without"),
        ({"weight_versions": True}, STORED, "stores no routed experts, 1 in each of 2 layers: it began without"),
    ],
)
def test_what_is_stored_does_not_change(
    request: pytest.FixtureRequest, kind: str, first: dict[str, Any], then: dict[str, Any], message: str
) -> None:
    """A dataset is continued as it began."""
    opener = request.getfixturevalue(kind)
    with opener(**first):
        pass
    with pytest.raises(ResumeRefused, match=message):
        opener(**then)


def test_an_output_without_what_is_stored_is_a_failure(runs: Runs, planned: Open) -> None:
    """It stays owed, and the next one may be right."""
    with planned(**STORED) as writer:
        first, *_ = writer.owed()
        with pytest.raises(CaptureError, match="the dataset stores weight versions, but the output has none"):
            writer.add(first, plain(first))
        with pytest.raises(CaptureError, match=r"routed experts are \[1, 2, 1\], not"):
            writer.add(first, told(first) | {"routed_experts": [[[1], [1]]]})
        writer.add(first, told(first))
    assert len(table(runs.out)) == 1


@pytest.mark.parametrize("wrong", [(2, 1), (0, 1, 4), (2, 1, 1 << 16), "2,1,4", (2.0, 1, 4)])
def test_wrong_layouts_of_experts_are_refused(planned: Open, wrong: Any) -> None:
    """Three whole numbers."""
    with pytest.raises(UsageError, match=r"^routed_experts: .* is not \(layers, experts a token takes, experts of"):
        planned(routed_experts=wrong)


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


@pytest.mark.parametrize("shape", [plain, sglang, vllm])
def test_every_shape_makes_the_same_row(runs: Runs, planless: Open, shape: Callable[[SampleRequest], object]) -> None:
    """Against the arrays that the shape was made of."""
    with planless() as writer:
        request = writer.request("a", [1, 2, 3], prompt="abc", metadata={"answer": 7})
        writer.add(request, shape(request))
    [row] = table(runs.out).to_pylist()
    expected = plain(request)
    assert row["token_ids"] == expected["token_ids"].tolist()
    assert row["sampling_mask"] == expected["mask_ids"].reshape(-1, 2).tolist()
    assert row["logprobs"] == expected["logprobs"].tolist()
    assert (row["prompt"], row["metadata"], row["prompt_token_ids"]) == ("abc", '{"answer": 7}', [1, 2, 3])


def test_planless_is_continued(runs: Runs, planless: Open) -> None:
    """No plan, nothing owed; what is stored is known after a restart; seeds and numbers derive from the id."""
    with planless() as writer:
        request = writer.request("a", [1], 3)
        assert not writer.is_stored("a", 3)
        writer.add(request, plain(request))
        assert writer.is_stored("a", 3)
    assert not (runs.out / "plan.parquet").exists()
    with planless(writer="other") as writer:
        assert (writer.is_stored("a", 3), writer.is_stored("a"), writer.is_stored("b", 3)) == (True, False, False)
        with pytest.raises(UsageError, match=r"^\(a, 3\) is stored already"):
            writer.request("a", [1], 3)
        request = writer.request("b", [2])
        writer.add(request, plain(request))
    rows = table(runs.out).to_pylist()
    assert [(row["prompt_id"], row["sample_index"]) for row in rows] == [("a", 3), ("b", 0)]
    assert [row["seed"] for row in rows] == [sample_seed(0, "a", 3), sample_seed(0, "b", 0)]
    # 63 bits of sha256("a") = ca978112ca1bbdca...: the first 8 bytes shifted right by one bit.
    assert rows[0]["prompt_index"] == id_number("a") == 0xCA978112CA1BBDCA >> 1
    assert len(read_manifest(runs.out).attempts) == 2


def test_given_numbers_are_kept(runs: Runs, planless: Open) -> None:
    """A seed of the loop's own, sampling of the request's own, max_tokens clamped to the context."""
    with planless() as writer:
        request = writer.request("a", [1] * 250, seed=7, temperature=0.5, top_k=4, stop="x")
        assert request.sampling_params == {
            "seed": 7,
            "temperature": 0.5,
            "top_p": 0.95,
            "top_k": 4,
            "min_p": 0.0,
            "max_tokens": 6,  # of a context of 256
            "stop": ["x"],
            "stop_token_ids": [],
        }
        writer.add(request, plain(request))
    [row] = table(runs.out).to_pylist()
    assert (row["seed"], row["temperature"], row["top_k"]) == (7, 0.5, 4)
    status = run_status(runs.out)
    assert (status.planned, status.owed, status.stored, status.state) == (None, None, 1, "stopped")


def test_several_sequences_of_one_output(runs: Runs, planless: Open) -> None:
    """They become consecutive samples, with the seeds that vLLM gives the children of a request: seed + j."""
    with planless() as writer:
        request = writer.request("a", [1], 2, seed=100)
        parts = [dataclasses.replace(request, given_seed=100 + j) for j in range(3)]
        writer.add(request, vllm(*parts))
    rows = table(runs.out).to_pylist()
    assert [(row["sample_index"], row["seed"]) for row in rows] == [(2, 100), (3, 101), (4, 102)]
    assert [row["token_ids"] for row in rows] == [plain(part)["token_ids"].tolist() for part in parts]


def test_several_sequences_of_a_planned_prompt(runs: Runs, planned: Open) -> None:
    """Only the first would have the seed of the plan, by which a retry finds its random stream again."""
    with planned() as writer:
        first = next(writer.owed())
        with pytest.raises(UsageError, match=r"an output of 2 sequences: .* one sample each"):
            writer.add(first, vllm(first, first))
    assert runs.stored() == []


@pytest.mark.parametrize(
    ("change", "kind", "expected"),
    [
        ({"finish_reason": "abort"}, CaptureError, "'abort' is not one of"),
        ({"token_ids": np.array([], np.int32)}, CaptureError, "no token was generated"),
        ({"mask_ids": np.array([1], np.int32), "mask_offsets": np.array([0, 1])}, CaptureError, "sampling masks of 1"),
    ],
    ids=["aborted", "empty", "misaligned"],
)
def test_refused_outputs_are_recorded_and_owed(
    runs: Runs, planned: Open, change: dict[str, Any], kind: type[RollgenError], expected: str
) -> None:
    """Nothing is stored of them; a failure line says why; the same request may be added when it is made again."""
    with planned(limit=1, n=1) as writer:
        [request] = writer.owed()
        with pytest.raises(kind, match=expected):
            writer.add(request, plain(request) | change)
        [failure] = read_failures(runs.out)
        assert (failure.prompt_id, failure.sample_index, failure.stage) == ("p0", 0, "capture")
        assert expected in failure.error
        assert runs.stored() == []
        writer.add(request, plain(request))
    assert runs.stored() == [(0, 0)]


def test_broken_invariants_are_refused(runs: Runs, planned: Open) -> None:
    """An id outside its support passes no writer."""
    with planned(limit=1, n=1) as writer:
        [request] = writer.owed()
        output = plain(request)
        with pytest.raises(CaptureError, match=r"\(p0, 0\): token 0: the sampled id \d+ is not in its support"):
            writer.add(request, output | {"token_ids": (output["token_ids"] + 2) % VOCAB_SIZE})
        [failure] = read_failures(runs.out)
        assert failure.stage == "invariant"


def test_incomplete_support_says_ask_again(runs: Runs, planned: Open) -> None:
    """With logprobs capture, a table whose last id is still finite is never taken for a whole support."""
    with planned(limit=1, n=1, capture="logprobs") as writer:
        [request] = writer.owed()
        half = np.log(0.5)
        most_likely = {5: half, 6: half}
        output = {"token_ids": [5], "logprobs": [most_likely], "finish_reason": "stop"}
        with pytest.raises(IncompleteSupport):
            writer.add(request, output)
        most_likely[7] = -np.inf
        writer.add(request, output)
    [row] = table(runs.out).to_pylist()
    assert row["sampling_mask"] == [[5, 6]]


def test_an_engine_without_masks_is_unfit(planned: Open) -> None:
    """Native capture, and no mask came: no row, whatever else is there."""
    with planned() as writer:
        request = next(iter(writer.owed()))
        with pytest.raises(UnfitEngine, match="returned no sampling mask although sampling truncates"):
            writer.add(request, {"token_ids": [5], "logprobs": [-0.5], "finish_reason": "stop"})


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


def test_each_way_has_its_own_methods(planned: Open, planless: Open) -> None:
    """And a dataset is of one kind for good."""
    with planned() as writer:
        for call in (lambda: writer.request("a", [1]), lambda: writer.is_stored("a"), lambda: writer.owns("a")):
            with pytest.raises(UsageError, match="this dataset has a plan; take requests from owed"):
                call()
    with pytest.raises(ResumeRefused, match="has a plan; give the prompts"):
        planless()


def test_planless_has_no_owed(runs: Runs, planned: Open, planless: Open) -> None:
    """Nor can it be planned later, by a loop or by the command."""
    with planless() as writer, pytest.raises(UsageError, match="owed: nothing is owed without a plan"):
        writer.owed()
    with pytest.raises(ResumeRefused, match="has no plan: its prompts came one by one"):
        planned()
    with pytest.raises(ResumeRefused, match="has no plan"):
        runs(resume=True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"prompt_id": ""}, "prompt_id must be a non-empty string, got ''"),
        ({"prompt_id": 7}, "prompt_id must be a non-empty string, got 7"),
        ({"prompt_id": "\ud800"}, "prompt_id holds half of a surrogate pair"),
        ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
        ({"prompt_token_ids": [512]}, "id 512 is outside the model's vocabulary, 0 to 511"),
        ({"prompt_token_ids": [-1]}, "id -1 is outside the model's vocabulary"),
        ({"prompt_token_ids": [1.5]}, "must be a list of whole numbers"),
        ({"prompt_token_ids": [[1], [2, 3]]}, "must be a list of whole numbers"),
        ({"prompt_token_ids": [1] * 256}, "the prompt fills the context: 256 tokens of 256"),
        ({"sample_index": -1}, "sample_index must be a whole number from 0 to 2147483647, got -1"),
        ({"sample_index": 2**31}, "sample_index must be a whole number"),
        ({"seed": 2**63}, "seed must be a whole number from 0 to 9223372036854775807"),
        ({"metadata": {"a": object()}}, "metadata: a: a object is not a JSON value"),
        ({"metadata": {"a": float("nan")}}, "metadata: NaN is not JSON (in a)"),
        ({"metadata": {1: 0, "1": 0}}, "key 1 is not text"),
        ({"prompt": 7}, "prompt must be a string, got 7"),
        ({"temperature": 0}, "temperature must be a number above 0"),
        ({"temperature": np.float32(3)}, "temperature must be a number above 0"),
        ({"top_k": 0, "top_p": 0.5}, "top_p and min_p need a top_k"),
        ({"stop_token_ids": [999]}, "id 999 is outside"),
        ({"n": 2}, "n is not a sampling parameter of a request"),
        ({"presence_penalty": 1.0}, "presence_penalty is not a sampling parameter of a request"),
    ],
)
def test_requests_are_checked_like_rows(planless: Open, arguments: dict[str, Any], expected: str) -> None:
    """What no prompt file could hold makes no request."""
    with planless() as writer, pytest.raises(UsageError) as raised:
        writer.request(**({"prompt_id": "a", "prompt_token_ids": [1]} | arguments))
    assert expected in str(raised.value)


def test_all_problems_of_a_request_come_together(planless: Open) -> None:
    """One error, one line."""
    with planless() as writer, pytest.raises(UsageError) as raised:
        writer.request("a", [], top_k=-7, prompt=3)
    assert str(raised.value).startswith("prompt 'a': prompt must be a string, got 3; prompt_token_ids is empty; top_k ")


def test_arrays_are_token_ids_too(planless: Open) -> None:
    """Of any integer dtype."""
    with planless() as writer:
        request = writer.request("a", np.array([1, 2], np.uint16))
    assert request.prompt.token_ids.dtype == np.int32
    assert request.prompt.token_ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("settings", "capture"),
    [
        ({}, "native"),
        ({"capture": "native"}, "native"),
        ({"capture": "logprobs"}, "logprobs"),
        ({"top_k": 0, "top_p": 1.0}, "none"),
    ],
)
@pytest.mark.parametrize("kind", ["planned", "planless"])
def test_auto_capture_means_native(
    request: pytest.FixtureRequest, settings: dict[str, Any], capture: str, kind: str
) -> None:
    """Unless the run truncates nothing; a continued dataset keeps what it has."""
    opener = request.getfixturevalue(kind)
    for again in (settings, {name: value for name, value in settings.items() if name != "capture"}):
        with opener(**again) as writer:
            assert writer.manifest.capture == capture


def test_a_dataset_that_never_truncates_takes_no_support(planless: Open) -> None:
    """Its manifest says that all supports are null; more samples without truncation are welcome."""
    with planless(top_k=0, top_p=1.0) as writer:
        with pytest.raises(UsageError, match="this dataset began without top_k, top_p and min_p"):
            writer.request("a", [1], top_k=5)
        request = writer.request("a", [1])
        writer.add(request, plain(request))


def test_identity_is_checked_key_by_key(planned: Open, planless: Open, runs: Runs) -> None:
    """As by `--resume`; operational settings may change."""
    planned().close()
    planned(commit_interval=1.0).close()
    with pytest.raises(ResumeRefused, match=r"other settings: top_k \(8 -> 9\);"):
        planned(top_k=9)
    with pytest.raises(ResumeRefused, match="dtype"):
        planned(dtype="float16")
    runs.out = runs.out.with_name("open")
    planless().close()
    with pytest.raises(ResumeRefused, match=r"other settings: seed \(0 -> 1\);"):
        planless(seed=1)


def test_config_or_settings(runs: Runs) -> None:
    """One or the other; wrong settings are named without the environment."""
    config = RunConfig(model=str(runs.model))
    with RolloutWriter(runs.out, config, engine=ENGINE) as writer:
        assert writer.manifest.identity["top_k"] == 50
    with pytest.raises(UsageError, match=r"^n: give a config or single settings, not both"):
        RolloutWriter(runs.out, config, engine=ENGINE, n=2)
    with pytest.raises(UsageError, match="settings: unknown key 'topk'"):
        RolloutWriter(runs.out, topk=2)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"writer": "a-b"}, "writer: 'a-b' is no name for a writer; use letters, digits and underscores"),
        ({"writer": ""}, "is no name for a writer"),
        ({"part": (2, 2)}, r"part: \(2, 2\) is none of 2 parts"),
        ({"part": (-1, 2)}, r"part: \(-1, 2\) is none"),
        ({"engine": "no_such_engine"}, "engine: 'no_such_engine' is not installed here"),
    ],
)
def test_arguments_are_checked_before_anything_is_made(
    runs: Runs, planless: Open, arguments: dict[str, Any], expected: str
) -> None:
    """No directory then."""
    with pytest.raises(UsageError, match=expected):
        planless(**arguments)
    assert not runs.out.exists()


@pytest.mark.parametrize("exists", [False, True])
def test_a_failed_start_leaves_nothing(runs: Runs, planned: Open, exists: bool) -> None:
    """A bad row: the directory is as it was, and free."""
    if exists:
        runs.out.mkdir()
    runs.write_prompts(2, bad=[1])
    with pytest.raises(UsageError, match="no prompt"):
        planned()
    assert runs.out.exists() is exists
    assert not exists or live_writers(runs.out) == frozenset()
    assert not list(runs.out.rglob("*.parquet"))


def test_foreign_directories_are_left_alone(runs: Runs, planless: Open) -> None:
    """Not even a lock is made."""
    runs.out.mkdir()
    (runs.out / "notes.txt").touch()
    with pytest.raises(UsageError, match="holds files that are not a rollgen run"):
        planless()
    assert [path.name for path in runs.out.iterdir()] == ["notes.txt"]


def test_skipped_rows_are_recorded_by_the_first_writer(runs: Runs, planned: Open) -> None:
    """Once for all writers, and never owed."""
    runs.write_prompts(3, bad=[1])
    with (
        planned(on_bad_row="skip", writer="a", part=(0, 2)) as one,
        planned(on_bad_row="skip", writer="b", part=(1, 2)) as other,
    ):
        assert [key(request) for request in one.owed()] == [(0, 0), (0, 1), (2, 0), (2, 1)]
        assert list(other.owed()) == []
    assert [(failure.prompt_id, failure.stage) for failure in read_failures(runs.out)] == [("p1", "input")]


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
