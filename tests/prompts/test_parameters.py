"""Sampling parameters of rows and of the run."""

import pytest

from rollgen.config import RunConfig
from rollgen.errors import UsageError
from rollgen.prompts.parameters import (
    ROW_KEYS,
    RUN_ONLY_KEYS,
    Parameters,
    check_encodable,
    check_token_ids,
    run_parameters,
    show,
    take_parameters,
)
from rollgen.rollouts import Sampling

VOCAB = 100
RUN = Parameters(Sampling(temperature=1.0, top_p=0.9, top_k=20, max_tokens=64, stop=("END",)), n=2, seed=5)


def take(fields):
    problems = []
    parameters = take_parameters(fields, RUN, VOCAB, problems)
    return parameters, problems


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        pytest.param({"temperature": 0.001}, {"temperature": 0.01}, id="raised to vLLM's minimum"),
        pytest.param({"temperature": 2}, {"temperature": 2}, id="largest temperature"),
        pytest.param({"top_k": -1, "top_p": 1}, {"top_k": 0, "top_p": 1}, id="off"),
        pytest.param({"top_k": 100, "top_p": 1.0}, {"top_k": 0, "top_p": 1}, id="top_k of the vocabulary cuts nothing"),
        pytest.param({"top_k": 5000}, {"top_k": 100}, id="top_k beyond the vocabulary, with top_p"),
        pytest.param({"min_p": 0.1, "top_p": 1, "top_k": 7}, {"min_p": 0.1, "top_p": 1, "top_k": 7}, id="min_p"),
        pytest.param({"stop": "\n"}, {"stop": ("\n",)}, id="one stop string replaces the run's"),
        pytest.param({"stop": []}, {"stop": ()}, id="no stop strings"),
        pytest.param({"stop_token_ids": [0, 99]}, {"stop_token_ids": (0, 99)}, id="stop ids"),
        pytest.param({"max_tokens": 1}, {"max_tokens": 1}, id="one token"),
    ],
)
def test_a_row_overrides_the_run(own, expected):
    """Values given are effective, all others are the run's."""
    parameters, problems = take(own)
    assert not problems
    base = {name: getattr(RUN.sampling, name) for name in Sampling.__dataclass_fields__}
    assert parameters.sampling == Sampling(**{**base, **expected})
    assert (parameters.n, parameters.seed) == (2, 5)


def test_n_and_seed_of_a_row():
    """The largest seed fits the format's int64."""
    parameters, problems = take({"n": 7, "seed": 2**63 - 1, "other": 1})
    assert (parameters.n, parameters.seed, problems) == (7, 2**63 - 1, [])


@pytest.mark.parametrize(
    ("own", "message"),
    [
        pytest.param({"temperature": 0}, "temperature must be a number above 0", id="greedy"),
        pytest.param({"temperature": 2.1}, "at most 2, got 2.1", id="temperature"),
        pytest.param({"temperature": "1"}, 'got "1"', id="temperature as text"),
        pytest.param({"temperature": True}, "got true", id="a boolean is no number"),
        pytest.param({"temperature": float("inf")}, "temperature must be", id="1e400"),
        pytest.param({"top_p": 0}, "top_p must be a number from 1e-6", id="top_p 0"),
        pytest.param({"top_p": 1.5}, "top_p must be", id="top_p 1.5"),
        pytest.param({"top_k": -2}, "top_k must be", id="top_k -2"),
        pytest.param({"top_k": 2.0}, "top_k must be a whole number", id="top_k 2.0"),
        pytest.param({"min_p": -0.1}, "min_p must be", id="min_p"),
        pytest.param({"n": 0}, "n must be a whole number from 1 to 2^31 - 1, got 0", id="n 0"),
        pytest.param({"n": 2**31}, "n must be", id="n beyond int32"),
        pytest.param({"max_tokens": 0}, "max_tokens must be", id="max_tokens"),
        pytest.param({"seed": -1}, "seed must be", id="negative seed"),
        pytest.param({"seed": 2**63}, "seed must be", id="seed beyond int64"),
        pytest.param({"stop": ""}, "stop must be a non-empty string", id="empty stop"),
        pytest.param({"stop": ["a", 3]}, "stop must be", id="stop list with a number"),
        pytest.param({"stop": "\ud800"}, "stop holds half of a surrogate pair", id="stop without UTF-8 form"),
        pytest.param({"stop_token_ids": [100]}, "id 100 is outside the model's vocabulary, 0 to 99", id="stop id"),
        pytest.param({"stop_token_ids": 2}, "must be a list of token ids", id="stop id alone"),
        pytest.param({"top_k": 0}, "need a top_k, which bounds the support", id="top_p without top_k"),
        pytest.param({"repetition_penalty": 1.1}, "repetition_penalty is a sampling parameter", id="penalty"),
    ],
)
def test_bad_values_are_refused(own, message):
    """With the name, the range and the value; the run's value stands in."""
    parameters, problems = take(own)
    assert len(problems) == 1
    assert message in problems[0]
    assert parameters == RUN


def test_all_problems_are_reported_and_n_is_still_read():
    """So that a tombstone knows how many samples it stands for."""
    parameters, problems = take({"n": 4, "top_p": 7, "temperature": 0, "logit_bias": {}})
    assert len(problems) == 3
    assert parameters.n == 4


def test_run_defaults_are_effective_and_checked():
    """A stop id that the model does not have is the run's mistake, not a row's."""
    assert run_parameters(RunConfig(top_k=1000), VOCAB).sampling.top_k == 100
    with pytest.raises(UsageError, match=r"--stop-token-ids: .* id 100 is outside"):
        run_parameters(RunConfig(stop_token_ids=(100,)), VOCAB)
    with pytest.raises(UsageError, match=r"--stop: stop must be a non-empty string"):
        run_parameters(RunConfig(stop=("",)), VOCAB)


@pytest.mark.parametrize("ids", [[], [0], [99, 0, 99]])
def test_good_token_ids(ids):
    """The whole vocabulary, in any order."""
    assert check_token_ids("ids", ids, VOCAB) is None


@pytest.mark.parametrize("ids", [[-1], [100], [True], [1.0], ["1"], [None], [[1]], "12", {"0": 1}, [10**70]])
def test_bad_token_ids(ids):
    """Anything but a list of whole numbers inside the vocabulary."""
    assert check_token_ids("ids", ids, VOCAB) is not None


def test_surrogates_have_no_utf8_form():
    """A pair is one character and fine; half of one is not."""
    assert check_encodable("prompt", "\U0001f600 \x00") is None
    assert "half of a surrogate pair" in check_encodable("prompt", "a\udfff")


def test_shown_values_are_short_and_printable():
    """An error is one line."""
    assert show("a\n\ud800") == '"a\\n\\ud800"'
    assert len(show(list(range(1000)))) == 60


@pytest.mark.vllm
def test_names_are_those_of_vllm():
    """Every public field of vLLM's SamplingParams is either taken per row or refused there."""
    from vllm import SamplingParams

    public = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert public == RUN_ONLY_KEYS | set(ROW_KEYS)
