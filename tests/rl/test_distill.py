"""On-policy distillation: the loop trains the divergence on the student's own rollouts, whatever their rewards."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import assert_gradients_equal, build, build_float64, take_gradients
from tests.rl.runs import TinyTask, scripted_loop, scripted_step
from tests.train.objectives.flat_distill import Setting, divergence
from treering.config.model import DistillOptions
from treering.config.optim import OptimOptions
from treering.engine.protocol import Sampling
from treering.errors import ConfigError, InputError

EXACT = 1e-10
UNCLIPPED = OptimOptions(learning_rate=1e-2, max_grad_norm=0.0)
TEACHER = build_float64("llama", seed=4).eval()


def flat_loss(student: nn.Module, temperature: float) -> Tensor:
    """Return the mean reverse KL at all tokens that the script writes for the first step, with the stock forwards."""
    terms = []
    for prompt, response in scripted_step(scripted_loop(build())):
        ids, first = torch.tensor([[*prompt, *response]]), len(prompt) - 1
        q = (student(input_ids=ids).logits[0, first:-1] / temperature).softmax(-1)
        with torch.no_grad():
            p = (TEACHER(input_ids=ids).logits[0, first:-1] / temperature).softmax(-1)
        terms.append(divergence(p, q, Setting(kind="reverse_kl")))
    return torch.cat(terms).mean()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_step_is_that_of_flat_sequences_and_needs_no_reward(temperature: float) -> None:
    student = build_float64()
    loss = flat_loss(student, temperature)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = take_gradients(student)
    loop = scripted_loop(
        build_float64(),
        TinyTask(reward=lambda rollout: 0.0),
        UNCLIPPED,
        teacher=TEACHER,
        objective="distill",
        distill=DistillOptions(divergence="reverse_kl"),
        sampling=Sampling(max_tokens=12, temperature=temperature),
    )
    report = loop.step()
    assert report.update is not None
    assert report.rollouts.num_zero_variance == 2
    assert report.update.loss == pytest.approx(loss.item(), rel=EXACT)
    assert_gradients_equal(take_gradients(loop.model), expected, EXACT)


@pytest.mark.parametrize("objective", ["grpo", "gspo"])
def test_a_divergence_next_to_a_policy_loss_is_the_same_in_both_layouts(objective: str) -> None:
    gradients = []
    for layout in ("tree", "packed"):
        how = DistillOptions(divergence="jsd", top_k=5, weight=0.5)
        loop = scripted_loop(
            build_float64(), optim=UNCLIPPED, teacher=TEACHER, objective=objective, distill=how, layout=layout
        )
        report = loop.step()
        assert report.update is not None
        assert report.update.metrics["divergence"] > 0
        gradients.append(take_gradients(loop.model))
    assert_gradients_equal(*gradients, EXACT)


@pytest.mark.parametrize(
    ("changes", "teacher", "error", "message"),
    [
        ({"objective": "distill"}, None, ConfigError, "without a weight"),
        ({"distill": DistillOptions()}, TEACHER, ConfigError, 'without a weight; got "grpo"'),
        ({"distill": DistillOptions(weight=1.0)}, None, ConfigError, "give both, or neither"),
        ({}, TEACHER, ConfigError, "give both, or neither"),
        ({"distill": DistillOptions(weight=1.0)}, build(vocab_size=40), InputError, "share the student's tokenizer"),
    ],
)
def test_a_teacher_that_no_loss_reads_is_refused(
    changes: dict[str, Any], teacher: nn.Module | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        scripted_loop(build(), teacher=teacher, **changes)
