"""A chat that continues after the tokens of a turn equals its template's text, or the continuation is None."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.data.rendering.chat_folder import said, with_template
from tests.data.rendering.test_turn_ends import NEXT_ROLE, TEXT_END
from treering.data import ToolCall
from treering.data.rendering.renderer import Renderer

FIRST = (said("user", "1"), said("assistant", "one"))
LATER = (said("user", "2"), said("assistant", "two"), said("tool", "3"))


def prompt_of(renderer: Renderer, *messages: object) -> list[int]:
    return renderer.prompt(messages).tolist()


@pytest.mark.parametrize("form", ["plain", "template", "next role", "text end"])
def test_a_continuation_ends_in_the_tokens_of_the_whole_prompt(tokenizer_dir: Path, tmp_path: Path, form: str) -> None:
    templates = {"next role": NEXT_ROLE, "text end": TEXT_END}
    folder = with_template(tokenizer_dir, tmp_path, templates[form]) if form in templates else tokenizer_dir
    renderer = Renderer(tokenizer=folder, template="plain" if form == "plain" else "hf")
    messages = (*FIRST, LATER[0])
    tail = renderer.continuation(messages, 2)
    assert tail is not None
    whole = prompt_of(renderer, *messages)
    assert whole[-tail.size :] == tail.tolist()
    # The prompt and the answer come before it.
    before = whole[: -tail.size]
    opened = prompt_of(renderer, FIRST[0])
    assert before[: len(opened)] == opened
    assert len(before) > len(opened)


def test_after_a_call_a_chat_goes_on_with_the_token_before_the_tools_answer(
    tokenizer_dir: Path, tmp_path: Path
) -> None:
    """Like GLM's template, which begins a tool's answer and a question with different tokens."""
    renderer = Renderer(tokenizer=with_template(tokenizer_dir, tmp_path, NEXT_ROLE), template="hf")
    call = said("assistant", "so", tool_calls=(ToolCall(name="f", arguments={"x": 1}),))
    messages = (said("user", "1"), call, said("tool", "r"))
    tail = renderer.continuation(messages, 2)
    assert tail is not None
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    assert tokenizer.decode(tail.tolist(), skip_special_tokens=False) == "<|im_end|>r[answer]"
    assert prompt_of(renderer, *messages)[-tail.size :] == tail.tolist()


def test_a_template_that_strips_thoughts_has_no_continuation(tokenizer_dir: Path, tmp_path: Path) -> None:
    stripping = (
        "{% for m in messages %}<|im_start|>{{ m.role }} "
        "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('/')[-1] }}{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    renderer = Renderer(tokenizer=with_template(tokenizer_dir, tmp_path, stripping), template="hf")
    thinking = (said("user", "1"), said("assistant", "thought/one"), said("user", "2"))
    assert renderer.continuation(thinking, 2) is None
    plain = (said("user", "1"), said("assistant", "one"), said("user", "2"))
    assert renderer.continuation(plain, 2) is not None


def test_without_an_end_of_a_turn_there_is_none(markerless_dir: Path, tmp_path: Path) -> None:
    renderer = Renderer(tokenizer=markerless_dir, template="plain")
    assert renderer.continuation((*FIRST, LATER[0]), 2) is None
