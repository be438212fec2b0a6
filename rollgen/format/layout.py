"""The names of a dataset: which files and objects are its own, and may be removed with it."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Final

from rollgen.format.journal import RECORD_FILE
from rollgen.format.schema import (
    DATA_DIR,
    FAILURES_DIR,
    JOURNAL_DIR,
    LOGS_DIR,
    MANIFEST_FILE,
    PLAN_FILE,
    QUARANTINE_DIR,
    RETIRED_DIR,
    RETRY_FILES,
    REWARDS_DIR,
    TOKENIZER_DIR,
)

CARD_FILE: Final = "README.md"
TOKENIZER_FILE: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
TOKENIZER_FILES: Final = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
"""What transformers saves of a tokenizer."""
_MORE_TEMPLATES: Final = f"{TOKENIZER_DIR}/additional_chat_templates"
OWN_FILES: Final = (
    MANIFEST_FILE,
    PLAN_FILE,
    CARD_FILE,
    RETRY_FILES,
    f"{DATA_DIR}/part-*.parquet",
    f"{DATA_DIR}/.tmp-*",
    f"{QUARANTINE_DIR}/part-*.parquet",
    f"{QUARANTINE_DIR}/{JOURNAL_DIR}-*.json*",
    f"{QUARANTINE_DIR}/{FAILURES_DIR}-*.jsonl",
    f"{RETIRED_DIR}/part-*.parquet",
    f"{JOURNAL_DIR}/{RECORD_FILE}",
    f"{JOURNAL_DIR}/*.jsonl",
    f"{FAILURES_DIR}/*.jsonl",
    f"{TOKENIZER_DIR}/*",
    f"{_MORE_TEMPLATES}/*.jinja",
    f"{LOGS_DIR}/*.log",
    f"{REWARDS_DIR}/*-[0-9]*.parquet",
    f"{REWARDS_DIR}/.tmp-*",
    f"{REWARDS_DIR}/*.lock",
)
"""Patterns, in the order in which they are removed: without its manifest it is no dataset. Locks of writers are not
among them."""

OWN_DIRECTORIES: Final = (
    QUARANTINE_DIR,
    RETIRED_DIR,
    FAILURES_DIR,
    _MORE_TEMPLATES,
    TOKENIZER_DIR,
    LOGS_DIR,
    REWARDS_DIR,
)
"""Those that go when nothing is left in them, in the order in which that is seen."""

OWN_PLACES: Final = frozenset(pattern.partition("/")[0] for pattern in OWN_FILES)
"""Patterns of what lies in the dataset's directory itself."""


def is_own(name: str) -> bool:
    """Whether a name, relative to the dataset, is one of OWN_FILES."""
    return any(fnmatch(name, pattern) for pattern in OWN_FILES)
