"""A page that is one file: `render_page(content)`. It works offline, asks nobody for anything, and runs its own code
only.

The content is JSON in a script element that the browser does not run, with every character escaped that could end it;
the page's script makes text nodes of it and never parses it as HTML. All its texts are made inert first
(`rollgen.inert`), line by line. A content security policy with the hashes of its two scripts and its style sheet
forbids everything else: other scripts, handlers in attributes, images, frames, requests.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Final

from rollgen.errors import UsageError
from rollgen.inert import brief, plain

_ESCAPES: Final = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
"""Of JSON inside HTML: no tag or comment can begin or end; older parsers of JavaScript break lines at the last two."""
_PAGE: Final = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="rollgen">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style id="{style_id}">{style}</style>
{templates}</head>
<body>
<noscript>This page draws its figures and samples with the JavaScript that is in it; please allow that.</noscript>
<script type="application/json" id="content">{content}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""
BEGINNING: Final = _PAGE[: _PAGE.index("<meta http-equiv")].encode()
"""Of every page, and of no other."""
_STYLES: Final = ("page.css", "samples.css")
_SCRIPTS: Final = ("dom.js", "charts.js", "sample.js", "browser.js", "report.js")
"""Files of `assets/`: the parts of one style sheet and of one script, in their order."""
_STYLE_ID: Final = "plotly.js-style-global"
"""plotly.js puts its rules into the element of this name, and makes one, which the policy forbids, where there is
none."""
_STYLE_GUARD: Final = re.compile(r'getElementById\("([0-9a-f]{64})"\)')
"""What plotly.js looks for before it adds the style sheet of its maps, which the policy forbids: it finds it."""


def render_page(content: dict[str, Any], plotly_js: str) -> str:
    """The whole file. `content["name"]` is the dataset's."""
    assets = files("rollgen.inspect.report") / "assets"
    style, script = (_joined(assets, names) for names in (_STYLES, _SCRIPTS))
    script = f"(() => {{\n{script}}})();"
    return _PAGE.format(
        policy=_policy([plotly_js, script], style),
        title=html.escape(f"{brief(content['name'])} - rollgen"),
        style_id=_STYLE_ID,
        style=style,
        templates="".join(f'<template id="{found}"></template>\n' for found in _STYLE_GUARD.findall(plotly_js)),
        content=json_for_html(content),
        plotly=plotly_js,
        script=script,
    )


def read_plotly() -> str:
    """The text of plotly.js. Raises UsageError when plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UsageError("--html draws with plotly, which is not installed: pip install plotly") from None
    text: str = get_plotlyjs()
    # What a browser hashes: HTML knows one end of line only.
    return re.sub(r"\r\n?", "\n", text)


def _joined(directory: Traversable, names: tuple[str, ...]) -> str:
    return "\n".join((directory / name).read_text(encoding="utf-8") for name in names)


def json_for_html(value: object) -> str:
    """JSON of `value`, every text of it inert, to stand between script tags."""
    text = json.dumps(_inert(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_ESCAPES)


def _inert(value: object) -> object:
    """`value` with all its texts, keys among them, made plain, line by line."""
    if isinstance(value, str):
        return value if value.isascii() and value.isprintable() else "\n".join(map(plain, value.split("\n")))
    if isinstance(value, dict):
        return {_inert(name) if isinstance(name, str) else name: _inert(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_inert(member) for member in value]
    return value


def _policy(scripts: list[str], style: str) -> str:
    """Nothing but these scripts and this style sheet."""
    allowed = " ".join(map(_hash, scripts))
    return f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
