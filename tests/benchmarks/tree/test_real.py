"""The bench sets' measurement: all ways compute one gradient, slow baselines drop out, and the report adds up."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import benchmarks.tree.bench
import pytest
import torch
from benchmarks.common.saved_bytes import peak_saved_bytes
from benchmarks.common.timing import Step
from benchmarks.tree import real as tree_real
from benchmarks.tree.cases import star
from benchmarks.tree.real import count, fastest_baselines, measure_set, measure_sets
from benchmarks.tree.sets import TaskSample, fold_tasks
from benchmarks.tree.steps import BASELINES, build_steps, gradient_after, padded_micro_batches, relative_error
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.tree.trajectories import tasks, tiny_model, write_folder
from treering.data import DATA_VARIABLE

SET_KEYS = {
    *("set", "counts", "baseline", "baseline_s", "tree_s", "speedup", "flop_bound_share", "overhead", "seconds"),
    *("grad_error", "baseline_grad_errors", "saved_bytes", "flat_saved_bytes", "tokens_at_peak", "flat_tokens_at_peak"),
}


def tiny_sample(*, num_branches: int = 3) -> TaskSample:
    folded = fold_tasks(tasks(num_tasks=3), 4096)
    cut = tuple(
        replace(task, sequences=task.sequences[:num_branches], loss_masks=task.loss_masks[:num_branches])
        for task in folded
    )
    return TaskSample(name="generated", tasks=cut, num_tasks_of_set=7)


@pytest.fixture
def generated_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Generated files in place of the real ones, and a tiny model in place of the eight layers."""
    monkeypatch.setenv(DATA_VARIABLE, str(write_folder(tmp_path)))
    monkeypatch.setattr(tree_real, "build_model", lambda shape: tiny_model())
    return tmp_path


@pytest.mark.parametrize("max_tokens", [None, 90])
def test_every_way_leaves_the_gradient_of_the_mean_over_trained_tokens(max_tokens: int | None) -> None:
    model, sample = tiny_model(), tiny_sample()
    losses = []
    masks = iter(sample.loss_masks())
    for group in sample.groups:
        for sequence in group:
            mask, ids = next(masks), torch.from_numpy(sequence).long()
            logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
            losses += [-logprobs[t - 1, ids[t]] for t in range(1, len(ids)) if mask[t]]
    assert len(losses) == sample.num_trained_tokens
    expected = gradient_after(model, torch.stack(losses).mean().backward)
    for name, step in build_steps(model, sample, max_tokens).items():
        # Twice: a step must clear what the last one left.
        step()
        assert relative_error(gradient_after(model, step), expected) < 1e-5, name


def test_a_branch_without_loss_adds_nothing() -> None:
    model, sample = tiny_model(), tiny_sample()
    task = sample.tasks[0]
    idle = replace(task, task_id="idle", loss_masks=tuple(mask & False for mask in task.loss_masks))
    longer = TaskSample(name="with idle ones", tasks=(*sample.tasks, idle), num_tasks_of_set=4)
    expected = gradient_after(model, build_steps(model, sample)["one_by_one"])
    for name, step in build_steps(model, longer, 90).items():
        assert relative_error(gradient_after(model, step), expected) < 1e-5, name


def test_baselines_compute_nothing_for_a_branch_without_loss() -> None:
    model, task = tiny_model(), tiny_sample().tasks[0]
    idle = replace(task, loss_masks=tuple(mask & False for mask in task.loss_masks))
    computed: list[int] = []
    model.get_decoder().register_forward_pre_hook(
        lambda decoder, args, kwargs: computed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    build_steps(model, TaskSample(name="half idle", tasks=(task, idle), num_tasks_of_set=2))["one_by_one"]()
    assert computed == [ids.size for ids in task.sequences]


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20), max_tokens=st.integers(1, 120))
def test_padded_batches_hold_every_sequence_once_within_the_budget(lengths: list[int], max_tokens: int) -> None:
    batches = padded_micro_batches(lengths, max_tokens)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = len(batch) * max(lengths[i] for i in batch)
        assert padded <= max_tokens or len(batch) == 1
    # Longest first, so that neighbours are of similar length.
    in_order = [lengths[i] for batch in batches for i in batch]
    assert in_order == sorted(lengths, reverse=True)


def test_a_result_adds_up() -> None:
    sample = tiny_sample()
    counts = count(sample)
    told: list[str] = []
    result = measure_set(tiny_model(), sample, counts, num_runs=3, max_tokens=200, on_way=told.append)
    assert set(result.seconds) == {"tree", *BASELINES}
    assert len(result.seconds["tree"]) == 3
    assert {len(times) for times in result.seconds.values()} <= {1, 3}
    medians = {name: median(times) for name, times in result.seconds.items()}
    assert len(result.seconds[result.baseline]) == 3
    assert result.baseline_s == medians[result.baseline]
    assert result.speedup == pytest.approx(result.baseline_s / medians["tree"])
    assert result.flop_bound_share == pytest.approx(result.speedup / counts.flop_bound)
    assert result.overhead is None
    assert 0 < result.grad_error < 1e-5
    assert set(result.baseline_grad_errors) == set(BASELINES)
    assert max(result.baseline_grad_errors.values()) < 1e-5
    assert result.tokens_at_peak <= counts.unique_tokens
    assert told[:4] == ["one_by_one", "padded_batch", "packed_chains", "tree"]


def test_saved_bytes_are_those_of_the_tree_step_and_of_packed_chains() -> None:
    model, sample = tiny_model(), tiny_sample()
    counts = count(sample)
    result = measure_set(model, sample, counts, num_runs=1, max_tokens=10_000)
    steps = build_steps(model, sample, 10_000)
    assert result.saved_bytes == peak_saved_bytes(steps["tree"], model.parameters())
    assert result.flat_saved_bytes == peak_saved_bytes(steps["packed_chains"], model.parameters())
    # Trained tokens, whose logits weigh most in so narrow a model, share less than the prompts before them.
    assert 1.2 < result.flat_saved_bytes / result.saved_bytes < counts.token_bound
    assert (result.tokens_at_peak, result.flat_tokens_at_peak) == (counts.unique_tokens, counts.flat_tokens)
    small = measure_set(model, sample, counts, num_runs=1, max_tokens=int(counts.unique_tokens / 2.5))
    assert small.saved_bytes < 0.6 * result.saved_bytes
    assert small.tokens_at_peak < 0.5 * result.tokens_at_peak


def test_without_sharing_the_overhead_is_paired() -> None:
    sample = tiny_sample(num_branches=1)
    result = measure_set(tiny_model(), sample, count(sample), num_runs=3)
    ratios = [a / b for a, b in zip(result.seconds["tree"], result.seconds[result.baseline], strict=True)]
    assert result.overhead == pytest.approx(median(ratios) - 1)
    assert result.saved_bytes == result.flat_saved_bytes


def test_only_baselines_near_the_fastest_are_run_again() -> None:
    first = {"one_by_one": [10.0], "padded_batch": [11.01], "packed_chains": [10.9], "tree": [1.0]}
    assert fastest_baselines(first) == ["one_by_one", "packed_chains"]


def test_a_baseline_that_dropped_out_is_never_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([10.0, 12.0, 10.5, 3.0])
    monkeypatch.setattr(tree_real, "wall_seconds", lambda step: (step(), next(seconds))[1])
    monkeypatch.setattr(
        tree_real,
        "interleaved_seconds",
        lambda steps, num_runs, clock: {name: [20.0 if name != "tree" else 4.0] * num_runs for name in steps},
    )
    sample = tiny_sample()
    result = measure_set(tiny_model(), sample, count(sample), num_runs=3)
    assert result.seconds["padded_batch"] == [12.0]
    assert (result.baseline_s, result.tree_s, result.speedup) == (20.0, 4.0, 5.0)


@pytest.mark.usefixtures("generated_data")
def test_every_way_has_run_before_the_first_clock_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, int]] = []

    def steps_of(model: object, sample: TaskSample, max_tokens: int) -> dict[str, Step]:
        num_branches = len(sample.loss_masks())
        return {name: lambda name=name: ran.append((name, num_branches)) for name in (*BASELINES, "tree")}

    monkeypatch.setattr(tree_real, "build_steps", steps_of)
    monkeypatch.setattr(tree_real, "measure_set", lambda model, sample, *counts, **options: list(ran))
    (before,) = measure_sets([tiny_sample()], 1, lambda words, share: None)
    assert before == [(name, 2) for name in (*BASELINES, "tree")]


@pytest.mark.usefixtures("generated_data")
def test_the_report_has_the_sets_that_were_asked_for() -> None:
    told: list[tuple[str, float | None]] = []
    report = benchmarks.tree.bench.measure(
        [star(prompt=9, response=4, group=3)],
        only=["math", "no_sharing"],
        num_runs=2,
        sample_tokens=150,
        on_progress=lambda words, done=None: told.append((words, done)),
    )
    report = json.loads(json.dumps(report, allow_nan=False))
    assert report["cases"] == report["notes"] == []
    assert [result["set"] for result in report["sets"]] == ["math", "no_sharing"]
    math, unshared = report["sets"]
    assert set(math) == set(unshared) == SET_KEYS
    assert math["counts"]["sharing"] > 0.3
    assert math["overhead"] is None
    assert (unshared["counts"]["sharing"], unshared["speedup"] > 0) == (0.0, True)
    assert unshared["overhead"] is not None
    facts = report["environment"]["sets"]
    assert (facts["threads"], facts["max_tokens"]) == (torch.get_num_threads(), 16_384)
    assert facts["sample_tokens"] == 150
    assert any(words.startswith("math") and done is not None for words, done in told)
