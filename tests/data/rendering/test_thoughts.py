"""Thoughts under templates whose prompts open or close one, and the places in which templates want them."""

import pytest

from tests.data.rendering.chat_folder import said, shown, with_template
from treering.data import Renderer, Trajectory
from treering.data.rendering.thoughts import answer_part, answer_start
from treering.errors import DataWarning, InputError

OPENED, CLOSED = "<think>\n", "<think>\n\n</think>\n\n"


def template(opening: str, thought: str = "", after: str = "") -> str:
    """Return a template: prompts end with `opening`; answers begin with `thought` or, without reasoning, `after`."""
    return (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% if m.reasoning_content %}"
        f"{thought}{{% else %}}{after}{{% endif %}}{{% endif %}}{{{{ m.content }}}}<end>{{% endfor %}}"
        f"{{% if add_generation_prompt %}}<assistant>{opening}{{% endif %}}"
    )


KEPT = "<think>\n{{ m.reasoning_content }}\n</think>\n\n"


@pytest.mark.parametrize(
    ("opening", "after", "lead"),
    [
        (OPENED, "<think></think>", "<think>\n</think>"),
        (OPENED, "<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n"),
        (OPENED, "<think>\n", "<think>\n\n</think>\n\n"),
        (OPENED, "", "<think>\n\n</think>\n\n"),
        (OPENED, "<think>\n\n\n\n</think>", "<think>\n\n\n\n</think>"),
        ("<think>", "</think>", "<think></think>"),
        ("[THINK]", "", "[THINK][/THINK]"),
        ("<|START_THINKING|>", "", "<|START_THINKING|><|END_THINKING|>"),
        ("<|channel>thought\n", "", "<|channel>thought\n<channel|>"),
    ],
)
def test_an_answer_without_a_thought_never_stands_inside_an_opened_one(tokenizer_dir, tmp_path, opening, after, lead):
    folder = with_template(tokenizer_dir, tmp_path, template(opening, KEPT, after))
    chat = said("user", "1"), said("assistant", "A")
    with pytest.warns(DataWarning, match="an empty thought is closed"):
        assert shown(folder, *chat) == [(f"<user>1<end><assistant>{lead}A<end>", "A<end>")]
    renderer = Renderer(tokenizer=folder, template="hf")
    prompt = renderer.prompt(chat[:1])
    with pytest.warns(DataWarning):
        [whole] = renderer.render([Trajectory(task_id=1, messages=chat)])
    assert whole.tokens[: prompt.size].tolist() == prompt.tolist()


@pytest.mark.parametrize("thought", [KEPT, "", "<think>\n"], ids=["kept", "dropped", "opened again"])
def test_a_thought_stands_once_in_the_opened_one_whether_the_template_keeps_it_or_not(tokenizer_dir, tmp_path, thought):
    folder = with_template(tokenizer_dir, tmp_path, template(OPENED, thought))
    # The thought has the same text as the answer, so a search by text would find only one of them.
    [(text, trained)] = shown(folder, said("user", "1"), said("assistant", "4", reasoning="4"))
    assert (text, trained) == ("<user>1<end><assistant><think>\n4\n</think>\n\n4<end>", "4\n</think>\n\n4<end>")


@pytest.mark.parametrize("after", ["", CLOSED, "</think>"])
def test_after_a_closed_thought_the_answer_alone_is_the_policys(tokenizer_dir, tmp_path, after):
    folder = with_template(tokenizer_dir, tmp_path, template(CLOSED, KEPT, after))
    [(text, trained)] = shown(folder, said("user", "1"), said("assistant", "A"))
    assert (text, trained) == (f"<user>1<end><assistant>{CLOSED}A<end>", "A<end>")


@pytest.mark.parametrize(
    "answer", [said("assistant", "A", reasoning="hm"), said("assistant", "<think>hm</think>A")], ids=["field", "tags"]
)
def test_a_thought_after_a_prompt_that_closes_one_is_refused_with_the_switch(tokenizer_dir, tmp_path, answer):
    folder = with_template(tokenizer_dir, tmp_path, template(CLOSED, KEPT))
    with pytest.raises(InputError, match=r"messages\[1\] has a thought; remove it, or .*enable_thinking = true"):
        shown(folder, said("user", "1"), answer)


def test_a_thought_that_the_answers_text_hides_is_missed(tokenizer_dir, tmp_path):
    folder = with_template(tokenizer_dir, tmp_path, template(""))
    with pytest.raises(InputError, match=r"drops the reasoning of messages\[1\].*write it into the content"):
        shown(folder, said("user", "1"), said("assistant", "4", reasoning="4"))


def test_a_thought_with_other_tags_than_the_prompts_is_refused(tokenizer_dir, tmp_path):
    folder = with_template(tokenizer_dir, tmp_path, template("<|START_THINKING|>"))
    with pytest.raises(InputError, match=r"ends a thought with '<\|END_THINKING\|>', but the content of messages\[1\]"):
        shown(folder, said("user", "1"), said("assistant", "<think>hm</think>A"))


def test_a_thought_becomes_a_part_where_a_template_wants_one(tokenizer_dir, tmp_path):
    # Like Mistral's: a content is a text, or a list of parts.
    folder = with_template(
        tokenizer_dir,
        tmp_path,
        "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ '[THINK]' + p.thinking + '[/THINK]' if p.type == 'thinking' else p.text }}"
        "{% endfor %}{% endif %}</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    )
    [(_, trained)] = shown(folder, said("user", "1"), said("assistant", "A", reasoning="hm"))
    assert trained == "[THINK]hm[/THINK]A</s>"


PRINTING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if m.content is string else PRINTED }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("printed", ["m.content | tojson", "m.content", "m.content | string", "m.content[0] | items"])
def test_a_template_that_prints_parts_as_they_are_stored_knows_no_thoughts(tokenizer_dir, tmp_path, printed):
    """Like LFM2's template, which would write a list of parts as JSON."""
    folder = with_template(tokenizer_dir, tmp_path, PRINTING.replace("PRINTED", printed))
    with pytest.raises(InputError, match="must render thoughts, but it drops the reasoning"):
        shown(folder, said("user", "1"), said("assistant", "A", reasoning="hm"))
    assert shown(folder, said("user", "1"), said("assistant", "A"))[0][1] == "A<end>"


@pytest.mark.parametrize(
    ("text", "prompt", "start"),
    [
        ("4", "", 0),
        ("<think>hm</think>4", "", 17),
        ("<think>hm 4", "", None),
        ("hm</think>4", "", 10),
        ("hm</think>4", "<assistant><think>\n", 10),
        ("hm 4", "<assistant><think>\n", None),
        ("hm 4", "<assistant><think>\n\n</think>\n\n", 0),
        ("hm[/THINK]4", "<assistant><think>", None),
        ("<think>a</think>b<think>c</think>d", "", 33),
        ("<think>a</think>b<think>c", "", None),
        ("<think>a<think>b</think>c", "", 24),
        ("to=self<|message|>hm<|eom|>4", "", 27),
    ],
)
def test_an_answer_begins_after_the_last_thought_that_has_ended(text, prompt, start):
    assert answer_start(text, prompt) == start
    if not prompt:
        assert answer_part(text) == ("" if start is None else text[start:])
