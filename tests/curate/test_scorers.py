"""Scoring functions by name: found, refused before anything starts, and the two that are built in."""

from __future__ import annotations

import hashlib
import os
import pickle
import py_compile
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollgen.curate.answers import Score, StoredAnswer
from rollgen.curate.scorers import Scorer, find_scorer, score_batch
from rollgen.errors import UsageError

MODULE = '''
"""A module of a user's."""
import sys
print("hello")
TABLE = {}
def correct(answers):
    return [float(answer.text == "42") for answer in answers]
class Judge:
    @staticmethod
    def judge(answers):
        return [0.5] * len(answers)
def raises(answers):
    raise SystemExit("enough")
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`graders.py`, which can be imported."""
    path = tmp_path / "graders.py"
    path.write_text(MODULE)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "program.py").write_text("import sys\nsys.exit('usage: program FILE')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "graders", raising=False)
    return path


def row(text: str | None = "42", metadata: str | None = '{"answer": "42"}') -> StoredAnswer:
    ids = np.array([1], np.int32)
    return StoredAnswer("p", 0, 0, 0, 0, None, text, ids, ids, "stop", None, 8, metadata)


def reward(scorer: Scorer, **changes: Any) -> float | str | None:
    """Of one answer; or the error."""
    (score,) = score_batch(scorer, [row(**changes)])
    assert isinstance(score, Score)
    return score.error if score.values is None else score.values["reward"]


def test_a_function_of_a_module(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It can be sent elsewhere; what its module prints is not output."""
    scorer = find_scorer("graders:correct")
    assert (scorer.function, scorer.name) == ("graders:correct", "correct")
    assert scorer.source_sha256 == hashlib.sha256(module.read_bytes()).hexdigest()
    assert pickle.loads(pickle.dumps(scorer)) == scorer
    assert score_batch(scorer, [row(), row(text="41")]) == [Score({"reward": 1.0}), Score({"reward": 0.0})]
    assert capsys.readouterr().out == ""
    assert find_scorer("graders:Judge.judge").name == "judge"


def test_what_a_module_starts_prints_to_stderr(module: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And so does what is compiled: all that has the descriptor. Afterwards stdout is what it was."""
    module.write_text("import os\nos.write(1, b'hello')\nos.system('echo you')\ndef f(answers): ...\n")
    find_scorer("graders:f")
    print("output")
    assert capfd.readouterr() == ("output\n", "helloyou\n")


def test_a_compiled_file_that_is_not_of_the_source(module: Path) -> None:
    """Python compares seconds and sizes, and would run what the source was before."""
    module.write_text("def f(answers): return [1.0] * len(answers)\n")
    before = module.stat()
    compiled = py_compile.compile(str(module))
    module.write_text("def f(answers): return [2.0] * len(answers)\n")
    os.utime(module, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UsageError, match=rf"^{compiled}: was compiled from another source than {module}; remove it"):
        find_scorer("graders:f")


def test_a_module_in_an_archive(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is watched is the archive."""
    archive = module.with_name("judges.zip")
    with zipfile.ZipFile(archive, "w") as file:
        file.write(module, "zipped.py")
    monkeypatch.syspath_prepend(archive)
    scorer = find_scorer("zipped:correct")
    assert scorer.file == str(archive)
    assert scorer.source_sha256 == hashlib.sha256(archive.read_bytes()).hexdigest()


def test_a_function_itself(module: Path) -> None:
    """It is found by its name."""
    import graders  # type: ignore[import-not-found]

    assert find_scorer(graders.correct) == find_scorer("graders:correct")
    with pytest.raises(UsageError, match="other processes cannot import it; give a function at the top of a module"):
        find_scorer(lambda answers: [1.0] * len(answers))
    original, graders.correct = graders.correct, graders.Judge.judge
    with pytest.raises(UsageError, match="graders:correct: is not the function that was given"):
        find_scorer(original)
    graders.correct = original


@pytest.mark.parametrize(
    ("scorer", "options", "message"),
    [
        ("correct", {}, r"^correct: no such scorer; give MODULE:FUNCTION, or one of exact_match, regex$"),
        ("no_such_module:f", {}, r"^no_such_module:f: cannot be imported: ModuleNotFoundError: No module named"),
        (
            "broken:f",
            {},
            r"^broken:f: cannot be imported: ModuleNotFoundError: No module named 'nothing_of_this_name'$",
        ),
        (
            "program:f",
            {},
            r'cannot be imported: SystemExit: usage: program FILE; .* under `if __name__ == "__main__":`$',
        ),
        ("graders:wrong", {}, r"^graders:wrong: cannot be imported: AttributeError: module 'graders' has no attribute"),
        ("graders:TABLE", {}, r"^graders:TABLE: is of type dict, not a function$"),
        ("graders.py:one", {}, r"^graders\.py:one: name the module, not its file: graders:one$"),
        ("./rewards/graders.py:one", {}, r": name the module, not its file: graders:one$"),
        (":f", {}, r"^:f: no such scorer; give MODULE:FUNCTION$"),
        ("graders:correct", {"field": "answer"}, r"^field and extract are for exact_match and regex"),
        ("exact_match", {}, r"^exact_match: needs a field of the metadata to compare with: give --field$"),
        (
            "exact_match",
            {"field": "a", "extract": ""},
            r"^--extract: is empty, and finds nothing in any text; leave it",
        ),
        ("exact_match", {"field": "a", "extract": "("}, r"^--extract \(: not a regular expression: "),
        ("exact_match", {"field": "a", "extract": "x{4294967295}"}, r"^--extract .*: not a regular expression: "),
        ("regex", {"field": "a", "extract": "x"}, r"^regex: takes no --extract"),
    ],
)
def test_what_is_no_scorer(module: Path, scorer: str, options: dict[str, str], message: str) -> None:
    """Said before anything starts."""
    with pytest.raises(UsageError, match=message):
        find_scorer(scorer, **options)


def test_whatever_a_function_raises(module: Path) -> None:
    """It is these answers' error, with the line of the module that it came from, and ends no process."""
    assert score_batch(find_scorer("graders:raises"), [row(), row()]) == "graders.py:13: SystemExit: enough"


@pytest.mark.parametrize(
    ("text", "answer", "extract", "wanted"),
    [
        ("42", '"42"', None, 1.0),
        (" 42\n", '" 42 "', None, 1.0),
        ("It is 42", '"42"', None, 0.0),
        ("42", "42", None, 1.0),
        ("1.50", "1.5", None, 0.0),
        ("1.1", "1.10", None, 1.0),
        ("1000.0", "1e3", None, 1.0),
        ("true", "true", None, 1.0),
        ("b", '["a", "b"]', None, 1.0),
        ("c", '["a", "b"]', None, 0.0),
        ("", '""', None, 1.0),
        ("é", '"\\u00e9"', None, 1.0),
        ("1 or 42", "42", r"\d+", 1.0),
        ("42 or 1", "42", r"\d+", 0.0),
        ("#### 42", "42", r"#### (\d+)", 1.0),
        ("none", "42", r"\d+", 0.0),
        ("x", '""', r"x(y)?", 1.0),
        (r"\boxed{ 7 }", "7", r"\\boxed\{(.*?)\}", 1.0),
    ],
)
def test_exact_match(text: str, answer: str, extract: str | None, wanted: float) -> None:
    """Blanks around do not count; the last match does, by its first group; lists hold what is right."""
    scorer = find_scorer("exact_match", field="answer", extract=extract)
    assert reward(scorer, text=text, metadata=f'{{"answer": {answer}}}') == wanted


@pytest.mark.parametrize(("text", "wanted"), [("so 42.", 1.0), ("so 4", 0.0), ("", 0.0)])
def test_regex(text: str, wanted: float) -> None:
    """Anywhere in the text."""
    assert reward(find_scorer("regex", field="p"), text=text, metadata=r'{"p": "\\b42\\b"}') == wanted


@pytest.mark.parametrize(
    ("scorer", "changes", "error"),
    [
        ("exact_match", {"text": None}, "ValueError: the dataset holds no text of this sample, only ids"),
        ("exact_match", {"metadata": None}, "ValueError: the metadata has no 'answer'"),
        (
            "exact_match",
            {"metadata": '{"answer": null}'},
            "ValueError: 'answer' of the metadata is null: no right answer",
        ),
        ("exact_match", {"metadata": '{"answer": ["42", null]}'}, 'is ["42", null]: no right answer, or null as one'),
        ("exact_match", {"metadata": '{"answer": []}'}, "ValueError: 'answer' of the metadata is []: no right answer"),
        ("regex", {"metadata": '{"answer": ""}'}, "is an empty text, which as a regular expression matches any"),
        (
            "regex",
            {"metadata": '{"answer": 4}'},
            "ValueError: 'answer' of the metadata is of type int, not a regular expression",
        ),
        (
            "regex",
            {"metadata": '{"answer": "("}'},
            "PatternError|error: missing ), unterminated subpattern at position 0",
        ),
    ],
)
def test_what_cannot_be_scored(scorer: str, changes: dict[str, Any], error: str) -> None:
    """That answer alone, with the reason."""
    found = reward(find_scorer(scorer, field="answer"), **changes)
    assert isinstance(found, str)
    assert any(each in found for each in error.split("|"))
