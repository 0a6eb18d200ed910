"""Tokenizer folders with a chat template, and what a chat becomes under it."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from treering.data import Message, Trajectory, render
from treering.data.rendering.renderer import Template


def with_template(folder: Path, target: Path, template: str | None) -> Path:
    shutil.copy(folder / "tokenizer.json", target / "tokenizer.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({} if template is None else {"chat_template": template})
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


def said(role: str, content: str | None, **fields) -> Message:
    return Message(role=role, content=content, **fields)


def texts(folder: Path, trajectories: Sequence[Trajectory], template: Template) -> list[tuple[str, str]]:
    """Return text and trained text of each sequence."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def text(ids) -> str:
        return tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    rendered = render(trajectories, folder, template)
    return [(text(one.tokens), text(one.tokens[one.loss_mask])) for one in rendered]


def shown(folder: Path, *messages: Message, **fields) -> list[tuple[str, str]]:
    """Return text and trained text of each sequence of a chat."""
    return texts(folder, [Trajectory(task_id=1, messages=messages, **fields)], "hf")
