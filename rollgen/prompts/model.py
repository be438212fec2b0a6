"""What must be known about the model before it loads: sizes, dtype, tokenizer, chat template, fingerprint.

Reads `config.json` and the tokenizer through transformers, and no weights except the sampled bytes of the fingerprint.
A local directory needs no network. A Hugging Face id is resolved to a commit first, and everything (the engine too) is
then loaded at that commit, so that a branch that moves cannot mix two models.
"""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol

import transformers
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import cached_file

from rollgen.errors import DatasetError, UsageError
from rollgen.format.files import new_file
from rollgen.inert import by_name
from rollgen.prompts.fingerprint import directory_fingerprint, tokenizer_sha256

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from rollgen.config import RunConfig
    from rollgen.rollouts import Int32Array

_TOKENIZER_CONFIG = "tokenizer_config.json"
_DTYPES = {
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""Where model families keep their context length (vLLM: `derive_max_model_len_and_key`); the smallest counts."""
_DEFAULT_CONTEXT = 2048
"""Tokens; vLLM's assumption for a model that names no limit."""
_PRESCALED_ROPE = frozenset({"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"})
"""RoPE types whose `max_position_embeddings` already includes `factor` (vLLM: `_get_and_verify_max_len`)."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as the plan and the manifest need it."""

    name: str
    """The Hugging Face id, or the last part of a local path: never an absolute path, datasets travel."""
    path_or_id: str
    """What the engine loads."""
    revision: str | None
    """Commit of a Hugging Face model; None for a local directory."""
    fingerprint: str
    """SHA-256 of a local model (`fingerprint.py`), commit of a Hugging Face one, or what a server says of its model."""
    tokenizer_sha256: str
    vocab_size: int
    """Of the model: every id the engine can take or sample lies below it."""
    tokenizer_vocab_size: int
    """Ids that the tokenizer can decode; often smaller than `vocab_size`, seldom larger."""
    context_length: int
    """Prompt and response tokens together, at most."""
    dtype: str
    """`float32`, `bfloat16` or `float16`; for `--dtype auto` the checkpoint's."""
    chat_template: str | None = field(repr=False)
    """Jinja source: `--chat-template`, else the tokenizer's; None when there is neither."""
    tokenizer: PreTrainedTokenizerBase = field(repr=False)

    def decode(self, token_ids: Int32Array) -> str:
        """The `text` of a completion: its ids decoded, without special tokens."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def save_tokenizer(self, directory: Path) -> None:
        """The tokenizer's files, for a dataset: whatever path its checkpoint was saved with is not among them.

        Raises OSError when they cannot be written, and DatasetError when those that are made first cannot, in TMPDIR.
        """
        with TemporaryDirectory() as name:
            scratch = Path(name)
            self._save(scratch)
            for source in filter(Path.is_file, scratch.rglob("*")):
                target = directory / source.relative_to(scratch)
                target.parent.mkdir(parents=True, exist_ok=True)
                with new_file(target) as file:
                    file.write(source.read_bytes())

    def _save(self, scratch: Path) -> None:
        path = scratch / _TOKENIZER_CONFIG
        try:
            self.tokenizer.save_pretrained(scratch)
            settings = json.loads(path.read_text(encoding="utf-8"))
            kept = {name: by_name(value) if _may_be_path(name, value) else value for name, value in settings.items()}
            path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except Exception as error:  # of a full disk the Rust library tells in one that has no class of its own
            if type(error) is not Exception and not isinstance(error, OSError):
                raise
            raise DatasetError(
                f"{scratch.parent}: cannot hold the tokenizer's files: {error}; make room there, or set TMPDIR"
            ) from error

    @property
    def chat_template_sha256(self) -> str | None:
        """SHA-256 (hex) of the chat template's text."""
        return hashlib.sha256(self.chat_template.encode()).hexdigest() if self.chat_template is not None else None


def _may_be_path(setting: str, value: object) -> bool:
    """Whether a setting of a tokenizer is a text and no token's: a token may look like a path."""
    return isinstance(value, str) and not setting.endswith("_token")


class Served(Protocol):
    """What a server says of the model that it serves."""

    @property
    def name(self) -> str:
        """Under which it serves it."""
        ...

    @property
    def fingerprint(self) -> str:
        """What takes the place of a hash of the checkpoint, which only the server has."""
        ...

    @property
    def max_model_len(self) -> int:
        """Prompt and response tokens together, at most."""
        ...


def load_model_info(config: RunConfig, model: str, served: Served | None = None) -> ModelInfo:
    """Read all that can be known about `model` (a local directory or a Hugging Face id) without its weights.

    Where a server samples, `model` is where its config and tokenizer are to be had, and `served` what it says.

    Raises UsageError, with the fix, when model or tokenizer cannot be found or read, or a setting does not fit them.
    """
    dtype = _requested_dtype(config.dtype)
    if model.startswith("~"):
        model = str(Path(model).expanduser())
    with quiet_transformers():
        commit = resolve_commit(model, config.revision)
        with usage_errors(model, "the model's config"):
            hf_config = AutoConfig.from_pretrained(model, revision=commit, trust_remote_code=config.trust_remote_code)
        source, revision = (model, commit) if config.tokenizer is None else (config.tokenizer, None)
        with usage_errors(source, "the tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(
                source, revision=revision, trust_remote_code=config.trust_remote_code
            )
        with usage_errors(source, "the chat template"):
            chat_template = _chat_template(config.chat_template, tokenizer)
    text_config = hf_config.get_text_config()
    if served is not None:
        name, revision, fingerprint = by_name(served.name), None, served.fingerprint  # vLLM's default is the path
        context_length = _served_context(config.max_model_len, served.max_model_len)
    else:
        name, revision = model if commit else Path(model).resolve().name, commit
        fingerprint = commit or directory_fingerprint(Path(model))
        context_length = _context_length(config.max_model_len, text_config, tokenizer)
    return ModelInfo(
        name=name,
        path_or_id=model,
        revision=revision,
        fingerprint=fingerprint,
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        vocab_size=text_config.vocab_size,
        tokenizer_vocab_size=len(tokenizer),
        context_length=context_length,
        dtype=dtype or _checkpoint_dtype(hf_config, text_config),
        chat_template=chat_template,
        tokenizer=tokenizer,
    )


def resolve_commit(model: str, revision: str | None, *, flag: str = "--model") -> str | None:
    """The commit of a Hugging Face model, None for a local directory. Raises UsageError naming `flag` for neither."""
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"{model}: no config.json in this directory; {flag} takes a model directory")
        return None
    if path.is_file():
        raise UsageError(f"{model}: is a file; {flag} takes a model directory or a Hugging Face id")
    if path.is_absolute() or model.startswith(".") or model.count("/") > 1:
        raise UsageError(f"{model}: no such model directory; check {flag}")
    with usage_errors(model, "the model", check=f"{flag} and the revision"):
        snapshot = cached_file(model, "config.json", revision=revision)
    return Path(snapshot).parent.name  # .../snapshots/<commit>/config.json


@contextmanager
def usage_errors(source: str, what: str, *, check: str = "--model, --tokenizer and --revision") -> Iterator[None]:
    """Turn what transformers and huggingface_hub raise for input they cannot use into one UsageError."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 (tokenizers raises nothing narrower, and files can make others raise all)
        if _is_unreachable(error):
            why = "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else "no connection to huggingface.co"
            raise UsageError(
                f"{source}: cannot be fetched: {why}, and it is not in the cache; give a local directory, or "
                f"check {check}"
            ) from None
        reason = " ".join(str(error).split())
        short = reason if len(reason) <= 240 else reason[:237] + "..."
        raise UsageError(f"{source}: cannot load {what} ({short}); check {check}") from None


def _is_unreachable(error: BaseException | None) -> bool:
    """Whether something that is not in the cache could not be asked for: transformers wraps what says so."""
    if error is None or isinstance(error, LocalEntryNotFoundError):
        return error is not None
    return _is_unreachable(error.__cause__ or error.__context__)


def _requested_dtype(dtype: str) -> str | None:
    """The dtype asked for, by its main name; None for `auto`."""
    if dtype == "auto":
        return None
    if dtype not in _DTYPES:
        raise UsageError(f"--dtype: unknown dtype {dtype!r}; use auto, float32, bfloat16 or float16")
    return _DTYPES[dtype]


def _checkpoint_dtype(hf_config: PreTrainedConfig, text_config: PreTrainedConfig) -> str:
    """The dtype named in the checkpoint's config; float32, PyTorch's own, when it names none."""
    dtype = getattr(text_config, "dtype", None) or getattr(hf_config, "dtype", None)
    return str(dtype or "float32").removeprefix("torch.")


def _context_length(requested: int | None, text_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """`requested` tokens, or the model's own limit. Raises UsageError when more is asked for than the model has.

    As vLLM derives it (`config/model.py`, `_get_and_verify_max_len`), so that the plan and the engine agree.
    """
    lengths = [length for key in _CONTEXT_KEYS if (length := getattr(text_config, key, None)) is not None]
    limit = min([*lengths, tokenizer.model_max_length]) if lengths else _DEFAULT_CONTEXT
    rope = getattr(text_config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in _PRESCALED_ROPE and "gemma3" not in text_config.model_type:
        limit = int(limit * (rope.get("factor") or 1.0))
    if requested is not None and requested > limit:
        raise UsageError(f"--max-model-len: {requested} tokens, but the model's context is {limit}; use at most that")
    if rope_type == "longrope":  # vLLM's default: quality on short sequences suffers beyond the original length
        return requested or int(getattr(text_config, "original_max_position_embeddings", None) or limit)
    return requested or limit


def _served_context(requested: int | None, served: int) -> int:
    """`requested` tokens, or the server's limit. Raises UsageError when more is asked for than the server takes."""
    if requested is not None and requested > served:
        raise UsageError(
            f"--max-model-len: {requested} tokens, but the server takes {served}; use at most that, or start it with "
            f"--max-model-len {requested}"
        )
    return requested or served


def _chat_template(file: str | None, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The template's source text. Raises UsageError when the file cannot be read."""
    if file is None:
        return tokenizer.get_chat_template() if tokenizer.chat_template else None
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--chat-template: {file}: cannot read it: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--chat-template: {file}: not UTF-8 text; save it as UTF-8") from None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' advice about the model and its bars off stderr; its errors come as exceptions."""
    verbosity, hub = transformers.logging.get_verbosity(), logging.getLogger("huggingface_hub")
    level, has_bars = hub.level, transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    hub.setLevel(logging.ERROR)  # it announces each of its retries
    if has_bars:
        transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        hub.setLevel(level)
        if has_bars:
            transformers.logging.enable_progress_bar()
