"""`treering inspect --show` marks exactly the trained tokens, on the terminal, in JSON and on the page."""

import json
import re
from html import unescape
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.cli.inspect.runs import call
from treering.cli.inspect.show import CLOSE, OPEN, as_text, printable, shown_trajectories
from treering.data import Message, Renderer, Trajectory, read_trajectories, render, write_trajectories
from treering.data.cache.dataset import TokenDataset
from treering.data.cache.open import open_dataset


def said(*turns: str) -> tuple[Message, ...]:
    return tuple(Message(role=("user", "assistant")[i % 2], content=text) for i, text in enumerate(turns))


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Two chats of one task that share a turn, and one of another task with brackets, markup and control characters."""
    file = tmp_path / "chats.jsonl"
    rows = [
        Trajectory(
            task_id="a", messages=said("Where is Basel?", "On the Rhine.", "And Bern?", "Near the Alps."), reward=1
        ),
        Trajectory(task_id="a", messages=said("Where is Basel?", "On the Rhine.", "And Thun?", "At a lake.")),
        Trajectory(task_id="b", messages=said("\x1b[31m[bold]é<b>", "[/bold] \x1b]0;x\x07 ünï<i>")),
    ]
    write_trajectories(file, rows)
    return file


def dataset_in(file: Path, tokenizer: Path) -> TokenDataset:
    return open_dataset(file, Renderer(tokenizer=tokenizer), folder=None)


def trained_texts(file: Path, tokenizer: Path) -> list[list[str]]:
    """Return what each run of trained tokens decodes to, from the masks of the renderer."""
    decode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).decode
    texts = []
    for one in render(read_trajectories(file), tokenizer):
        pairs = zip(one.tokens.tolist(), one.loss_mask.tolist(), strict=True)
        runs = [(trained, [token for token, _ in run]) for trained, run in groupby(pairs, key=lambda pair: pair[1])]
        texts.append([decode(run, skip_special_tokens=False) for trained, run in runs if trained])
    return texts


def test_the_marked_spans_are_the_trained_tokens(chats, real_data):
    tokenizer = real_data / "tokenizer"
    shown = shown_trajectories(dataset_in(chats, tokenizer), tokenizer)
    for one, expected, rendered in zip(
        shown, trained_texts(chats, tokenizer), render(read_trajectories(chats), tokenizer), strict=True
    ):
        mask = np.repeat([span.trained for span in one.spans], [span.num_tokens for span in one.spans])
        assert np.array_equal(mask, rendered.loss_mask)
        assert one.num_trained == rendered.loss_mask.sum()
        plain = as_text(one, has_colours=False).plain
        without_mark = re.sub("\u27e8.*?\u27e9", "", plain)
        marked = re.findall(f"{OPEN}(.*?){CLOSE}", without_mark, re.DOTALL)
        assert marked == [printable(text) for text in expected]
        coloured = as_text(one, has_colours=True)
        green = "".join(coloured.plain[span.start : span.end] for span in coloured.spans if "green" in str(span.style))
        assert green == "".join(marked)


def test_the_shared_prefix_is_what_another_of_the_task_begins_with(chats, real_data):
    tokenizer = real_data / "tokenizer"
    first, second, alone = shown_trajectories(dataset_in(chats, tokenizer), tokenizer)
    left, right, _ = (one.tokens.tolist() for one in render(read_trajectories(chats), tokenizer))
    common = next(i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    assert (first.num_shared, second.num_shared, alone.num_shared) == (common, common, 0)
    assert [sum(span.num_tokens for span in one.spans if span.shared) for one in (first, second)] == [common] * 2
    before, mark, _ = as_text(first, has_colours=True).plain.partition(f"\u27e8{common} shared tokens\u27e9")
    assert mark
    assert before.endswith("And ") or before.endswith("And")
    assert "\u27e8" not in as_text(alone, has_colours=True).plain


def test_special_tokens_are_distinguished_from_the_same_text(chats, real_data):
    tokenizer = real_data / "tokenizer"
    [*_, one] = shown_trajectories(dataset_in(chats, tokenizer), tokenizer)
    assert {span.text for span in one.spans if span.special} >= {"<|im_start|>", "<|im_end|>"}
    assert not any(span.special for span in one.spans if "<b>" in span.text)


def test_no_text_of_a_file_steers_the_terminal_or_the_page(chats, real_data, tmp_path, monkeypatch, capsys):
    tokenizer = str(real_data / "tokenizer")
    assert call(monkeypatch, str(chats), "--tokenizer", tokenizer, "--task", "b") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "\u241b[31m[bold]é<b>" in out
    page = tmp_path / "page.html"
    assert call(monkeypatch, str(chats), "--tokenizer", tokenizer, "--task", "b", "--html", str(page)) == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert "<b>" not in page.read_text(encoding="utf-8")


def test_the_page_marks_the_trained_tokens(chats, real_data, tmp_path, monkeypatch):
    page, tokenizer = tmp_path / "page.html", real_data / "tokenizer"
    assert call(monkeypatch, str(chats), "--tokenizer", str(tokenizer), "--html", str(page)) == 0
    text = page.read_text(encoding="utf-8")
    cards = text.split('<section class="card wide">')[1:]
    for card, expected in zip(cards, trained_texts(chats, tokenizer), strict=True):
        trained = re.findall(r'<i class="o(?: [pn])*">(.*?)</i>', card, re.DOTALL)
        assert unescape("".join(trained)) == printable("".join(expected))
    assert "reward 1" in cards[0]
    assert not re.search(r"(?:src|href)=\"(?!data:)", text)


def test_ids_are_shown_without_a_tokenizer_and_json_has_the_spans(tmp_path, monkeypatch, capsys):
    file = tmp_path / "ids.jsonl"
    rows = [([5, 6, 7], [0, 1, 1]), ([5, 6, 8], [0, 0, 1])]
    write_trajectories(
        file,
        [
            Trajectory(task_id=7, tokens=np.array(tokens, np.int32), loss_mask=np.array(mask, np.bool_))
            for tokens, mask in rows
        ],
    )
    assert call(monkeypatch, str(file), "--show", "1", "--json") == 0
    [one] = json.loads(capsys.readouterr().out)["trajectories"]
    assert [(span["text"], span["trained"], span["shared"]) for span in one["spans"]] == [
        ("5", False, True),
        (" 6", True, True),
        (" 7", True, False),
    ]
    assert (one["row"], one["task_id"], one["num_shared"], one["num_in_task"]) == (1, 7, 2, 2)
    assert call(monkeypatch, str(file), "--task", "7") == 0
    out = capsys.readouterr().out
    assert f"5{OPEN} 6\u27e82 shared tokens\u27e9 7{CLOSE}" in out
    assert f"5 6\u27e82 shared tokens\u27e9{OPEN} 8{CLOSE}" in out


def test_an_unknown_task_is_refused_with_known_ones(tmp_path, monkeypatch, capsys):
    file = tmp_path / "ids.jsonl"
    write_trajectories(file, [Trajectory(task_id=task, tokens=np.array([5], np.int32)) for task in range(7)])
    assert call(monkeypatch, str(file), "--task", "x") == 2
    assert "has no task 'x'; its first ones are '0', '1', '2', '3', '4' of 7" in capsys.readouterr().err
