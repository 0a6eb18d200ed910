"""The part trl of `python -m benchmarks real`, on a tiny model in this process."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl", reason="TRL is not installed: make trl-test")

from benchmarks.common.progress import silent
from benchmarks.real import trl as part

from tests.integrations.trl import runs
from tests.integrations.words import EOS, PAD, word_tokenizer
from tests.models import VOCAB, build
from treering.cli.demo import DemoSize

pytestmark = pytest.mark.filterwarnings("ignore")

SIZE = DemoSize(num_prompts=4, prompts_per_step=2, group_size=4, num_epochs=2)
WORDS = ("What", "is", "+", "Answer", "with", "only", "the", "number.", *map(str, range(1, 10)))
NAMES = {3 + i: word for i, word in enumerate((*WORDS, *(f"{number}?" for number in range(1, 10))))}


def agents(*_: Any) -> dict[str, list[Any]]:
    """Three tasks with two branches each that share a start, one solved and one not."""
    tasks = {}
    for task in range(3):
        start = [4 + task, 5, 6, 7]
        ends = ([8, 9, 10], [8, 11, 12, 13])
        tasks[str(task)] = [
            SimpleNamespace(
                tokens=np.array(start + end, np.int32), loss_mask=[0, 0, 0, 0] + [1] * len(end), reward=reward
            )
            for end, reward in zip(ends, (1.0, 0.0), strict=True)
        ]
    return tasks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build("qwen3", 0, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None).save_pretrained(folder)
    tokenizer = word_tokenizer(VOCAB, NAMES)
    tokenizer.chat_template = runs.tokenizer().chat_template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("part")


@pytest.fixture(scope="module")
def report(model: Path, folder: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part, "alone", lambda work, *arguments: work(*arguments))
        patch.setattr(part, "agent_rows", agents)
        patch.setattr(part, "data_folder", lambda: Path())
        # One token, so that some are a number alone and earn something.
        patch.setattr(part, "MAX_NEW", 1)
        return part.measure(folder, model, size=SIZE, on_progress=silent)


def test_shared_prefixes_train_what_the_stock_trainer_trains(report: dict[str, Any]) -> None:
    for kind in part.WAYS:
        stock, shared = (report[kind][way]["steps"] for way in ("stock", "shared"))
        assert len(stock) == len(shared) == (SIZE.num_steps if kind == "grpo" else part.EXACT_STEPS)
        for one, other in zip(stock, shared, strict=True):
            assert one.get("tokens") == other.get("tokens")
            assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)
            assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
        apart = report[kind]["apart"]
        assert max(apart["gradients"]) < 3e-6
        # Adam divides a gradient by its size, so where it is all but 0 rounding decides the step.
        assert apart["weights"] < 1e-5


def test_drafts_change_no_token(report: dict[str, Any]) -> None:
    assert report["grpo"]["steps_with_other_tokens_by_drafts"] == 0
    rewards = [[row["reward"] for row in report["grpo"][way]["steps"]] for way in ("engine", "drafts")]
    assert rewards[0] == rewards[1]


def test_flat_and_computed_tokens_are_those_of_the_rows(report: dict[str, Any]) -> None:
    rows = [row.tokens.tolist() for rows in agents().values() for row in rows]
    distinct = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    assert (report["sft"]["shared"]["flat_tokens"], report["sft"]["shared"]["computed_tokens"]) == (
        sum(map(len, rows)),
        len(distinct),
    )


def test_what_later_parts_need_is_left_and_nothing_is_done_again(
    report: dict[str, Any], model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = sorted(path.parent.name for path in folder.rglob("checkpoint-*/model.safetensors"))
    assert saved == ["checkpoint-2", "checkpoint-4"]
    assert not list(folder.rglob("*.pt"))
    monkeypatch.setattr(part, "alone", lambda *_: pytest.fail("done again"))
    monkeypatch.setattr(part, "data_folder", lambda: Path())
    assert part.measure(folder, model, size=SIZE, on_progress=silent) == report


def test_a_step_has_the_means_of_the_steps_after_the_first() -> None:
    rows = [{"whole_s": 9.0, "sampling_s": 1.0, "reward": 0.0}]
    rows += [{"whole_s": 4.0, "sampling_s": 1.0, "reward": 0.5}, {"whole_s": 6.0, "sampling_s": 3.0, "reward": 1.0}]
    found = part.summary(rows)
    assert found["processor_s"] == {"sampling": 2.0, "training": 3.0, "whole": 5.0, "first": 9.0}
    assert found["reward"] == 0.5
