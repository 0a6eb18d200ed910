"""Every loss of Tinker's protocol has the gradients of flat sequences, with adapters and with all weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models import VOCAB, assert_gradients_equal, build, build_float64, global_norm
from treering.errors import InputError, StateError, UnsupportedError
from treering.train.loop.trainee import SharedBase, TargetDatum, Trainee, TraineeOptions
from treering.train.target_losses import LOSSES, find_loss

PROMPT = [3, 5, 7, 2, 9]
SEQUENCES = [[*PROMPT, 1, 2, 3], [*PROMPT, 1, 6], [*PROMPT, 4], [8, 8, 8]]
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
LORA, ALL = TraineeOptions(rank=4, seed=0), TraineeOptions(rank=0)


def flat_loss(name: str, logp: Tensor, given: dict[str, Tensor], **config: float) -> Tensor:
    """Compute the loss by independently written definitions."""
    if name == "cross_entropy":
        return (-logp * given["weights"]).sum()
    old, adv = given["logprobs"], given["advantages"]
    if name == "importance_sampling":
        return (-torch.exp(logp - old) * adv).sum()
    if name == "dro":
        return (0.5 * config["beta"] * (logp - old).square() - logp * adv).sum()
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    if name == "cispo":
        return (-torch.exp(logp - old).clamp(low, high).detach() * logp * adv).sum()
    ratio = torch.exp(logp - old)
    if name == "gspo":
        inside = given["sequence_ratio_mask"].bool()
        whole = torch.exp((logp - old)[inside].mean()).detach()
        ratio = whole * torch.exp(logp - logp.detach())
    return -torch.stack([ratio * adv, ratio.clamp(low, high) * adv]).amin(0).sum()


def data_of(name: str, *, wide: int = 0) -> list[TargetDatum]:
    random = np.random.default_rng(1)
    found = []
    for sequence in SEQUENCES:
        tokens = np.array(sequence[:-1], np.int32)
        shape = (tokens.size, wide) if wide else (tokens.size,)
        targets = random.integers(0, VOCAB, shape) if wide else np.array(sequence[1:])
        loss, settings = find_loss(name, {})
        names = {"cross_entropy": ("weights",)}.get(name, ("logprobs", "advantages"))
        inputs = {each: torch.from_numpy(random.uniform(-0.2, 1.5, shape).astype(np.float32)) for each in names}
        if "logprobs" in inputs:
            inputs["logprobs"] = inputs["logprobs"] / 2 - 3.8
        if name == "gspo":
            inputs["sequence_ratio_mask"] = (torch.arange(tokens.size) > 0).float()
        found.append(TargetDatum(tokens=tokens, targets=targets, inputs=inputs, loss=loss, settings=settings))
    return found


def flat(trainee: Trainee, name: str, data: list[TargetDatum]) -> tuple[list[Tensor], list[Tensor]]:
    logprobs, losses = [], []
    for datum in data:
        logits = trainee.model(torch.from_numpy(datum.tokens).long()[None]).logits[0]
        targets = torch.from_numpy(datum.targets).reshape(datum.tokens.size, -1)
        own = logits.log_softmax(-1).gather(-1, targets).reshape(datum.targets.shape)
        given = {key: value.to(own.dtype) for key, value in datum.inputs.items()}
        logprobs.append(own.detach())
        losses.append(flat_loss(name, own, given, **datum.settings))
    return logprobs, losses


def gradients(trainee: Trainee) -> dict[str, Tensor]:
    found = {name: weight.grad.clone() for name, weight in trainee.weights.items() if weight.grad is not None}
    trainee.optimizer.zero_grad()
    return found


def trainee_of(options: TraineeOptions, *, wide: bool = True, **given: object) -> Trainee:
    trainee = Trainee(SharedBase(build_float64() if wide else build(), "tiny"), options, **given)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, weight in trainee.weights.items():
            if "lora_B" in name:
                weight.copy_(torch.linspace(-0.02, 0.03, weight.numel()).reshape(weight.shape))
    return trainee


@pytest.mark.parametrize("options", [LORA, ALL], ids=["lora", "all"])
@pytest.mark.parametrize(("name", "wide"), [*((name, 0) for name in LOSSES), ("cross_entropy", 3)])
@pytest.mark.parametrize(("is_float64", "tolerance"), [(True, 1e-10), (False, 1e-6)])
def test_gradients_and_log_probs_are_those_of_flat_sequences(
    name: str, wide: int, options: TraineeOptions, is_float64: bool, tolerance: float
) -> None:
    trainee, data = trainee_of(options, wide=is_float64), data_of(name, wide=wide)
    logprobs, losses = flat(trainee, name, data)
    torch.stack(losses).sum().backward()
    expected = gradients(trainee)
    # Send the data as one forest, and as two requests of one step.
    for parts in ([data], [data[:2], data[2:]]):
        scores = [trainee.add_gradients(part) for part in parts]
        own = gradients(trainee)
        if is_float64:
            assert_gradients_equal(own, expected, tolerance)
        # Gradients of single weights cancel, so in float32 the whole gradient is compared.
        difference = {name: own[name] - expected[name] for name in expected}
        assert global_norm(difference) <= tolerance * global_norm(expected)
        found = [each for score in scores for each in score.logprobs]
        for one, other in zip(found, logprobs, strict=True):
            np.testing.assert_allclose(one, other, atol=10 * tolerance)
        np.testing.assert_allclose(
            [loss for score in scores for loss in score.losses], torch.stack(losses).detach(), atol=100 * tolerance
        )


def test_off_computes_every_datum_separately_with_the_same_gradients() -> None:
    data, found = data_of("ppo"), []
    for shares in (True, False):
        trainee = trainee_of(LORA, shares=shares)
        scores = trainee.add_gradients(data)
        found.append((scores.num_flat_tokens, scores.num_computed_tokens, gradients(trainee)))
    assert found[0][:2] == (sum(len(each) - 1 for each in SEQUENCES), 5 + 2 + 2)
    assert found[1][0] == found[1][1] == found[0][0]
    assert_gradients_equal(found[1][2], found[0][2], 1e-10)


def test_an_error_adds_no_gradient_and_keeps_earlier_ones() -> None:
    trainee, data = trainee_of(LORA), data_of("importance_sampling")
    trainee.add_gradients(data)
    before = {name: weight.grad.clone() for name, weight in trainee.weights.items()}
    data[3].inputs["advantages"][0] = float("inf")
    with pytest.raises(StateError, match="loss of sequence"):
        trainee.add_gradients(data)
    for name, weight in trainee.weights.items():
        torch.testing.assert_close(weight.grad, before[name], rtol=0, atol=0)


def test_an_update_is_adamws_and_a_non_finite_one_changes_nothing() -> None:
    trainee, data = trainee_of(ALL), data_of("cross_entropy")
    own = {name: weight.detach().clone().requires_grad_() for name, weight in trainee.weights.items()}
    params = {**ADAM, "weight_decay": 0.1, "grad_clip_norm": 0.5}
    optimizer = torch.optim.AdamW(own.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    for _ in range(2):
        trainee.add_gradients(data)
        for name, weight in trainee.weights.items():
            own[name].grad = weight.grad.clone()
        torch.nn.utils.clip_grad_norm_(own.values(), 0.5)
        optimizer.step()
        trainee.step(params)
    for name, weight in trainee.weights.items():
        torch.testing.assert_close(weight, own[name], rtol=0, atol=0)
    next(iter(trainee.weights.values())).grad = torch.full_like(next(iter(trainee.weights.values())), float("nan"))
    with pytest.raises(StateError, match="norm is nan"):
        trainee.step(ADAM)
    for name, weight in trainee.weights.items():
        torch.testing.assert_close(weight, own[name], rtol=0, atol=0)
        assert weight.grad is None


def test_trainees_share_the_base_weights_and_change_only_their_own() -> None:
    base = SharedBase(build_float64(), "tiny")
    first, second = Trainee(base, LORA), Trainee(base, TraineeOptions(rank=2, train_attn=False, train_unembed=False))
    assert not any("self_attn" in name or "lm_head" in name for name in second.weights)
    assert any("lm_head" in name for name in first.weights)
    frozen = {weight.data_ptr() for weight in base.model.parameters()}
    for trainee in (first, second):
        theirs = {weight.data_ptr() for weight in trainee.model.parameters() if not weight.requires_grad}
        assert theirs == frozen
    before, checksum = second.snapshot(), base.checksum
    first.add_gradients(data_of("cross_entropy"))
    first.step(ADAM)
    assert SharedBase(base.model, "tiny").checksum == checksum
    for name, weight in second.weights.items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("options", [LORA, ALL], ids=["lora", "all"])
def test_a_checkpoint_with_its_optimizer_resumes_bitwise(options: TraineeOptions, tmp_path: Path) -> None:
    data = data_of("cross_entropy")

    def steps(trainee: Trainee, count: int) -> None:
        for _ in range(count):
            trainee.add_gradients(data)
            trainee.step(ADAM)

    trainee = trainee_of(options)
    steps(trainee, 2)
    trainee.save(tmp_path, with_optimizer=True)
    steps(trainee, 2)
    resumed = trainee_of(options)
    resumed.load(tmp_path, with_optimizer=True)
    steps(resumed, 2)
    for name, weight in trainee.weights.items():
        torch.testing.assert_close(resumed.weights[name], weight, rtol=0, atol=0)
    (tmp_path / "optimizer.pt").write_bytes(b"x")
    with pytest.raises(StateError, match="cannot be read"):
        resumed.load(tmp_path, with_optimizer=True)


def test_what_is_not_computed_is_refused_with_what_to_write() -> None:
    with pytest.raises(UnsupportedError, match="loss_fn=importance_sampling"):
        find_loss("stable_reinforce", {})
    with pytest.raises(UnsupportedError, match="forward_backward_custom"):
        find_loss("custom", {})
    with pytest.raises(InputError, match="got beta"):
        find_loss("ppo", {"beta": 0.1})
    with pytest.raises(InputError, match="one kind of layers"):
        SharedBase(build(), "tiny").copy(TraineeOptions(rank=2, train_attn=False, train_mlp=False, train_unembed=False))
