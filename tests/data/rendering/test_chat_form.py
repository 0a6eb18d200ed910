"""A chat is rendered by its tokenizer's template, else in the plain form if the markers are single tokens."""

import re

import numpy as np
import pytest

from tests.data.rendering.chat_folder import said, with_template
from treering.data import Renderer, Trajectory, render
from treering.errors import ConfigError

CHAT = Trajectory(task_id=1, messages=(said("user", "12?"), said("assistant", "a tool")))
RAW = Trajectory(task_id=1, messages=CHAT.messages, format="raw")
IDS = Trajectory(task_id=1, tokens=np.array([4, 5], np.int32))
OTHER = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def tokens_of(trajectory, folder, template):
    return [one.tokens.tolist() for one in render([trajectory], folder, template)]


def test_a_chat_takes_the_template_of_its_tokenizer_unless_the_plain_form_is_asked_for(tokenizer_dir, tmp_path):
    folder = with_template(tokenizer_dir, tmp_path, OTHER)
    found = {template: tokens_of(CHAT, folder, template) for template in ("auto", "hf", "plain")}
    assert found["auto"] == found["hf"] != found["plain"]
    assert found["plain"] == tokens_of(CHAT, tokenizer_dir, "plain")
    assert tokens_of(RAW, folder, "hf") == tokens_of(RAW, tokenizer_dir, "plain")
    bare = with_template(tokenizer_dir, tmp_path, None)
    assert tokens_of(CHAT, bare, "auto") == found["plain"]
    with pytest.raises(ConfigError, match="needs a chat template"):
        tokens_of(CHAT, bare, "hf")


def test_markers_that_are_ordinary_tokens_are_refused_unless_the_plain_form_is_asked_for(markerless_dir):
    with pytest.raises(ConfigError, match=r"<\|im_start\|> and <\|im_end\|> are single tokens, and .* has neither"):
        tokens_of(CHAT, markerless_dir, "auto")
    with pytest.raises(ConfigError, match="has neither"):
        Renderer(tokenizer=markerless_dir).prompt(CHAT.messages[:1])
    assert tokens_of(CHAT, markerless_dir, "plain")


def test_raw_text_and_token_ids_need_neither_template_nor_markers(markerless_dir):
    assert tokens_of(RAW, markerless_dir, "auto") == tokens_of(RAW, markerless_dir, "plain")
    assert Renderer(tokenizer=markerless_dir).prompt(CHAT.messages[:1], is_raw=True).size
    assert tokens_of(IDS, None, "auto") == [[4, 5]]


@pytest.mark.parametrize(
    ("has_template", "template", "words"),
    [
        (True, "auto", "by the chat template of"),
        (True, "hf", "by the chat template of"),
        (False, "auto", "in the plain form: .* has no chat template"),
        (True, "plain", "in the plain form$"),
    ],
)
def test_the_form_is_reported_once_a_chat_was_rendered(tokenizer_dir, tmp_path, has_template, template, words):
    folder = with_template(tokenizer_dir, tmp_path, OTHER if has_template else None)
    renderer = Renderer(tokenizer=folder, template=template)
    renderer.render([IDS, RAW])
    assert renderer.form_note is None
    renderer.render([CHAT])
    renderer.render([IDS])
    assert re.search(f"^chats are rendered {words}", renderer.form_note)
