"""The bench sets' measurement: all ways compute one gradient, slow baselines drop out, and the report adds up."""

from dataclasses import replace

import pytest
import torch
from benchmarks.tree.sets import TaskSample, fold_tasks
from benchmarks.tree.steps import build_steps, gradient_after, padded_micro_batches, relative_error
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.tree.trajectories import tasks, tiny_model


def tiny_sample(*, num_branches: int = 3) -> TaskSample:
    folded = fold_tasks(tasks(num_tasks=3), 4096)
    cut = tuple(
        replace(task, sequences=task.sequences[:num_branches], loss_masks=task.loss_masks[:num_branches])
        for task in folded
    )
    return TaskSample(name="generated", tasks=cut, num_tasks_of_set=7)


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
        # Twice, because a step must clear the previous step's gradients.
        step()
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
