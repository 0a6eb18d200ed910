"""Rewards that do something to the process they run in, for some rollouts or for all, and the task that they reward."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

from benchmarks.common.tiny_model import TINY_MODEL
from benchmarks.faults.task import SETTINGS, save_tokenizer
from treering.rl.tasks.task import Prompt

HARMLESS = ("prints", "forks", "changes_folder")
"""Their run is that of `honest`."""

RAISING = ("exits", "interrupts")
"""Their run is that of `raises`."""

ALWAYS = "always_exits"
"""Its run ends in one line."""

_WORDS = ["sum", "of", *"0123456789", "one", "two", "three"]


def write_task(folder: Path) -> Path:
    """A configuration of a tiny random policy on a file of prompts; returns its file."""
    save_tokenizer(folder / "words", _WORDS)
    prompts = [{"prompt": f"sum of {i} {i + 1}", "id": f"p{i}"} for i in range(4)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    task = f'kind = "prompts"\nfile = "{folder}/prompts.jsonl"\ntokenizer = "{folder}/words"\ntemplate = "raw"'
    before, after = SETTINGS.format(model=TINY_MODEL).split("[task]")
    file = folder / "rewarded.toml"
    file.write_text(f"{before}[task]\n{task}\n[sampling]{after.partition('[sampling]')[2]}")
    return file


def honest(prompt: Prompt, text: str) -> float:
    """A number that differs between the rollouts of a random policy."""
    return float(len(set(text.split())))


def raises(prompt: Prompt, text: str) -> float:
    return _for_some(text, _fail)


def prints(prompt: Prompt, text: str) -> float:
    return _for_some(text, _print)


def forks(prompt: Prompt, text: str) -> float:
    return _for_some(text, os.fork)


def changes_folder(prompt: Prompt, text: str) -> float:
    return _for_some(text, lambda: os.chdir("/"))


def exits(prompt: Prompt, text: str) -> float:
    return _for_some(text, sys.exit)


def interrupts(prompt: Prompt, text: str) -> float:
    return _for_some(text, _interrupt)


def always_exits(prompt: Prompt, text: str) -> float:
    sys.exit("no judge")


def _for_some(text: str, act: Callable[[], object]) -> float:
    if crc32(text.encode()) % 8 == 0:
        act()
    return float(len(set(text.split())))


def _fail() -> None:
    raise ValueError("no number")


def _interrupt() -> None:
    raise KeyboardInterrupt


def _print() -> None:
    print("printed by python")
    os.write(1, b"written to the descriptor\n")
