"""What is known about a model before it loads."""

import hashlib
import json
import shutil
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from models.disk import largest_file
from models.tiny import CHAT_TEMPLATE, CONTEXT_LENGTH, VOCAB_SIZE

from rollgen.config import RunConfig
from rollgen.errors import DatasetError, UsageError
from rollgen.prompts.model import load_model_info, usage_errors


@pytest.fixture
def model(tmp_path, tiny_model):
    """A copy of the tiny model that a test may change."""
    return shutil.copytree(tiny_model, tmp_path / "my-model")


def set_config(model, **changes):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **changes}))


def test_facts_of_a_local_model(model):
    """No absolute path in the name; the vocabulary is the model's."""
    info = load_model_info(RunConfig(), str(model))
    assert (info.name, info.path_or_id, info.revision) == ("my-model", str(model), None)
    assert (info.vocab_size, info.tokenizer_vocab_size) == (VOCAB_SIZE, len(info.tokenizer))
    assert info.tokenizer_vocab_size < info.vocab_size
    assert (info.context_length, info.dtype) == (CONTEXT_LENGTH, "bfloat16")
    assert info.chat_template_sha256 == hashlib.sha256(CHAT_TEMPLATE.encode()).hexdigest()


@pytest.mark.parametrize(("asked", "dtype"), [("float32", "float32"), ("half", "float16"), ("float", "float32")])
def test_dtype_as_asked(model, asked, dtype):
    """Under its main name."""
    assert load_model_info(RunConfig(dtype=asked), str(model)).dtype == dtype


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        pytest.param({"max_position_embeddings": 64}, 64, id="smaller than the tokenizer's"),
        pytest.param({"max_position_embeddings": 4096}, 256, id="the tokenizer's model_max_length"),
        pytest.param(
            {
                "max_position_embeddings": 64,
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            },
            128,
            id="linear RoPE scaling",
        ),
        pytest.param(
            {
                "max_position_embeddings": 128,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 64,
                },
            },
            128,
            id="YaRN is scaled already",
        ),
    ],
)
def test_context_length_is_vllms(model, changes, length):
    """The smallest limit, scaled as vLLM scales it."""
    set_config(model, **changes)
    assert load_model_info(RunConfig(), str(model)).context_length == length


def test_max_model_len_may_only_shrink_the_context(model):
    """More than the model has would need extrapolation that nobody asked for."""
    assert load_model_info(RunConfig(max_model_len=100), str(model)).context_length == 100
    with pytest.raises(UsageError, match="--max-model-len: 300 tokens, but the model's context is 256"):
        load_model_info(RunConfig(max_model_len=300), str(model))


def test_a_template_file_replaces_the_tokenizers(model, tmp_path):
    """And is hashed by its text."""
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}")
    assert load_model_info(RunConfig(chat_template=str(file)), str(model)).chat_template == "{{ messages[0].content }}"
    file.write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"--chat-template: .*not UTF-8"):
        load_model_info(RunConfig(chat_template=str(file)), str(model))
    with pytest.raises(UsageError, match=r"--chat-template: .*cannot read it"):
        load_model_info(RunConfig(chat_template=str(tmp_path / "absent")), str(model))


def test_no_template(model):
    """A base model has none; that is fine for raw prompts."""
    (model / "chat_template.jinja").unlink()
    info = load_model_info(RunConfig(), str(model))
    assert (info.chat_template, info.chat_template_sha256) == (None, None)


def test_another_tokenizer(model, tmp_path):
    """`--tokenizer` is read from its own directory."""
    other = shutil.copytree(model, tmp_path / "tokenizer")
    (model / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match="cannot load the tokenizer"):
        load_model_info(RunConfig(), str(model))
    assert load_model_info(RunConfig(tokenizer=str(other)), str(model)).tokenizer_vocab_size > 0


@pytest.mark.parametrize("name", ["./absent", "/absent/model", "a/b/c"])
def test_missing_paths_are_refused_without_network(name):
    """What cannot be a Hugging Face id is a path."""
    with pytest.raises(UsageError, match="no such model directory"):
        load_model_info(RunConfig(), name)


def test_what_is_not_a_model_is_refused(model, tmp_path):
    """A file, an empty directory, a config that is not one, an unknown dtype."""
    with pytest.raises(UsageError, match="is a file"):
        load_model_info(RunConfig(), str(model / "model.safetensors"))
    with pytest.raises(UsageError, match=r"no config\.json"):
        load_model_info(RunConfig(), str(tmp_path))
    with pytest.raises(UsageError, match="--dtype: unknown dtype 'int3'"):
        load_model_info(RunConfig(dtype="int3"), str(model))
    (model / "config.json").write_text("{")
    with pytest.raises(UsageError, match="cannot load the model's config"):
        load_model_info(RunConfig(), str(model))


def test_loading_is_silent(model, capfd):
    """Advice of other libraries about the model is not the user's business here."""
    load_model_info(RunConfig(), str(model))
    assert capfd.readouterr() == ("", "")


def test_a_served_model_is_named_without_its_directory(model):
    """vLLM serves a model under its path when it is given no other name; datasets travel."""
    served = SimpleNamespace(name="/home/me/models/tiny", fingerprint="unknown", max_model_len=64)
    info = load_model_info(RunConfig(), str(model), served)
    assert (info.name, info.context_length) == ("tiny", 64)


@pytest.mark.parametrize("size", [100, 2_000, 5_000])
def test_a_full_temporary_directory(model, tmp_path, monkeypatch, size):
    """One line with the way out, whichever of the files does not fit and whichever library meets it."""
    info = load_model_info(RunConfig(), str(model))
    scratch, directory = tmp_path / "scratch", tmp_path / "tokenizer"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    with (
        largest_file(size),
        pytest.raises(DatasetError, match=rf"^{scratch}: cannot hold the tokenizer's files: .*File too large.*TMPDIR$"),
    ):
        info.save_tokenizer(directory)
    assert not directory.exists()
    assert not any(scratch.iterdir())
    info.save_tokenizer(directory)
    assert {path.name for path in directory.iterdir()} >= {"tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize(
    ("is_offline", "why"), [(False, "no connection to huggingface.co"), (True, "HF_HUB_OFFLINE is set")]
)
def test_a_model_that_cannot_be_fetched(monkeypatch, is_offline, why):
    """Not the library's advice about its cache, cut in the middle of a URL, but what is wrong and what to do."""
    monkeypatch.setattr("rollgen.prompts.model.HF_HUB_OFFLINE", is_offline)
    advice = OSError("We couldn't connect to 'https://huggingface.co'" * 9)
    advice.__cause__ = LocalEntryNotFoundError("not in the cache")
    with pytest.raises(UsageError) as refusal, usage_errors("org/model", "the model"):
        raise advice
    assert str(refusal.value) == (
        f"org/model: cannot be fetched: {why}, and it is not in the cache; give a local directory, or check --model, "
        "--tokenizer and --revision"
    )
