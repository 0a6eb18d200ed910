"""One optimizer update: clip the gradients of a batch, and apply AdamW at the step's learning rate."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from treering import metrics
from treering.config.optim import OptimOptions
from treering.config.steps import ComputeOptions, RouterLosses
from treering.errors import ConfigError, StateError
from treering.ranks.group import RankGroup
from treering.ranks.sharded_state import shard_like
from treering.train.loop.batches import StepBatch
from treering.train.loop.compute import mean_over_ranks, peak_memory_bytes, precision, prepare_model, sum_over_ranks
from treering.train.objective import Objective
from treering.train.progress import OnProgress
from treering.train.step import backward

_FUSED_DEVICES = ("cpu", "cuda")


def learning_rate_at(step: int, options: OptimOptions) -> float:
    """Return the learning rate of an optimizer step; steps count from 1.

    Example: learning_rate 1.0, warmup_steps 4, cosine to 0 at num_steps 8 gives 0.25, 0.5, 0.75, 1.0, 0.854, 0.5,
    0.146, 0.0; linear gives 0.75, 0.5, 0.25, 0.0 in the last four.
    """
    if step < options.warmup_steps:
        return options.learning_rate * step / options.warmup_steps
    if options.schedule == "constant":
        return options.learning_rate
    assert options.num_steps is not None, "make_optimizer checks it"
    done = min((step - options.warmup_steps) / (options.num_steps - options.warmup_steps), 1.0)
    weight = 1 - done if options.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return options.min_learning_rate + weight * (options.learning_rate - options.min_learning_rate)


def make_optimizer(model: nn.Module, options: OptimOptions) -> torch.optim.AdamW:
    """Build AdamW over a model's trainable parameters: matrices with weight decay, vectors and scalars without.

    Raises:
        ConfigError: no parameter is trainable, or a falling learning rate without the number of steps.

    Example: a linear layer with weight [3, 2] and bias [3] gets two groups, with decay `weight_decay` and 0.
    """
    if options.schedule != "constant" and options.num_steps is None:
        raise ConfigError(
            f"a {options.schedule} learning-rate schedule ends with the run, got num_steps=None; set num_steps"
        )
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    if not trainable:
        raise ConfigError(f"{type(model).__name__} has no parameter with requires_grad=True to train; unfreeze some")
    groups = [
        {"params": [weight for weight in trainable if weight.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [weight for weight in trainable if weight.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.learning_rate,
        betas=options.betas,
        eps=options.eps,
        # One pass over the weights: on CPU a fifth of the time of separate operations.
        fused=all(weight.device.type in _FUSED_DEVICES for weight in trainable),
    )


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale all gradients so that their global L2 norm is at most `max_norm`; return the norm before.

    Args:
        parameters: parameters; those without a gradient are skipped.
        max_norm: upper bound; 0 never clips.

    Raises:
        StateError: a gradient is NaN or infinite; the parameters are unchanged.

    Example: gradients [3.0] and [4.0] with max_norm 1 become [0.6] and [0.8]; the result is 5.0.
    """
    gradients = [weight.grad for weight in parameters if weight.grad is not None]
    norm = _global_norm(gradients)
    if not math.isfinite(norm):
        raise StateError(
            f"a step needs finite gradients, and their norm is {norm}; start a run in another folder (run.dir=...) "
            "with a lower learning_rate, a longer warm-up or without bad data, since a resumed run keeps its settings"
        )
    if 0 < max_norm < norm:
        for alike in _alike(gradients):
            torch._foreach_mul_(alike, max_norm / norm)
    return norm


def _global_norm(gradients: list[Tensor]) -> float:
    if not gradients:
        return 0.0
    totals = []
    for alike in _alike(gradients):
        # Sums of squares of bfloat16 gradients need float32.
        norms = torch._foreach_norm(alike, 2, dtype=torch.promote_types(alike[0].dtype, torch.float32))
        totals.append(torch.linalg.vector_norm(torch.stack(norms).double()))
    return math.hypot(*map(float, totals))


def _alike(gradients: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Group gradients that one kernel can take together: same class (whole or sharded), device and dtype."""
    groups: dict[object, list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((type(gradient), gradient.device, gradient.dtype), []).append(gradient)
    return groups.values()


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Result of one update.

    Attributes:
        loss: the objective before the update, plus router losses.
        grad_norm: global L2 norm before clipping.
        learning_rate: learning rate of the update.
        num_trees: number of tasks, each one tree.
        num_branches: number of sequences.
        num_loss_tokens: trained tokens, counted per branch (as in the loss's denominator).
        num_branch_tokens: flat tokens.
        num_tokens: computed tokens; all flat tokens with layout "packed".
        num_micro_batches: micro-batches and partitions.
        num_recomputed_tokens: tokens computed a second time because their activations did not fit into memory.
        peak_memory_bytes: peak memory that torch has allocated on the CUDA device so far; None on CPU.
        metrics: averages of the objective's and the routers' metrics.
        notes: decisions taken in this update, one sentence each, for the user.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    num_trees: int
    num_branches: int
    num_loss_tokens: float
    num_branch_tokens: int
    num_tokens: int
    num_micro_batches: int
    num_recomputed_tokens: int = 0
    peak_memory_bytes: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def sharing(self) -> float:
        """1 - computed / flat tokens; recomputed tokens count twice."""
        return 1.0 - (self.num_tokens + self.num_recomputed_tokens) / self.num_branch_tokens

    def values(self) -> dict[str, float]:
        """Return the values under the names of `treering.metrics`."""
        own: dict[str, float] = {f"train/{name}": value for name, value in self.metrics.items()}
        if self.peak_memory_bytes is not None:
            own[metrics.PEAK_MEMORY_BYTES] = self.peak_memory_bytes
        return own | {
            metrics.LOSS: self.loss,
            metrics.GRAD_NORM: self.grad_norm,
            metrics.LEARNING_RATE: self.learning_rate,
            metrics.NUM_BRANCHES: self.num_branches,
            metrics.NUM_LOSS_TOKENS: self.num_loss_tokens,
            metrics.NUM_BRANCH_TOKENS: self.num_branch_tokens,
            metrics.NUM_TOKENS: self.num_tokens,
            metrics.SHARING: self.sharing,
            metrics.NUM_RECOMPUTED_TOKENS: self.num_recomputed_tokens,
        }


def combined(updates: Sequence[Update]) -> Update:
    """Combine the updates of a step: counts add up, the rest are means; metrics are weighted by trained tokens.

    Example: updates with the losses 0.1 and 0.3 on 40 flat tokens each have the loss 0.2 on 80.
    """
    if len(updates) == 1:
        return updates[0]
    counts = [field.name for field in fields(Update) if field.name.startswith("num_")]
    weights = [update.num_loss_tokens for update in updates]
    return replace(
        updates[-1],
        **{name: sum(getattr(update, name) for update in updates) for name in counts},
        loss=fmean(update.loss for update in updates),
        grad_norm=fmean(update.grad_norm for update in updates),
        metrics={name: fmean([each.metrics[name] for each in updates], weights) for name in updates[0].metrics},
        notes=tuple(note for update in updates for note in update.notes),
    )


class Updater:
    """A model with its optimizer, which `update` takes through one optimizer step at a time.

    Example:
        >>> updater = Updater(model, OptimOptions(learning_rate=1e-4), ComputeOptions())     # doctest: +SKIP
        >>> updater.update(1, make_batch(tasks, "tree"), sft()).loss                         # doctest: +SKIP
        6.24
    """

    def __init__(
        self,
        model: nn.Module,
        optim: OptimOptions,
        compute: ComputeOptions,
        *,
        rank_group: RankGroup | None = None,
    ) -> None:
        """Set training mode, gradient checkpointing and layers as the options say.

        Args:
            model: a prepared model, if several ranks train it.
            optim: options of the optimizer.
            compute: options of the gradient computation.
            rank_group: ranks that train the model; None for one.

        Raises:
            ConfigError: no parameter of the model is trainable.
            MissingExtraError, UnsupportedError: see `prepare_model`.
        """
        rank_group = RankGroup() if rank_group is None else rank_group
        self._notes = prepare_model(model, compute, num_steps=optim.num_steps, num_ranks=rank_group.size)
        self._model = model
        self._optim = optim
        self._compute = compute
        self._rank_group = rank_group
        self._optimizer = make_optimizer(model, optim)

    def update(
        self,
        step: int,
        batch: StepBatch,
        objective: Objective,
        *,
        temperature: float = 1.0,
        router_losses: RouterLosses | None = None,
        on_progress: OnProgress | None = None,
    ) -> Update:
        """Update the weights once, at the learning rate of `step`; the batch is this rank's share of the step's tasks.

        `on_progress` is called as gradients are computed; see `backward`.

        Raises:
            InputError, UnsupportedError: see `backward`.
            StateError: gradients that are not finite. None of these errors changes the weights.
        """
        rate = learning_rate_at(step, self._optim)
        self._optimizer.zero_grad(set_to_none=True)
        compute = self._compute
        notes, self._notes = self._notes, ()
        with precision(self._model, compute.autocast):
            result = backward(
                self._model,
                batch.forests,
                objective,
                compute.max_batch_tokens,
                temperature=temperature,
                backend=compute.backend,
                ranks=compute.ranks,
                router_losses=router_losses,
                on_progress=on_progress,
            )
        norm = clip_gradients(self._model.parameters(), self._optim.max_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        sums = sum_over_ranks(
            {
                "loss": result.loss,
                "num_branches": result.plan.num_branches,
                "num_loss_tokens": result.num_trained_tokens,
                "num_branch_tokens": result.plan.num_branch_tokens,
                "num_tokens": result.plan.num_tokens,
                "num_micro_batches": result.plan.num_micro_batches,
                "num_recomputed_tokens": result.num_recomputed_tokens,
            },
            self._rank_group,
        )
        counts = {name: int(value) for name, value in sums.items() if name not in ("loss", "num_loss_tokens")}
        return Update(
            loss=sums["loss"],
            grad_norm=norm,
            learning_rate=rate,
            num_trees=batch.num_tasks,
            num_loss_tokens=sums["num_loss_tokens"],
            **counts,
            peak_memory_bytes=peak_memory_bytes(self._model),
            metrics=mean_over_ranks(result.averages, result.num_trained_tokens, self._rank_group),
            notes=notes,
        )

    def state(self) -> dict[str, Any]:
        """Return the optimizer's state: tensors and numbers."""
        return self._optimizer.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume from the `state` of an updater over the same parameters.

        Raises:
            StateError: the state belongs to a model with other parameters.
        """
        try:
            self._optimizer.load_state_dict(self._sharded(state))
        except ValueError as error:
            raise StateError(
                f"an optimiser state belongs to one set of parameters, and this one does not fit ({error}); resume "
                "with the model of the checkpoint"
            ) from error

    def _sharded(self, state: dict[str, Any]) -> dict[str, Any]:
        """Shard a state with whole tensors, as one rank saves them, like the weights."""
        weights = [weight for group in self._optimizer.param_groups for weight in group["params"]]
        sharded = {
            number: {name: shard_like(value, weight) for name, value in state["state"][number].items()}
            for number, weight in enumerate(weights)
            if number in state["state"]
        }
        return {**state, "state": {**state["state"], **sharded}}
