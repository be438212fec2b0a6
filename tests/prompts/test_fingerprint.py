"""A model is its content: not its path, not its age."""

import os
import shutil

import pytest
import torch
from models.tiny import make_tiny_tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from rollgen.errors import UsageError
from rollgen.prompts.fingerprint import (
    directory_fingerprint,
    saved_tokenizer_sha256,
    stored_tokenizer,
    tokenizer_sha256,
    weight_files,
)


@pytest.fixture
def model(tmp_path, tiny_model):
    """A copy of the tiny model that a test may change."""
    return shutil.copytree(tiny_model, tmp_path / "model")


def test_path_and_mtime_do_not_matter(model, tiny_model):
    """A moved or touched model is the same model."""
    os.utime(model / "model.safetensors", (0, 0))
    assert directory_fingerprint(model) == directory_fingerprint(tiny_model)


def test_files_beside_the_model_do_not_matter(model, tiny_model):
    """What a trainer or an editor leaves there."""
    for name in ("trainer_state.json", "training_args.bin", "optimizer.pt", "README.md", "events.log"):
        (model / name).write_bytes(b"{}")
    assert directory_fingerprint(model) == directory_fingerprint(tiny_model)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"])
def test_every_metadata_file_matters(model, tiny_model, name):
    """To the last byte."""
    (model / name).write_bytes((model / name).read_bytes() + b"\n")
    assert directory_fingerprint(model) != directory_fingerprint(tiny_model)


def test_training_any_one_tensor_makes_another_model(model, tiny_model):
    """Overwritten in place, same size and header: each tensor in turn changed everywhere by one rounding step."""
    weights = model / "model.safetensors"
    seen = {directory_fingerprint(tiny_model)}
    original = load_file(weights)
    for name, tensor in original.items():
        changed = torch.nextafter(tensor, torch.full_like(tensor, torch.inf))
        save_file({**original, name: changed}, weights, metadata={"format": "pt"})
        seen.add(directory_fingerprint(model))
    assert len(seen) == 1 + len(original)


def test_a_renamed_tensor_makes_another_model(model, tiny_model):
    """The header is hashed whole."""
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content.replace(b"lm_head.weight", b"lm_heaD.weight", 1))
    assert directory_fingerprint(model) != directory_fingerprint(tiny_model)


@pytest.mark.parametrize("suffix", ["bin", "gguf"])
def test_other_weight_formats_are_sampled(model, suffix):
    """64 blocks of 4 KiB of 1 MB, and the last one: a change of the whole file or of its end is seen."""
    (model / "model.safetensors").unlink()
    weights = model / f"pytorch_model.{suffix}"
    prints = set()
    for content in (bytes(1_000_000), b"\x01" * 1_000_000, bytes(999_999) + b"\x01", bytes(1_000_001)):
        weights.write_bytes(content)
        prints.add(directory_fingerprint(model))
    assert len(prints) == 4


def test_weights_are_found_in_the_engines_order(model):
    """safetensors before .bin; a trainer's .bin files are not weights."""
    (model / "pytorch_model.bin").write_bytes(b"x")
    (model / "training_args.bin").write_bytes(b"x")
    assert [path.name for path in weight_files(model)] == ["model.safetensors"]
    (model / "model.safetensors").unlink()
    assert [path.name for path in weight_files(model)] == ["pytorch_model.bin"]
    (model / "pytorch_model.bin").unlink()
    with pytest.raises(UsageError, match="no weights"):
        weight_files(model)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"12345678",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        (2).to_bytes(8, "little") + b"[]",
    ],
    ids=["empty", "eight bytes", "Git LFS pointer", "header is no object"],
)
def test_damaged_safetensors_are_refused(model, content):
    """Before an engine spends minutes on them."""
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match=r"model\.safetensors: not a safetensors file"):
        directory_fingerprint(model)


def test_tokenizer_hash_is_of_its_content(tiny_model, model):
    """The same from any path and after use; another added token, special token or merge makes another one."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    before = tokenizer_sha256(tokenizer)
    tokenizer(["some text"], add_special_tokens=False)
    assert tokenizer_sha256(tokenizer) == before == tokenizer_sha256(AutoTokenizer.from_pretrained(model))
    tokenizer.add_tokens(["<extra>"])
    changed = make_tiny_tokenizer()
    changed.pad_token = "<s>"
    assert len({before, tokenizer_sha256(tokenizer), tokenizer_sha256(changed)}) == 3


def test_the_tokenizer_of_a_dataset(tmp_path, tiny_model):
    """With its settings, without them, and none; what is no tokenizer has no hash."""
    place = tmp_path / "tokenizer"
    assert stored_tokenizer(tmp_path) is None
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.save_pretrained(place)
    content = (place / "tokenizer.json").read_bytes()
    assert stored_tokenizer(tmp_path) == (content, tokenizer_sha256(tokenizer))
    (place / "tokenizer_config.json").unlink()
    assert stored_tokenizer(tmp_path) == (content, saved_tokenizer_sha256(content, b"{}"))
    (place / "tokenizer.json").write_bytes(b"junk")
    assert stored_tokenizer(tmp_path) == (b"junk", None)
