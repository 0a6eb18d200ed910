"""Chat templates render as Transformers renders them, using only the files of the tokenizer's folder."""

import json
from datetime import date, datetime

import pytest
from transformers import AutoTokenizer

from tests.data.rendering import test_families, test_template
from tests.data.rendering.chat_folder import said, with_template
from treering.data.rendering.template import ChatTemplate
from treering.errors import ConfigError, InputError

CHAT = said("system", "Be <kind> & brief."), said("user", "1"), said("assistant", "one "), said("user", "ä")
TOOL = {"type": "function", "function": {"name": "track", "parameters": {"b": [1, 2.5], "a": None}}}
# Language features that templates use: whitespace control, loops with breaks, namespaces, dicts, JSON with settings.
FEATURES = """{{ bos_token }}{{ pad_token }}{{ image_token }}
{%- set ns = namespace(count=0, self='x') %}
{% for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {%- if ns.count > 1 %}{% break %}{% endif %}
    {% set ns.count = ns.count + 1 %}
<{{ m.role }}>{% generation %}{% set x = m.content | trim %}{{ x }}{% endgeneration %}{{ x is defined }}
{% endfor %}
{{ dict(a=ns.self) | tojson(indent=1, sort_keys=true) }}{{ dict.fromkeys(['k'], 1).k }}{{ tools | tojson }}
{{ documents is none }}{{ strftime_now('%d %b %Y') }}{% if add_generation_prompt %}<assistant>{% endif %}
"""
FAMILIES = [FEATURES] + [
    value
    for module in (test_template, test_families)
    for name, value in vars(module).items()
    if name.isupper() and isinstance(value, str) and "{%" in value and name not in ("CALLING", "JOINING")
]


def own_tokens(folder, **tokens):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | tokens))
    return folder


def as_transformers(folder, tools, *, opens_turn):
    messages = [{"role": message.role, "content": message.content} for message in CHAT]
    return AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
        messages, tools=[TOOL] if tools else None, tokenize=False, add_generation_prompt=opens_turn
    )


@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["alone", "tools"])
@pytest.mark.parametrize("template", FAMILIES)
def test_a_template_renders_as_in_transformers(tokenizer_dir, tmp_path, template, tools):
    folder = with_template(tokenizer_dir, tmp_path, template)
    end = {"content": "<|im_end|>", "special": True, "__type": "AddedToken"}
    own_tokens(folder, bos_token="<|im_start|>", eos_token=end, image_token="<img>", pad_token=None)
    ours = ChatTemplate(folder, date=datetime.now().date())
    assert ours._takes_parts == (template is test_families.PARTS)
    if ours._takes_parts:
        return
    assert ours.text(CHAT, tools) == as_transformers(folder, tools, opens_turn=False)
    assert ours.prompt(CHAT, tools) == as_transformers(folder, tools, opens_turn=True)
    assert set(AutoTokenizer.from_pretrained(str(folder)).all_special_tokens) <= set(ours.special_tokens)


@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["alone", "tools"])
def test_of_several_templates_that_for_tools_is_taken_where_there_are_tools(tokenizer_dir, tmp_path, tools):
    folder = with_template(tokenizer_dir, tmp_path, None)
    named = [{"name": name, "template": f"{name} {{{{ messages[0].content }}}}"} for name in ("default", "tool_use")]
    own_tokens(folder, chat_template=named)
    expected = "tool_use Be <kind> & brief." if tools else "default Be <kind> & brief."
    assert ChatTemplate(folder).text(CHAT, tools) == expected == as_transformers(folder, tools, opens_turn=False)
    # Files take precedence over the settings.
    (folder / "chat_template.jinja").write_text("file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("file for tools")
    expected = "file for tools" if tools else "file"
    assert ChatTemplate(folder).text(CHAT, tools) == expected == as_transformers(folder, tools, opens_turn=False)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{{ dict.__class__.__base__ }}",
        "{{ raise_exception.__globals__.items() }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(tokenizer_dir, tmp_path, template):
    with pytest.raises(InputError, match="the chat template refuses the chat"):
        ChatTemplate(with_template(tokenizer_dir, tmp_path, template)).text(CHAT)


def test_a_token_that_only_the_class_of_the_tokenizer_knows_is_refused_by_name(tokenizer_dir, tmp_path):
    folder = with_template(tokenizer_dir, tmp_path, "{{ bos_token }}{{ messages }}")
    assert ChatTemplate(folder).text(CHAT[1:2]).startswith("[{")
    with pytest.raises(ConfigError, match=r"writes bos_token, and no file of .* says which"):
        ChatTemplate(own_tokens(folder, tokenizer_class="LlamaTokenizer"))
    (folder / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>", "lstrip": false}}')
    assert ChatTemplate(folder).text(CHAT[1:2]).startswith("<s>[{")


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"chat_template": "{% for %}"}, "a chat template is Jinja"),
        ({"chat_template": [{"name": "rag", "template": "x"}]}, "must be named default"),
        ({"chat_template": 3}, "chat_template must be text"),
        ({"chat_template": "x", "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}, "brings its own Python code"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_with_its_reason(tokenizer_dir, tmp_path, settings, rule):
    folder = own_tokens(with_template(tokenizer_dir, tmp_path, None), **settings)
    with pytest.raises(ConfigError, match=rule):
        ChatTemplate(folder, date=date(2024, 7, 26))
