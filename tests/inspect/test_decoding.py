"""Tokens become text, the fewest at a time that decode."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from models.tiny import make_tiny_tokenizer
from tokenizers import Tokenizer, decoders, models

from rollgen.errors import DatasetError
from rollgen.inspect.decoding import Cell, Decoder, load_decoder
from rollgen.prompts import fingerprint

CHAT_TOKENIZER = make_tiny_tokenizer()
BYTE_LEVEL = CHAT_TOKENIZER.backend_tokenizer
PIECES = ["<unk>", "</s>", "▁hello", "▁", "a", *(f"<0x{byte:02X}>" for byte in "한".encode())]


def sentencepiece() -> Tokenizer:
    """A vocabulary of eight pieces with bytes for what it lacks, decoded as Llama 2's is: the first space goes."""
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(PIECES)}, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


def ids(text: str) -> list[int]:
    return CHAT_TOKENIZER(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("text", ["The sea is wide.", "안녕 하세요", "👨‍👩‍👧 e\u0301", "a\n\x1b[2J"])
def test_cells_are_the_text(text: str) -> None:
    """They cover the tokens in order, and their texts are the text."""
    cells = Decoder(BYTE_LEVEL).cells(ids(text))
    assert "".join(cell.text for cell in cells) == text
    assert [0, *(cell.stop for cell in cells)] == [*(cell.start for cell in cells), len(ids(text))]


def test_pieces_of_a_character_are_one_cell() -> None:
    """Hangul has three bytes and an emoji four, each a token of its own in this vocabulary."""
    assert Decoder(BYTE_LEVEL).cells(ids("한👨a")) == [Cell("한", 0, 3), Cell("👨", 3, 7), Cell("a", 7, 8)]


def test_special_tokens_show_as_themselves() -> None:
    """Id 2 ends a turn; it stands alone, also behind half a character."""
    half = ids("한")[:2]
    cells = Decoder(BYTE_LEVEL).cells([*ids("a"), 2, *half, 2])
    assert [cell.text for cell in cells] == ["a", "<|im_end|>", "\\xed", "\\x95", "<|im_end|>"]


def test_ids_that_only_the_model_has() -> None:
    """The tokenizer ends before the model's vocabulary does."""
    decoder = Decoder(BYTE_LEVEL)
    assert [cell.text for cell in decoder.cells([*ids("a"), 510, *ids("b")])] == ["a", "<510>", "b"]
    assert decoder.text([*ids("a"), 510]) == "a<510>"


def test_ids_that_nothing_has() -> None:
    """A hostile file may hold any int32, and a tokenizer takes none below 0."""
    decoder = Decoder(BYTE_LEVEL)
    assert decoder.text([-1, *ids("a"), 2**31 - 1, -(2**31)]) == "<-1>a<2147483647><-2147483648>"
    assert decoder.name(-7) == "<-7>"


def test_broken_bytes_show_as_bytes() -> None:
    """However many follow; the text behind them is not lost."""
    half = ids("한")[:2]
    cells = Decoder(BYTE_LEVEL).cells([*half * 10, *ids(" sea")])
    assert [cell.text for cell in cells[:20]] == ["\\xed", "\\x95"] * 10
    assert "".join(cell.text for cell in cells[20:]) == " sea"


def test_sentencepiece() -> None:
    """The space of a first word is kept behind another token, and byte tokens are put together."""
    decoder = Decoder(sentencepiece())
    assert [cell.text for cell in decoder.cells([2, 2, 4, 5, 6, 7])] == ["hello", " hello", "a", "한"]
    assert [cell.text for cell in decoder.cells([2, 1], before=[4])] == [" hello", "</s>"]
    assert [decoder.name(token_id) for token_id in (2, 3, 5, 1)] == [" hello", " ", "\\xed", "</s>"]


def test_names() -> None:
    """One id by itself, as a table shows it."""
    decoder = Decoder(BYTE_LEVEL)
    assert [decoder.name(i) for i in (*ids("a"), 1, 510, ids("한")[0])] == ["a", "<|im_start|>", "<510>", "\\xed"]


def test_without_a_tokenizer(tmp_path: Path) -> None:
    """Ids are shown, a cell each."""
    decoder = load_decoder(tmp_path)
    assert not decoder.has_tokenizer
    assert (decoder.name(7), decoder.text([7, 8])) == ("7", "7 8")
    assert decoder.cells([7, 8]) == [Cell("7", 0, 1), Cell("8", 1, 2)]


def test_the_dataset_s_own_tokenizer(tmp_path: Path) -> None:
    """It is read from `tokenizer/`, without a network."""
    CHAT_TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    assert load_decoder(tmp_path).text(ids("한 sea")) == "한 sea"


def test_nothing_but_the_vocabulary_is_read(tmp_path: Path) -> None:
    """Neither a class that is named beside it, nor code, nor what only encoding needs, however hostile it is.

    transformers would build the class, and this normalizer makes the library panic.
    """
    path = tmp_path / "tokenizer"
    CHAT_TOKENIZER.save_pretrained(path)
    named = {"tokenizer_class": "GPT2LMHeadModel", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    (path / "own.py").write_text("raise SystemExit('this code must not run')")
    settings = json.loads((path / "tokenizer.json").read_text())
    settings["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (path / "tokenizer.json").write_text(json.dumps(settings))
    assert load_decoder(tmp_path).text(ids("a sea")) == "a sea"


def test_a_vocabulary_with_scores(tmp_path: Path) -> None:
    """Of a Unigram model the places are the ids."""
    (tmp_path / "tokenizer").mkdir()
    model = models.Unigram([("<unk>", 0.0), ("\u2581sea", -1.0)], unk_id=0)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    assert load_decoder(tmp_path).text([1, 1]) == "sea sea"


def broken(tokenizer: str) -> dict[str, Any]:
    """Contents of `tokenizer.json` that cannot be used."""
    settings: dict[str, Any] = json.loads(BYTE_LEVEL.to_str())
    match tokenizer:
        case "no vocabulary":
            del settings["model"]["vocab"]
        case "ids below 0":
            settings["model"]["vocab"]["a"] = -1
        case "unknown decoder":
            settings["decoder"] = {"type": "Own"}
    return settings


@pytest.mark.parametrize("tokenizer", ["no vocabulary", "ids below 0", "unknown decoder"])
def test_a_tokenizer_that_does_not_load(tmp_path: Path, tokenizer: str) -> None:
    """One line names the file and the fix."""
    path = tmp_path / "tokenizer" / "tokenizer.json"
    path.parent.mkdir()
    path.write_text(json.dumps(broken(tokenizer)))
    with pytest.raises(DatasetError) as error:
        load_decoder(tmp_path)
    assert str(error.value).startswith(f"{path}: cannot decode with the tokenizer (")
    assert "\n" not in str(error.value)


def test_a_tokenizer_that_is_no_file_or_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe would wait for ever, and gigabytes fill the memory; here from 16 bytes on."""
    monkeypatch.setattr(fingerprint, "_MAX_TOKENIZER_BYTES", 16)
    path = tmp_path / "tokenizer" / "tokenizer.json"
    path.parent.mkdir()
    path.write_text(" " * 17)
    with pytest.raises(DatasetError, match=r"tokenizer\.json: larger than"):
        load_decoder(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DatasetError, match=r"tokenizer\.json: not a regular file"):
        load_decoder(tmp_path)
