"""The Markdown pages of the repository: what they link to is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for pattern in ("*.md", "docs/*.md", "schema/*.md")
    for path in REPOSITORY.glob(pattern)
)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    """To a file of the repository, and to a heading of it."""
    page = REPOSITORY / name
    for target, anchor in LINK.findall(FENCED.sub("", page.read_text())):
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), target
        assert linked.is_relative_to(REPOSITORY), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


@pytest.mark.parametrize("arguments", [["--chek"], ["--check", "x"]], ids=["misspelled", "one too many"])
def test_pages_are_made_when_that_is_asked_for(arguments: list[str]) -> None:
    """And not by an argument that means nothing."""
    pytest.importorskip("griffe")
    before = {name: (REPOSITORY / name).stat().st_mtime_ns for name in PAGES}
    done = subprocess.run([sys.executable, REPOSITORY / "docs/make_pages.py", *arguments], stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
    assert {name: (REPOSITORY / name).stat().st_mtime_ns for name in PAGES} == before


def test_every_page_is_linked_from_the_front() -> None:
    """A page that nobody finds is not read."""
    front = (REPOSITORY / "README.md").read_text()
    assert [name for name in PAGES if name.startswith("docs/") and f"({name}" not in front] == []
