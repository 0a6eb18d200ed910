"""The demo trains one policy twice from the same start and reports what it measured; the policy learns."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from transformers.utils import logging as transformers_logging

from tests.data.conftest import CHAT_TEMPLATE, save_tokenizer
from tests.models import build
from treering.cli import demo
from treering.cli.demo import (
    SIDES,
    DemoReport,
    DemoSize,
    WarmStart,
    demo_task,
    measure_accuracy,
    sums_sections,
    warm_start,
    write_config,
)
from treering.cli.display import PlainConsole
from treering.cli.train import open_training
from treering.config import RlConfig, load
from treering.data import read_trajectories
from treering.errors import InputError
from treering.rl.loop import RlLoop

SMALL = DemoSize(num_prompts=8, prompts_per_step=4, group_size=8, num_epochs=2, max_batch=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


def started(enough: float) -> WarmStart:
    """Return a policy that gets a share of the sums right."""
    return warm_start(demo_task(DemoSize().num_prompts), seed=0, enough=enough, on_step=lambda _step, _accuracy: None)


@pytest.fixture(scope="module")
def report(folder: Path) -> DemoReport:
    """The report of a small demo, of a policy that knows how sums look."""
    transformers_logging.enable_progress_bar()
    start = started(0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "warm_start", lambda *_, **__: start)
        return demo.measure(folder, SMALL, seed=0, console=Console(quiet=True))


def test_no_bar_of_a_library_stands_in_the_output(report: DemoReport) -> None:
    assert not transformers_logging.is_progress_bar_enabled()


def test_both_loops_sample_the_same_tokens(report: DemoReport) -> None:
    assert report.first_difference is None
    assert report.plain.num_sampled == report.treering.num_sampled > 0
    assert report.plain.first_reward == report.treering.first_reward
    assert report.plain.num_updates == report.treering.num_updates > 0


def test_only_one_side_drafts_and_shares(report: DemoReport) -> None:
    plain, ours = report.plain, report.treering
    assert (plain.num_drafted, plain.tokens_per_forward) == (0, 1.0)
    assert ours.tokens_per_forward > 1.0
    assert plain.unique_tokens == plain.flat_tokens == ours.flat_tokens > ours.unique_tokens
    assert (plain.sharing, report.token_bound) == (0.0, pytest.approx(1 / (1 - ours.sharing)))
    assert 1.0 < report.flop_bound <= report.token_bound


def test_ratios_are_those_of_the_seconds(report: DemoReport) -> None:
    plain, ours = report.plain, report.treering
    assert report.rollout_ratio == pytest.approx(plain.rollout_s / ours.rollout_s)
    assert report.share_of_flop_bound == pytest.approx(plain.train_s / ours.train_s / report.flop_bound)
    assert report.step_ratio == pytest.approx(plain.seconds / ours.seconds)
    assert plain.seconds >= plain.rollout_s + plain.train_s


def test_both_run_folders_hold_all_that_a_run_leaves(report: DemoReport, folder: Path) -> None:
    assert json.loads((folder / "demo.json").read_text())["num_steps"] == report.num_steps == 4
    rollouts = {}
    for side in SIDES:
        run = folder / side
        assert json.loads((run / "config.json").read_text())["rl"]["num_epochs"] == 2
        assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]
        assert (run / "checkpoints" / "step-000004" / "model.safetensors").is_file()
        rollouts[side] = [
            trajectory
            for epoch in (0, 1)
            for trajectory in read_trajectories(run / "rollouts" / f"epoch-{epoch:03d}.jsonl")
        ]
        assert len(rollouts[side]) == 2 * 8 * 8
        assert {trajectory.epoch for trajectory in rollouts[side]} == {0, 1}
        assert all(trajectory.version is not None for trajectory in rollouts[side])
    tokens = [[t.tokens.tolist() for t in rollouts[side] if t.tokens is not None] for side in SIDES]
    assert tokens[0] == tokens[1]


def test_treering_train_goes_on_with_either_side(report: DemoReport, folder: Path) -> None:
    config = load(RlConfig, folder / "treering.toml", ["rl.num_epochs=3"])
    with open_training(config, config_dir=folder, console=Console(quiet=True)) as run:
        assert (run.opened.step, run.num_steps) == (report.num_steps, 6)
        assert next(run.steps).step == 5


def test_a_folder_with_files_is_refused(folder: Path, report: DemoReport) -> None:
    with pytest.raises(InputError, match="needs a new or empty folder"):
        demo.run(out=folder, seed=0, json_output=True)


def test_without_a_folder_each_demo_takes_the_next_free_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    taken: list[Path] = []

    def measure(out: Path, *_arguments: object, **_options: object) -> None:
        taken.append(out)
        (out / "file").touch()

    monkeypatch.setattr(demo, "measure", measure)
    monkeypatch.setattr(demo.json, "dumps", lambda *_arguments, **_options: "")
    monkeypatch.setattr(demo, "asdict", lambda _report: {})
    for _ in range(3):
        demo.run(out=None, seed=0, json_output=True)
    assert [str(out) for out in taken] == ["runs/demo", "runs/demo-2", "runs/demo-3"]


def test_a_pretrained_model_trains_both_ways_on_sums_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tokenizer(
        tmp_path / "model", ["<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE
    )
    build("llama", vocab_size=400).save_pretrained(folder)
    monkeypatch.setattr(demo, "fetched", lambda *_: folder)
    # Random weights never solve a sum.
    monkeypatch.setattr(demo, "_REWARD", "def number_alone(prompt, text): return len(text) % 3")
    size = DemoSize(num_prompts=4, prompts_per_step=2, group_size=4, num_epochs=2, max_batch=4)
    (tmp_path / "out").mkdir()
    report = demo.measure_real(tmp_path / "out", size, seed=0, console=PlainConsole(quiet=True))
    assert (report.num_steps, report.warm_accuracy, report.first_difference) == (4, None, None)
    assert report.plain.num_sampled == report.treering.num_sampled > 0
    assert report.treering.unique_tokens < report.treering.flat_tokens == report.plain.unique_tokens
    config = load(RlConfig, tmp_path / "out" / "treering.toml", ["rl.num_epochs=3"])
    with open_training(config, config_dir=tmp_path / "out", console=Console(quiet=True)) as run:
        assert next(run.steps).step == 5


def test_the_right_number_alone_is_worth_most() -> None:
    names: dict[str, Any] = {}
    exec(demo._REWARD, names)
    prompt = SimpleNamespace(answer="12")
    texts = {"12": 1.0, " 12. ": 1.0, "11": 0.2, "7 + 5 = 12": 0.2, "It is 112": 0.0, "twelve": 0.0, "": 0.0}
    assert {text: names["number_alone"](prompt, text) for text in texts} == texts


@pytest.mark.learns
def test_reward_rises_clearly(tmp_path: Path) -> None:
    """About half right at first, then clearly more, on trained prompts and on others."""
    start, size, seed = started(demo.ENOUGH), DemoSize(num_epochs=4, group_size=8), 0
    unseen = demo_task(size.num_prompts).held_out(512)
    before = measure_accuracy(start.model, unseen)
    start.model.save_pretrained(tmp_path / demo.START_FOLDER)
    loop, rewards = train(tmp_path, size, seed)
    # Standard errors: 0.016 of an epoch's mean (1,024 rollouts), 0.02 of the accuracies.
    assert rewards[-1] > rewards[0] + 0.1
    assert measure_accuracy(loop.model, unseen) > before + 0.1


def train(folder: Path, size: DemoSize, seed: int) -> tuple[RlLoop, list[float]]:
    """Run only the Treering side; return its loop and the mean reward of every epoch."""
    config = load(RlConfig, write_config(folder, size, sums_sections(size), side="treering", seed=seed))
    rewards: list[list[float]] = [[] for _ in range(size.num_epochs)]
    with open_training(config, config_dir=folder, console=Console(quiet=True)) as run:
        for report in run.steps:
            rewards[report.epoch].append(report.rollouts.reward_mean)
        return run.loop, [sum(epoch) / len(epoch) for epoch in rewards]
