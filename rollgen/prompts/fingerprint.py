"""Which model, which tokenizer: digests that depend on content alone, never on a path or an mtime.

The fingerprint of a local model directory is the SHA-256 over, in the order of file names,

    name, size and content  of `config.json`, `generation_config.json`, the tokenizer's files and weight indexes
    name, size and samples  of each weight file (`*.safetensors`, else `*.bin`, else `*.gguf`)

where the samples of a weight file are 64 evenly spaced blocks of 4 KiB and the last block; for safetensors also the
header and the middle 4 KiB of every tensor. So a checkpoint overwritten in place by a training step is another model,
even when only one tensor was trained, and a 70B model costs a few MB of reading. A change confined to a few elements
can escape; training does not make such changes. A Hugging Face model is identified by its commit instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from rollgen.config import digest
from rollgen.errors import Unreadable, UsageError
from rollgen.format.files import read_regular
from rollgen.format.layout import TOKENIZER_CONFIG, TOKENIZER_FILE
from rollgen.format.schema import TOKENIZER_DIR

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.gguf")
"""In the order in which engines prefer them; the first that matches is the model."""
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin")
"""What trainers leave beside the weights."""
_METADATA_PATTERNS = (
    "config.json",
    "generation_config.json",
    "*.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "tekken.json",
    "*.tiktoken",
    "chat_template*",
)
_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_BLOCK = 4096
_SPACED_BLOCKS = 64
_HEADER_LIMIT = 100_000_000
"""Bytes; safetensors itself refuses a longer header."""
_MAX_TOKENIZER_BYTES: Final = 64 << 20
"""Of a file; twice the largest tokenizer in use (a vocabulary of 262,144)."""


def directory_fingerprint(directory: Path) -> str:
    """SHA-256 (hex) of a local model. Raises UsageError when there are no weights or a weight file is damaged."""
    sha256 = hashlib.sha256()
    for path in _matching(directory, _METADATA_PATTERNS):
        content = path.read_bytes()
        sha256.update(f"{path.name}\n{len(content)}\n".encode())
        sha256.update(content)
    for path in weight_files(directory):
        size = path.stat().st_size
        sha256.update(f"{path.name}\n{size}\n".encode())
        with path.open("rb") as file:
            for start, length in _samples(path, file.fileno(), size):
                sha256.update(os.pread(file.fileno(), length, start))
    return sha256.hexdigest()


def weight_files(directory: Path) -> list[Path]:
    """The weight files of a local model, sorted by name. Raises UsageError when there are none."""
    for pattern in _WEIGHT_PATTERNS:
        if paths := [path for path in _matching(directory, (pattern,)) if path.name not in _NOT_WEIGHTS]:
            return paths
    raise UsageError(f"{directory}: no weights ({', '.join(_WEIGHT_PATTERNS)}); give a complete model directory")


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 (hex) over what decides ids: class, special tokens and the serialised backend (slow ones: vocabulary)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    special_tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return _tokenizer_sha256(special_tokens, backend.to_str() if backend else tokenizer.get_vocab())


def saved_tokenizer_sha256(tokenizer: bytes, settings: bytes) -> str | None:
    """The same of a `tokenizer.json` and a `tokenizer_config.json`, without transformers; None where that is no pair.

    Where the two are as transformers has saved them it is what `tokenizer_sha256` was; of others it need not be.
    """
    from tokenizers import Tokenizer

    try:
        said = json.loads(settings)
        named = {name: said[name] for name in _SPECIAL_TOKENS if said.get(name) is not None}
        texts = {name: token["content"] if isinstance(token, dict) else token for name, token in named.items()}
        return _tokenizer_sha256(texts, Tokenizer.from_str(tokenizer.decode()).to_str())
    except BaseException as error:  # tokenizers raises a bare Exception, and for a panic of its Rust less than that
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        return None


class StoredTokenizer(NamedTuple):
    """What lies in a dataset's directory."""

    content: bytes
    """Of its `tokenizer.json`."""
    sha256: str | None
    """As `saved_tokenizer_sha256` has it: only one that is the manifest's is shown to be what made the ids."""


def stored_tokenizer(dataset: Path) -> StoredTokenizer | None:
    """That of a dataset; None where there is none. Raises DatasetError as `read_tokenizer_file` does."""
    content = read_tokenizer_file(dataset, TOKENIZER_FILE)
    if content is None:
        return None
    settings = read_tokenizer_file(dataset, TOKENIZER_CONFIG)
    return StoredTokenizer(content, saved_tokenizer_sha256(content, b"{}" if settings is None else settings))


def read_tokenizer_file(dataset: Path, name: str) -> bytes | None:
    """A file of a dataset's tokenizer; None where it is not there.

    Raises DatasetError for what is no regular file or too large to be one of these, and Unreadable.
    """
    path = dataset / TOKENIZER_DIR / name
    try:
        return read_regular(path, _MAX_TOKENIZER_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Unreadable(f"{path}: this machine could not read it: {error}; mend that, and try again") from None


def _tokenizer_sha256(special_tokens: dict[str, str], backend: str | dict[str, int]) -> str:
    return digest({"special_tokens": special_tokens, "tokenizer": backend})


def _matching(directory: Path, patterns: tuple[str, ...]) -> list[Path]:
    found = {path for pattern in patterns for path in directory.glob(pattern)}
    return sorted(path for path in found if path.is_file())


def _samples(path: Path, descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, length) of each part of a weight file that is hashed."""
    if path.suffix == ".safetensors":
        yield from _safetensors_samples(path, descriptor, size)
    for index in range(_SPACED_BLOCKS):
        yield index * size // _SPACED_BLOCKS, _BLOCK
    yield max(size - _BLOCK, 0), _BLOCK


def _safetensors_samples(path: Path, descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """The header, then the middle of every tensor. Layout: u64 header length, JSON header, tensor data."""
    try:
        (header_bytes,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
        if header_bytes > min(size - 8, _HEADER_LIMIT):
            raise ValueError("the header is longer than the file")
        header = json.loads(os.pread(descriptor, header_bytes, 8))
        spans = [tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"]
        middles = sorted((max(start, (start + end - _BLOCK) // 2), end) for start, end in spans)
    except (struct.error, ValueError, TypeError, KeyError, AttributeError):
        raise UsageError(f"{path}: not a safetensors file: damaged, or a Git LFS pointer; download it again") from None
    yield 0, 8 + header_bytes
    for start, end in middles:
        yield 8 + header_bytes + start, min(_BLOCK, end - start)
