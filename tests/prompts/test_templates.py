"""What chat templates are found to make use of. Whether they take parts agrees with vLLM on each of these."""

import pytest
from jinja2 import TemplateSyntaxError
from models.tiny import CHAT_TEMPLATE

from rollgen.prompts.templates import template_traits

EACH = "{%% for message in messages %%}%s{%% endfor %%}"


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        pytest.param(CHAT_TEMPLATE, False, id="tiny"),
        pytest.param(EACH % "{% for part in message.content %}{{ part.text }}{% endfor %}", True, id="attribute"),
        pytest.param(EACH % "{% for part in message['content'] %}{{ part }}{% endfor %}", True, id="item"),
        pytest.param(
            EACH % "{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part }}{% endfor %}",
            True,
            id="filtered",
        ),
        pytest.param(
            EACH % "{% set text = message.content %}{% for part in text %}{{ part }}{% endfor %}", True, id="assigned"
        ),
        pytest.param(
            EACH % "{% set content = message.content if x else [] %}{% for part in content %}{{ part }}{% endfor %}",
            True,
            id="computed",
        ),
        pytest.param(
            "{% macro show(it) %}{% for part in it %}{{ part }}{% endfor %}{% endmacro %}"
            + EACH % "{{ show(message.content) }}",
            True,
            id="macro",
        ),
        pytest.param(
            "{% macro show(a, it=0) %}{% for part in it %}{{ part }}{% endfor %}{% endmacro %}"
            + EACH % "{{ show(1, it=message.content) }}",
            True,
            id="macro by keyword",
        ),
        pytest.param(
            "{% macro show(content) %}{% for part in content %}{{ part }}{% endfor %}{% endmacro %}{{ show(tools) }}"
            + EACH % "{{ message.content }}",
            False,
            id="macro for something else",
        ),
        pytest.param(EACH % "{% for call in message.tool_calls %}{{ call }}{% endfor %}", False, id="another loop"),
        pytest.param(
            EACH % "{% generation %}{{ message.content }}{% endgeneration %}{% if loop.last %}{% break %}{% endif %}",
            False,
            id="tags that transformers adds",
        ),
    ],
)
def test_parts(template, parts):
    """A loop over the content of a message is what tells."""
    assert template_traits(template).parts == parts


@pytest.mark.parametrize(
    ("template", "tools", "tool_calls"),
    [
        pytest.param(CHAT_TEMPLATE, False, False, id="tiny"),
        pytest.param("{% if tools %}{{ tools | tojson }}{% endif %}", True, False, id="tools"),
        pytest.param("{% set tools = [] %}{{ tools }}", False, False, id="a variable of that name"),
        pytest.param("tools, in plain text", False, False, id="a word"),
        pytest.param(EACH % "{{ message['tool_calls'] }}", False, True, id="tool calls"),
    ],
)
def test_tools(template, tools, tool_calls):
    """A variable that the template reads, a field that it names."""
    traits = template_traits(template)
    assert (traits.tools, traits.tool_calls) == (tools, tool_calls)


def test_a_broken_template_says_where():
    """For the message that names its line."""
    with pytest.raises(TemplateSyntaxError) as failure:
        template_traits("ok\n{% if %}")
    assert failure.value.lineno == 2
