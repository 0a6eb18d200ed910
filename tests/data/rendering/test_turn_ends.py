"""Where the policy's turn ends under templates that end a turn in history differently from the last turn."""

import pytest

from tests.data.rendering.chat_folder import said, shown, with_template
from treering.data import ToolCall
from treering.errors import InputError

# Like GLM: no end token; the next role's token ends a turn, and differs between tool results and questions.
NEXT_ROLE = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_end|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}[answer]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% else %}<|im_start|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[answer]{% endif %}"
)
# Like Phi-3: a chat that opens no turn ends with one more token.
TEXT_END = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt else '<|im_start|>' }}"
)
# Like gpt-oss: another token ends the last answer, which removes the thoughts of earlier calls.
RETURNING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.thinking and loop.index0 >= ns.last and not (m.tool_calls and ns.last > loop.index0) %}"
    "({{ m.thinking }})<assistant>{% endif %}{{ m.content | tojson if m.role == 'tool' else m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_start|>' if loop.last and m.role == 'assistant' and not m.tool_calls else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ALWAYS_OPEN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}<assistant>"
CALL = ToolCall(name="find", arguments='{"x":1}')


def test_the_token_that_only_history_has_ends_each_turn_and_is_trained(tokenizer_dir, tmp_path):
    folder = with_template(tokenizer_dir, tmp_path, NEXT_ROLE)
    chat = said("user", "1"), said("assistant", "one"), said("user", "2"), said("assistant", "two")
    [(text, trained)] = shown(folder, *chat)
    assert text == "<|im_start|>1[answer]one<|im_start|>2[answer]two<|im_start|>"
    assert trained == "one<|im_start|>two<|im_start|>"


@pytest.mark.parametrize("answer", [(said("tool", "r"),), ()], ids=["answered", "last"])
def test_a_call_ends_with_the_token_before_a_tools_answer(tokenizer_dir, tmp_path, answer):
    folder = with_template(tokenizer_dir, tmp_path, NEXT_ROLE)
    [(_, trained)] = shown(folder, said("user", "1"), said("assistant", "so ", tool_calls=(CALL,)), *answer)
    assert trained == 'so find{"x":1}<|im_end|>'


def test_a_token_that_the_template_adds_after_the_last_turns_end_is_not_trained(tokenizer_dir, tmp_path):
    folder = with_template(tokenizer_dir, tmp_path, TEXT_END)
    chat = said("user", "1"), said("assistant", "one"), said("user", "2"), said("assistant", "two")
    assert shown(folder, *chat) == [
        (
            "<user>1<|im_end|>\n<assistant>one<|im_end|>\n<user>2<|im_end|>\n<assistant>two<|im_end|>\n<|im_start|>",
            "one<|im_end|>two<|im_end|>",
        )
    ]


def test_another_end_token_in_the_last_turn_is_trained_and_history_has_its_own(tokenizer_dir, tmp_path):
    folder = with_template(tokenizer_dir, tmp_path, RETURNING)
    chat = said("user", "1"), said("assistant", "one"), said("user", "2"), said("assistant", "two")
    assert shown(folder, *chat) == [
        ("<user>1<|im_end|><assistant>one<|im_start|>", "one<|im_start|>"),
        (
            "<user>1<|im_end|><assistant>one<|im_end|><user>2<|im_end|><assistant>two<|im_start|>",
            "two<|im_start|>",
        ),
    ]


def test_an_answer_stands_after_the_prompt_with_thoughts_though_its_arrival_drops_them(tokenizer_dir, tmp_path):
    folder = with_template(tokenizer_dir, tmp_path, RETURNING)
    [(text, trained)] = shown(
        folder,
        said("user", "1"),
        said("assistant", "", reasoning="hm", tool_calls=(CALL,)),
        said("tool", 'a\n"b"'),
        said("assistant", "two", reasoning="so"),
    )
    assert text == (
        '<user>1<|im_end|><assistant>(hm)<assistant>find{"x":1}<|im_end|><tool>"a\\n\\"b\\""<|im_end|>'
        "<assistant>(so)<assistant>two<|im_start|>"
    )
    assert trained == '(hm)<assistant>find{"x":1}<|im_end|>(so)<assistant>two<|im_start|>'


def test_a_template_that_always_opens_a_turn_is_refused(tokenizer_dir, tmp_path):
    folder = with_template(tokenizer_dir, tmp_path, ALWAYS_OPEN)
    with pytest.raises(InputError, match="only where add_generation_prompt is set, and it always does, with"):
        shown(folder, said("user", "1"), said("assistant", "one"))


def test_an_assistant_that_speaks_first_has_no_prompt_and_is_refused(tokenizer_dir):
    with pytest.raises(InputError, match=r"messages\[0\] is the assistant's; put the prompt before it, or give it wei"):
        shown(tokenizer_dir, said("assistant", "one"), said("user", "1"))
