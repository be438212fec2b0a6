"""What a chat template can do, read off its Jinja syntax tree before any row is rendered.

A template that does not use something it is given says nothing: tools vanish, lists print as Python. So it is asked
first. Whether content may be a list of parts is decided as vLLM does (`vllm/renderers/hf.py`,
`_detect_content_format`): some loop of the template runs over the content of a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a chat template makes use of."""

    tools: bool
    """The variable `tools`."""
    tool_calls: bool
    """The field `tool_calls` of a turn."""
    parts: bool
    """Content as a list of parts; if not, texts have to be joined."""


@lru_cache(maxsize=4)
def template_traits(template: str) -> TemplateTraits:
    """Read a template's source. Raises jinja2.TemplateSyntaxError."""
    tree = _ENVIRONMENT.parse(template)
    return TemplateTraits(
        tools="tools" in meta.find_undeclared_variables(tree),
        tool_calls="tool_calls" in template,
        parts=_loops_over_content(tree),
    )


class _Generation(Extension):
    """`{% generation %}`, with which templates mark what the assistant wrote: its body is read like any other."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements up to `{% endgeneration %}`."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
)
"""As transformers sets it up."""


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether a loop runs over `x.content`, a variable set to it, or a macro's parameter that is given it."""
    names = _assigned_content(tree) | _macro_content(tree)
    in_macros = {id(loop) for macro in tree.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)}
    for loop in tree.find_all(nodes.For):
        over = _inner(loop.iter)
        # Outside macros, `content` is the content of a message however it was computed.
        known = names if id(loop) in in_macros else names | {"content"}
        if _is_content(over) or (isinstance(over, nodes.Name) and over.name in known):
            return True
    return False


def _assigned_content(tree: nodes.Template) -> set[str]:
    """Variables of `{% set variable = message.content %}`."""
    assigned = tree.find_all(nodes.Assign)
    return {item.target.name for item in assigned if isinstance(item.target, nodes.Name) and _is_content(item.node)}


def _macro_content(tree: nodes.Template) -> set[str]:
    """Parameters of macros that are called with the content of a message."""
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    names: set[str] = set()
    for call in tree.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        if macro is not None:
            names |= {to.name for to, given in zip(macro.args, call.args, strict=False) if _is_content(given)}
            names |= {keyword.key for keyword in call.kwargs if _is_content(keyword.value)}
    return names


def _is_content(node: nodes.Node) -> bool:
    """`x.content` or `x['content']`, filtered, tested or sliced in any way."""
    node = _inner(node)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content" and isinstance(node.node, nodes.Name)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return bool(node.arg.value == "content") and isinstance(node.node, nodes.Name)
    return False


def _inner(node: nodes.Node) -> nodes.Node:
    """What filters, tests and slices are applied to."""
    if isinstance(node, (nodes.Filter, nodes.Test)) and node.node is not None:
        return _inner(node.node)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _inner(node.node)
    return node
