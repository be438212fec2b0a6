"""Real vLLM servers: what they return is what vLLM in this process samples, and what goes wrong has words.

Two servers for all tests: one with native masks, on Model Runner V2 under Triton's interpreter, which is started with
few logprobs, and one without masks. They are compared with runs in process that have one request in a batch at a time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from models.vllm_server import VllmServer
from native.proof import ALONE
from transformers import AutoTokenizer

from rollgen.config import RunConfig
from rollgen.engines.base import SampleRequest
from rollgen.engines.http import HttpEngine
from rollgen.engines.server import describe
from rollgen.errors import UsageError
from rollgen.format.journal import list_shards
from rollgen.rollouts import Prompt, Sampling
from rollgen.verify.dataset import verify_dataset

pytestmark = pytest.mark.vllm

INTERPRETED_TRITON = Path(__file__).parent / "interpreted_triton"
VOCAB_SIZE = 512
KEY = "a-key-of-the-server"
SETTINGS: dict[str, Any] = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "max_tokens": 6, "n": 2}
PROMPTS = [
    {"id": "text", "prompt": "The sea is wide"},
    {"id": "ids", "prompt_token_ids": [0, 17, 300, 4]},
    {"id": "chat", "messages": [{"role": "user", "content": "What is the sum of seven and five?"}]},
    {"id": "stops", "prompt": "The fox", "stop": ["e"], "stop_token_ids": [7, 8, 9]},
]
Row = dict[str, Any]


@pytest.fixture(scope="module")
def starting(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, VllmServer]]:
    """`native` and `logprobs`, by the capture that they are for, not yet waited for."""
    scratch = tmp_path_factory.mktemp("servers")
    common = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--api-key", KEY]
    variables = {"PYTHONPATH": str(INTERPRETED_TRITON), "VLLM_USE_V2_MODEL_RUNNER": "1"}
    servers = {
        "native": VllmServer(tiny_model, scratch, [*common, "--return-sampling-mask"], variables),
        "logprobs": VllmServer(tiny_model, scratch, [*common, "--max-logprobs", "-1"], {}),
    }
    for server in servers.values():
        server.start()
    yield servers
    for server in servers.values():
        server.stop()


@pytest.fixture(scope="module")
def prompts(write_prompts: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of PROMPTS."""
    path: Path = write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", PROMPTS)
    return path


@pytest.fixture(scope="module")
def in_process(
    starting: object, prompts: Path, tiny_model: Path, rollgen: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Datasets made without a server, by their capture: while the servers start."""
    directory = tmp_path_factory.mktemp("in-process")
    running = {}
    for capture, variables in (("native", {"PYTHONPATH": str(INTERPRETED_TRITON)}), ("logprobs", {})):
        rollgen.environment.update(variables)
        out = directory / capture
        running[out] = rollgen.start("generate", prompts, "--out", out, "--model", tiny_model, *flags(), *ALONE)
        for name in variables:
            del rollgen.environment[name]
    for process in running.values():
        _, stderr = process.communicate(timeout=900)
        assert process.returncode == 0, stderr
    return {out.name: out for out in running}


@pytest.fixture(scope="module")
def servers(starting: dict[str, VllmServer], in_process: object) -> dict[str, VllmServer]:
    """Those of `starting`, answering."""
    for server in starting.values():
        server.wait()
    return starting


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is looked for by default."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)


def flags() -> list[object]:
    """SETTINGS as a command line."""
    options = [part for name, value in SETTINGS.items() for part in (f"--{name.replace('_', '-')}", value)]
    return [*options, "--dtype", "float32", "--progress", "none"]


def read_rows(dataset: Path) -> dict[tuple[str, int], Row]:
    """All rows, by their key."""
    rows = [row for shard in list_shards(dataset) for row in pq.read_table(shard).to_pylist()]
    keyed = {(row["prompt_id"], row["sample_index"]): row for row in rows}
    assert len(keyed) == len(rows)
    return keyed


def make_engine(url: str, capture: str = "auto", *, untruncated: str = "none", **settings: Any) -> HttpEngine:
    tokenizer = AutoTokenizer.from_pretrained(describe([url], KEY).root)
    return HttpEngine(
        RunConfig.model_validate(SETTINGS | settings),
        url,
        vocab_size=VOCAB_SIZE,
        capture_wanted=capture,  # type: ignore[arg-type]
        untruncated=untruncated,  # type: ignore[arg-type]
        replayable=True,
        decode=str,
        encode=partial(tokenizer.encode, add_special_tokens=False),
        dtype="float32",
    )


@pytest.mark.parametrize("capture", ["native", "logprobs"])
def test_dataset_is_that_of_vllm_in_process(
    servers: dict[str, VllmServer],
    in_process: dict[str, Path],
    prompts: Path,
    rollgen: Any,
    tmp_path: Path,
    capture: str,
) -> None:
    """4 prompts, 2 samples each, one request at a time: every column is equal, logprobs to 4e-5; and it is sound."""
    out = tmp_path / "out"
    rollgen("generate", prompts, "--out", out, "--server", servers[capture].url, *flags(), "--max-num-seqs", 1)
    assert verify_dataset(out).is_clean
    assert json.loads((out / "rollgen.json").read_text())["capture"] == capture
    rows, expected = read_rows(out), read_rows(in_process[capture])
    assert len(rows) == len(expected) == 8
    for key, row in expected.items():
        np.testing.assert_allclose(rows[key]["logprobs"], row.pop("logprobs"), atol=4e-5)
        assert {name: rows[key][name] for name in row} == row
        assert rows[key]["weight_versions"] is not None
    told = b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    assert KEY.encode() not in told


def test_descriptions(servers: dict[str, VllmServer]) -> None:
    """Both serve the same model; only with their key."""
    found = describe([server.url for server in servers.values()], KEY)
    assert (found.name, found.max_model_len) == ("tiny", 256)
    with pytest.raises(UsageError, match="--api-key-env"):
        describe([servers["native"].url], None)


@pytest.mark.parametrize(
    ("server", "how", "problem"),
    [
        ("logprobs", {"capture": "native"}, "start it with --return-sampling-mask"),
        ("native", {"capture": "logprobs"}, "start it with --max-logprobs 52 at least"),  # 20 + 32
        ("native", {"capture": "none", "untruncated": "some"}, "refuses prompts with top_k 0"),
        ("logprobs", {"sampling_arg": {"typo": 1}}, "--sampling-arg typo: vLLM .* has no such sampling parameter"),
        ("logprobs", {"sampling_arg": {"bad_words": 3}}, "refuses how this run samples"),
        ("logprobs", {"max_model_len": 512}, "the context of .* is 256"),
    ],
    ids=str,
)
def test_misconfigured(servers: dict[str, VllmServer], server: str, how: dict[str, Any], problem: str) -> None:
    """vLLM's own refusals are understood."""
    with pytest.raises(UsageError, match=problem):
        make_engine(servers[server].url, **how)


def test_the_model_is_checked(servers: dict[str, VllmServer], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM tokenizes for us, refuses ids that are none of its model's, and names the request in its answer."""
    url = servers["logprobs"].url
    assert [note for note in make_engine(url, "logprobs").notes if "check" in note] == []
    for vocab_size, how_many in ((VOCAB_SIZE + 1, "fewer"), (VOCAB_SIZE - 1, "more")):
        monkeypatch.setattr(f"{__name__}.VOCAB_SIZE", vocab_size)
        with pytest.raises(UsageError, match=f"vocabulary of {vocab_size} ids, and what .* serves has {how_many}"):
            make_engine(url, "logprobs")


def test_untruncated(servers: dict[str, VllmServer]) -> None:
    """A server without masks takes the control run, and mixed runs."""
    assert make_engine(servers["logprobs"].url, "none", untruncated="some", top_k=0, top_p=1, min_p=0).capture == "none"
    assert make_engine(servers["logprobs"].url, "auto", untruncated="some").capture == "logprobs"


def test_sampling_arguments(servers: dict[str, VllmServer]) -> None:
    """Those that are known are taken, in vLLM's own types."""
    arguments = {
        "min_tokens": 3,
        "allowed_token_ids": list(range(300)),
        "repetition_detection": {"max_pattern_size": 4, "min_count": 3},
        "logit_bias": {"5": 1.5},
    }
    assert make_engine(servers["logprobs"].url, sampling_arg=arguments).capture == "logprobs"


def test_cancelled_requests_are_aborted(servers: dict[str, VllmServer]) -> None:
    """The server stops generating: its count of running requests is back at none, before all tokens are there.

    A request may be over before it is seen at work, but not all of ten.
    """
    server = servers["native"]
    engine = make_engine(server.url, sampling_arg={"ignore_eos": True})
    prompt = Prompt("p", 0, np.arange(3, dtype=np.int32), Sampling(top_k=20, max_tokens=250), 1, 0)

    async def cancel() -> None:
        await engine.start()
        sampling = asyncio.create_task(engine.sample(SampleRequest(prompt, 0)))
        while not server.running() and not sampling.done():
            await asyncio.sleep(0.02)
        sampling.cancel()
        while server.running():
            await asyncio.sleep(0.02)
        engine.close()

    for _ in range(10):
        before = server.generated()
        asyncio.run(cancel())
        if server.generated() - before < 250:
            return
    pytest.fail("all were generated to their end")


def test_server_killed_in_mid_run(
    servers: dict[str, VllmServer], write_prompts: Any, rollgen: Any, wait_for_shards: Any, tmp_path: Path
) -> None:
    """SIGKILL after the first commit, and started again: every sample is there, once, and the run has not failed."""
    prompts = write_prompts(tmp_path / "many.jsonl", [{"id": f"p{i}", "prompt": f"The {i}"} for i in range(15)])
    out, server = tmp_path / "out", servers["logprobs"]
    options = ["--max-tokens", 150, "--commit-interval", 0.5, "--max-num-seqs", 8, "--json"]
    process = rollgen.start("generate", prompts, "--out", out, "--server", server.url, *flags(), *options)
    wait_for_shards(out, 1, process)
    server.kill()
    server.start()
    stdout, stderr = process.communicate(timeout=900)
    assert process.returncode == 0, stderr
    summary = json.loads(stdout)
    print(summary)
    assert (summary["stored"], summary["failed"]) == (30, 0)
    assert read_rows(out).keys() == {(f"p{i}", k) for i in range(15) for k in range(2)}
    assert verify_dataset(out).is_clean
