"""Scoring functions by name: `module:function`, or a built-in one; found, checked, and called in any process.

    exact_match   1 where the answer is the metadata's `field`, else 0. The answer is the text, or what `extract` finds
                  in it last: its first group, if it has one. Blanks around either do not count. A list holds what is
                  right; nothing or null is an error of the answer
    regex         1 where the regular expression in the metadata's `field` matches somewhere in the text, else 0; an
                  empty one is an error of the answer

What a built-in one means never changes: another meaning gets another name.

A function of a module is code of whoever gives its name: it is imported, and may do anything. Nothing that a dataset
says is ever imported. The hash of its source is recorded, so what runs must be that source: `load` refuses one that has
changed since, and `find_scorer` a compiled file that Python would run in its place.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.machinery import SourceFileLoader
from operator import attrgetter
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any, Final

from rollgen.curate.answers import (
    Answer,
    Result,
    Score,
    ScoringFunction,
    StoredAnswer,
    as_answers,
    as_scores,
    discreet,
    listed,
    told,
)
from rollgen.engines.children import end_with
from rollgen.errors import ResumeRefused, UsageError

EXACT_MATCH: Final = "exact_match"
REGEX: Final = "regex"
BUILT_IN: Final = (EXACT_MATCH, REGEX)
_BAD_PATTERN: Final = (re.error, OverflowError, RecursionError)
"""What compiling a regular expression may raise."""
GUARD: Final = 'what it does as a program belongs under `if __name__ == "__main__":`'
"""Of a module that does more than define when it is imported."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """Which scoring function, in a form that other processes can be told."""

    function: str
    """`module:function` or one of BUILT_IN, as it is recorded."""
    module: str = ""
    """Where to import it from; empty for a built-in."""
    attribute: str = ""
    file: str | None = None
    """The module's, or the archive that it is in; None where it has none."""
    source_sha256: str | None = None
    """Of `file`."""
    field: str | None = None
    extract: str | None = None

    @property
    def name(self) -> str:
        """What its rewards are called by default."""
        return self.attribute.rpartition(".")[2] or self.function

    def load(self) -> ScoringFunction:
        """The function itself. Raises ResumeRefused when its file has changed, and what importing it raises."""
        if not self.module:
            assert self.field is not None
            return _BUILDERS[self.function](self.field, self.extract)
        self._check_file()
        function: ScoringFunction = attrgetter(self.attribute)(import_module(self.module))
        self._check_file()  # or it may have changed between the two
        return function

    def _check_file(self) -> None:
        if self.file is not None and _sha256(self.file) != self.source_sha256:
            raise ResumeRefused(
                f"{self.file}: has changed while {self.function} was scoring; what was scored before is committed. Put "
                "it back as it was, or score again with another --name, or all with --rescore"
            )


def find_scorer(scorer: str | ScoringFunction, *, field: str | None = None, extract: str | None = None) -> Scorer:
    """The scorer that a name or a function of a module means; `field` and `extract` are for built-in ones.

    Raises UsageError for one that other processes could not find, or that is none.
    """
    if not isinstance(scorer, str):
        module, attribute = _place_of(scorer)
    elif ":" in scorer:
        module, _, attribute = scorer.partition(":")
        if not module or not attribute:
            raise UsageError(f"{scorer}: no such scorer; give MODULE:FUNCTION")
        if module.endswith(".py") or "/" in module:
            raise UsageError(f"{scorer}: name the module, not its file: {Path(module).stem}:{attribute}")
    else:
        return _find_built_in(scorer, field, extract)
    if field is not None or extract is not None:
        raise UsageError(
            f"field and extract are for {' and '.join(BUILT_IN)}; what {attribute} needs, it looks for itself"
        )
    return _find_function(module, attribute, scorer)


def _find_built_in(name: str, field: str | None, extract: str | None) -> Scorer:
    if name not in BUILT_IN:
        raise UsageError(f"{name}: no such scorer; give MODULE:FUNCTION, or one of {', '.join(BUILT_IN)}")
    if field is None:
        raise UsageError(f"{name}: needs a field of the metadata to compare with: give --field")
    if extract is not None:
        if name != EXACT_MATCH:
            raise UsageError(f"{name}: takes no --extract; the pattern is in the metadata's field")
        if not extract:
            raise UsageError("--extract: is empty, and finds nothing in any text; leave it out for the whole text")
        try:
            re.compile(extract)
        except _BAD_PATTERN as error:
            raise UsageError(f"--extract {extract}: not a regular expression: {error}") from None
    return Scorer(name, field=field, extract=extract)


def _place_of(function: ScoringFunction) -> tuple[str, str]:
    module, attribute = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not attribute or "<" in attribute:
        raise UsageError(f"{function!r}: other processes cannot import it; give a function at the top of a module")
    return str(module), str(attribute)


def _find_function(module: str, attribute: str, given: str | ScoringFunction) -> Scorer:
    text = f"{module}:{attribute}"
    try:
        with _stdout_to_stderr(), chdir("."):  # what a module prints is not our output, nor our place where it goes
            found = Scorer(text, module, attribute).load()
            _check_compiled(sys.modules[module])
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001  a module that is imported may raise anything
        advice = f"; {GUARD}" if isinstance(error, SystemExit) else ""
        raise UsageError(f"{text}: cannot be imported: {told(error)}{advice}") from None
    if not callable(found):
        raise UsageError(f"{text}: is of type {type(found).__name__}, not a function")
    if not isinstance(given, str) and found is not given:
        raise UsageError(f"{text}: is not the function that was given, so that other processes would find another one")
    file = _file_of(sys.modules[module])
    if module == "__main__" and file is None:
        raise UsageError(
            f"{text}: other processes cannot import it from a notebook or from standard input; write it to a file and "
            "give MODULE:FUNCTION"
        )
    stem = Path(file).stem if module == "__main__" and file else module
    return Scorer(f"{stem}:{attribute}", module, attribute, file, None if file is None else _sha256(file))


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """All that writes to stdout here writes to stderr: Python, what is compiled, and programs that are started."""
    if sys.stdout is None:  # it was closed before Python started
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _file_of(module: ModuleType) -> str | None:
    """Of a module, or of the archive that it is in."""
    file = getattr(module, "__file__", None)
    places = [] if file is None else [Path(file).absolute(), *Path(file).absolute().parents]
    return next((str(place) for place in places if place.is_file()), None)


def _sha256(file: str) -> str | None:
    """None where it is gone."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except FileNotFoundError:
        return None


def _check_compiled(module: ModuleType) -> None:
    """Raise UsageError when Python has compiled the module before its source became what it is, and cannot tell.

    It compares seconds and sizes. Afterwards it would run what nobody can read any more.
    """
    spec = module.__spec__
    if spec is not None and isinstance(loader := spec.loader, SourceFileLoader):
        source = loader.get_data(loader.path)
        if loader.get_code(loader.name) != loader.source_to_code(source, loader.path):
            raise UsageError(f"{spec.cached}: was compiled from another source than {loader.path}; remove it")


@cache
def _loaded(scorer: Scorer) -> ScoringFunction:
    return scorer.load()


def prepare(scorer: Scorer, parent: int) -> None:
    """Make a process one that scores: import what it needs, before anything is timed. `score_batch` tells what fails.

    It ends with `parent`, the process that started it. What it prints, and all that it starts, goes to stderr: stdout
    is for what the command says.
    """
    end_with(parent)
    os.dup2(2, 1)
    with suppress(BaseException):
        _loaded(scorer)


def score_batch(scorer: Scorer, rows: Sequence[StoredAnswer]) -> list[Score] | str:
    """Call the function with these answers: a score each, or why there is none for any of them.

    Raises ResumeRefused when its source has changed: then it is another scorer. Raises UsageError when it does not
    return one result for each answer.
    """
    process = os.getpid()
    try:
        results = listed(_loaded(scorer)(as_answers(rows)), len(rows))
    except ResumeRefused:
        raise
    except BaseException as error:  # noqa: BLE001  whatever it is, it is these answers' error, and not this process's
        return discreet(_place_of_error(error, scorer.file) + told(error))
    finally:
        if os.getpid() != process:
            os._exit(1)  # the function forked, and the child came back: it must not answer for its parent
    return as_scores(results, len(rows))


def _place_of_error(error: BaseException, file: str | None) -> str:
    """`graders.py:12: `, where in the scorer's file (or archive) it came from; nothing where it did not."""
    if file is None:
        return ""
    lines = [(Path(frame.f_code.co_filename), line) for frame, line in walk_tb(error.__traceback__)]
    ours = [f"{path.name}:{line}: " for path, line in lines if Path(file) in (path, *path.parents)]
    return ours[-1] if ours else ""


def _exact_match(field: str, extract: str | None) -> ScoringFunction:
    pattern = None if extract is None else re.compile(extract)

    def score(answer: Answer) -> float:
        wanted, found = _wanted(answer, field), [_text_of(answer)]
        if pattern is not None:
            found = [match[min(1, pattern.groups)] or "" for match in pattern.finditer(found[0])]
        return float(bool(found) and found[-1].strip() in wanted)

    return _each(score)


def _wanted(answer: Answer, field: str) -> list[str]:
    """The texts that are right: one, or those of a list. Numbers are as in JSON. Raises ValueError for none or null."""
    value = _field_of(answer, field)
    right = value if isinstance(value, list) else [value]
    if not right or None in right:
        raise ValueError(f"{field!r} of the metadata is {_as_text(value)}: no right answer, or null as one")
    return [_as_text(each).strip() for each in right]


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _regex(field: str, extract: str | None) -> ScoringFunction:
    def score(answer: Answer) -> float:
        pattern = _field_of(answer, field)
        if not isinstance(pattern, str):
            raise ValueError(f"{field!r} of the metadata is of type {type(pattern).__name__}, not a regular expression")
        if not pattern:
            raise ValueError(f"{field!r} of the metadata is an empty text, which as a regular expression matches any")
        return float(re.search(pattern, _text_of(answer)) is not None)

    return _each(score)


_BUILDERS: Final[dict[str, Callable[[str, str | None], ScoringFunction]]] = {EXACT_MATCH: _exact_match, REGEX: _regex}


def _each(score: Callable[[Answer], float]) -> ScoringFunction:
    """Of answers one by one: what is wrong with one of them is told of that one."""

    def score_all(answers: Sequence[Answer]) -> list[Result]:
        return [_result(score, answer) for answer in answers]

    return score_all


def _result(score: Callable[[Answer], float], answer: Answer) -> Result:
    try:
        return score(answer)
    except (ValueError, *_BAD_PATTERN) as error:
        return error


def _text_of(answer: Answer) -> str:
    if answer.text is None:
        raise ValueError("the dataset holds no text of this sample, only ids")
    return answer.text


def _field_of(answer: Answer, field: str) -> Any:
    if field not in answer.metadata:
        raise ValueError(f"the metadata has no {field!r}")
    return answer.metadata[field]
