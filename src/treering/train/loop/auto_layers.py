"""`layers = "auto"`: measures on CUDA how a model's layers run fastest, and says what it chose and why.

Compiling takes seconds once and saves some in every step, so the length of the run decides with.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from treering.extras import is_installed
from treering.model.layers import Layers, layers_of, set_layers
from treering.train.gradient.auto_tokens import DEFAULT_TOKENS
from treering.train.gradient.backward import backward
from treering.train.gradient.router_losses import RouterLosses
from treering.train.loop.compute import ComputeOptions, precision
from treering.train.objectives import sft
from treering.tree.forest import Forest

WORTH_MEASURING_S = 120.0
"""Seconds of steps left below which compiling could not pay: it takes 30 to 40, and saves a third of a step at most."""

_NUM_RUNS = 3
_SAME_LOSS = 0.01
"""Largest relative difference of a loss from that of stock layers; in bfloat16 the kernels differ by 0.001."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one way to run the layers took.

    Attributes:
        layers: the way.
        start_s: seconds that the first step takes beyond a later one, most of them to compile.
        step_s: seconds of a step.
        failure: why this way is not taken here; empty if it can be.
    """

    layers: Layers
    start_s: float = 0.0
    step_s: float = 0.0
    failure: str = ""

    def total_s(self, num_steps: int) -> float:
        """Seconds of so many steps from their start."""
        return self.start_s + num_steps * self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersChoice:
    """How the layers of a run are to run, and why in words."""

    layers: Layers
    reason: str


def choose_layers(trials: Sequence[Trial], num_steps: int) -> LayersChoice:
    """The way with which `num_steps` more steps end first; of equal ones, the earlier.

    Stock layers come first; they have no failure.

    Example: stock layers with 0.6 s a step and compiled ones with 0.4 s and 35 s to start are chosen by whether more
    than 175 steps are left.
    """
    best = min((trial for trial in trials if not trial.failure), key=lambda trial: trial.total_s(num_steps))
    words = ", ".join(_in_words(trial, num_steps) for trial in trials)
    return LayersChoice(layers=best.layers, reason=f"auto: {num_steps} steps take {words}")


def _in_words(trial: Trial, num_steps: int) -> str:
    if trial.failure:
        return f"{trial.layers} fails ({trial.failure})"
    start = f", {trial.start_s:.0f} s of them to start" if trial.start_s >= 1 else ""
    return f"{trial.layers} {trial.total_s(num_steps):.0f} s ({trial.step_s:.2g} s each{start})"


def auto_layers(
    model: nn.Module,
    forests: Sequence[Forest],
    compute: ComputeOptions,
    *,
    num_steps: int | None,
    device: torch.device,
    num_ranks: int = 1,
    router_losses: RouterLosses | None = None,
) -> LayersChoice | None:
    """The choice for a run; None on a CPU, where layers are stock and nothing needs to be said.

    Args:
        model: with its training settings.
        forests: of the first step.
        compute: how that step is computed.
        num_steps: steps that are left; None if nobody knows.
        device: of the model.
        num_ranks: that train the model.
        router_losses: of the step.
    """
    if device.type != "cuda":
        return None
    own = layers_of(model)
    reasons_not_to = {
        "in torch's deterministic mode no clock decides": torch.are_deterministic_algorithms_enabled(),
        f"several ranks do not measure, and {num_ranks} train": num_ranks > 1,
        "the number of steps is not known": num_steps is None,
        "as the model came": own != "stock",
    }
    for reason, holds in reasons_not_to.items():
        if holds:
            return LayersChoice(layers=own, reason=f"auto: {reason}")
    assert num_steps is not None
    return measured_layers(model, forests, compute, num_steps, router_losses)


def measured_layers(
    model: nn.Module,
    forests: Sequence[Forest],
    compute: ComputeOptions,
    num_steps: int,
    router_losses: RouterLosses | None = None,
) -> LayersChoice:
    """Times the first micro-batch of a step with every way that can run here, and chooses.

    Weights, gradients, random states and layers are as before afterwards. The loss of each way is compared with that of
    stock layers.
    """
    device = next(model.parameters()).device
    first = _first_micro_batch(forests, compute.max_tokens_on_ranks)
    share = sum(forest.num_tokens for forest in forests) / max(sum(forest.num_tokens for forest in first), 1)

    def run() -> float:
        model.zero_grad(set_to_none=True)
        with precision(model, compute.autocast):
            result = backward(
                model,
                first,
                sft(normalizer="sum"),
                compute.max_tokens,
                parents=compute.parents,
                costs=compute.costs,
                backend=compute.backend,
                router_losses=router_losses,
            )
        return result.loss

    with _unchanged(model, device):
        loss = run()
        stock = Trial(layers="stock", step_s=share * statistics.median(_seconds(run, device)))
        if stock.total_s(num_steps) < WORTH_MEASURING_S:
            reason = f"auto: {num_steps} steps take {stock.total_s(num_steps):.0f} s, too few to compile for"
            return LayersChoice(layers="stock", reason=reason)
        ways: tuple[Layers, ...] = ("liger", "compiled") if is_installed("liger_kernel") else ("compiled",)
        others = [_trial(model, layers, run, device, loss, share) for layers in ways]
    return choose_layers([stock, *others], num_steps)


def _trial(
    model: nn.Module, layers: Layers, run: Callable[[], float], device: torch.device, loss: float, share: float
) -> Trial:
    """Compilers of kernels raise what they like; whatever it is, this way cannot run here."""
    try:
        undo = set_layers(model, layers)
        try:
            started = time.perf_counter()
            own_loss = run()
            start_s = time.perf_counter() - started
            step_s = statistics.median(_seconds(run, device))
        finally:
            undo()
    except Exception as error:
        return Trial(layers=layers, failure=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
    if not abs(own_loss - loss) <= _SAME_LOSS * abs(loss):
        return Trial(layers=layers, failure=f"its loss is {own_loss:.6g}, and stock layers give {loss:.6g}")
    return Trial(layers=layers, start_s=max(start_s - step_s, 0.0), step_s=share * step_s)


def _seconds(run: Callable[[], float], device: torch.device) -> list[float]:
    """The seconds of a few runs, each until the device has ended."""
    taken = []
    for _ in range(_NUM_RUNS):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - started)
    return taken


def _first_micro_batch(forests: Sequence[Forest], max_tokens: int | None) -> list[Forest]:
    """The first forests of a step that are computed at one time; the first one alone if it is larger than that.

    Example: of forests with 5, 4 and 3 tokens, a limit of 10 takes the first two.
    """
    ends = itertools.accumulate(forest.num_tokens for forest in forests)
    limit = DEFAULT_TOKENS if max_tokens is None else max_tokens
    return list(forests[: max(1, sum(end <= limit for end in ends))])


@contextmanager
def _unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Gives gradients and random states back as they were."""
    kept = [weight.grad for weight in model.parameters()]
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for weight, grad in zip(model.parameters(), kept, strict=True):
            weight.grad = grad
