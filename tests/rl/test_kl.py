"""A KL to the policy that a run began with: in the loss or in the reward it is that of flat sequences."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.models import assert_gradients_equal, build, build_float64, flat_logprobs, take_gradients
from tests.rl.runs import TinyTask, scripted_loop, scripted_step
from tests.train.loop.test_adapters import adapted
from treering.config.optim import OptimOptions
from treering.engine.protocol import Sampling
from treering.errors import ConfigError
from treering.rl.loop import RlLoop
from treering.train.loop.other_models import adapters_off

EXACT = 1e-10
UNCLIPPED = OptimOptions(learning_rate=1e-2, max_grad_norm=0.0)
ALL_EQUAL = TinyTask(reward=lambda rollout: 0.0)


def reference() -> PreTrainedModel:
    return build_float64(seed=4)


def never() -> nn.Module:
    raise AssertionError("a reference was made")


def logprobs_of_step(model: nn.Module, loop: RlLoop, temperature: float) -> list[Tensor]:
    """Return log-probs of the tokens that the script writes for the first step, with the stock forward."""
    return [
        flat_logprobs(model, [*prompt, *response], temperature)[0][len(prompt) - 1 :]
        for prompt, response in scripted_step(loop)
    ]


@pytest.mark.parametrize("max_batch_tokens", ["auto", 6])
def test_in_the_loss_it_is_that_of_flat_sequences_and_trains_groups_of_equal_rewards(
    max_batch_tokens: int | str,
) -> None:
    student = build_float64()
    loop = scripted_loop(
        build_float64(),
        ALL_EQUAL,
        UNCLIPPED,
        reference=reference,
        kl=0.3,
        sampling=Sampling(max_tokens=12, temperature=0.7),
        max_batch_tokens=max_batch_tokens,
    )
    with torch.no_grad():
        wanted = logprobs_of_step(reference(), loop, 0.7)
    pairs = zip(logprobs_of_step(student, loop, 0.7), wanted, strict=True)
    differences = [own - ref for own, ref in pairs]
    terms = [(-d).exp() - 1 + d for d in differences]
    loss = 0.3 * torch.stack([term.mean() for term in terms]).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    update = loop.step().update
    assert update is not None
    assert update.loss == pytest.approx(loss.item(), rel=EXACT)
    assert update.values()["train/kl"] == pytest.approx(torch.cat(terms).mean().item(), rel=EXACT)
    assert_gradients_equal(take_gradients(loop.model), take_gradients(student), EXACT)


@pytest.mark.parametrize("task", [TinyTask(), ALL_EQUAL])
def test_in_the_reward_its_sum_over_a_rollout_is_taken_off(task: TinyTask) -> None:
    how = {"estimator": "dr_grpo", "objective": "dr_grpo", "normalizer": 10.0}
    loop = scripted_loop(build_float64(), task, reference=reference, kl=0.1, kl_in="reward", **how)
    report = loop.step()
    with torch.no_grad():
        wanted = [values.numpy() for values in logprobs_of_step(reference(), loop, 1.0)]
    # `Uneven` reports these as the policy's log-probs, whatever the model.
    tokens = [t.tokens[t.loss_mask] for t in loop.latest]
    k1 = [-2.0 - (own % 5) / 2 - ref for own, ref in zip(tokens, wanted, strict=True)]
    equal = task is ALL_EQUAL
    rewards = [0.0 if equal else float((own % 2 == 0).mean()) for own in tokens]
    penalised = np.array([reward - 0.1 * own.sum() for reward, own in zip(rewards, k1, strict=True)]).reshape(2, 4)
    expected = (penalised - penalised.mean(1, keepdims=True)).ravel()
    assert [t.advantage for t in loop.latest] == pytest.approx(expected.tolist(), rel=1e-9)
    # The reported reward stays the task's.
    assert [t.reward for t in loop.latest] == pytest.approx(rewards)
    assert report.values()["train/kl"] == pytest.approx(float(np.concatenate(k1).mean()), rel=1e-9)


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_the_reference_stays_where_the_run_began(kl_in: str) -> None:
    loop = scripted_loop(build_float64(), ALL_EQUAL, reference=build_float64, kl=0.5, kl_in=kl_in)
    first, second = (loop.step().values()["train/kl"] for _ in range(2))
    if kl_in == "loss":
        assert first == 0.0 < second
    else:
        assert first != second


def test_adapters_have_the_base_model_as_reference_and_no_copy_of_it() -> None:
    gradients = []
    for model, make in ((adapted(build_float64()).double(), never), (adapted(build_float64()).double(), build_float64)):
        loop = scripted_loop(model, ALL_EQUAL, UNCLIPPED, reference=make, kl=0.5)
        if make is not never:
            # Several ranks do this, because their shards have no adapters to switch off.
            loop._trainer._reference._make = make  # type: ignore[union-attr]
        trained = [weight.requires_grad for weight in model.parameters()]
        loop.step()
        assert [weight.requires_grad for weight in model.parameters()] == trained
        gradients.append(take_gradients(model))
    assert all(float(gradient.norm()) > 0 for gradient in gradients[0].values())
    assert_gradients_equal(*gradients, EXACT)
    ids = torch.tensor([[3, 4, 5]])
    model = adapted(build_float64()).double()
    with adapters_off(model):
        assert torch.equal(model(ids).logits, build_float64()(ids).logits)
    assert not torch.equal(model(ids).logits, build_float64()(ids).logits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kl": 0.1, "kl_in": "reward", "old_logprobs": "recomputed"}, "reads the engine's log-probs"),
        ({"kl": 0.1}, "needs `reference`"),
        ({"kl": -0.1}, "kl: expected greater than or equal to 0, got -0.1"),
        ({"kl_in": "rewards"}, "kl_in: expected 'loss' or 'reward'"),
    ],
)
def test_what_would_not_be_a_kl_to_a_reference_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scripted_loop(build(), **changes)
