"""One optimizer update: the gradients of a batch, clipped, applied at the step's learning rate."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from treering import metrics
from treering.errors import StateError
from treering.model.layers import layers_of, set_layers
from treering.ranks.group import RankGroup
from treering.ranks.setup import RanksMode
from treering.ranks.state import shard_like
from treering.train.gradient.backward import backward
from treering.train.gradient.router_losses import RouterLosses
from treering.train.loop.auto_layers import auto_layers
from treering.train.loop.batches import StepBatch
from treering.train.loop.compute import ComputeOptions, peak_memory_bytes, precision, prepare_model
from treering.train.loop.optim import OptimOptions, clip_gradients, learning_rate_at, make_optimizer, set_learning_rate
from treering.train.loop.ranks import mean_over_ranks, sum_over_ranks
from treering.train.objectives import Objective
from treering.train.progress import OnProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The result of one update.

    Attributes:
        loss: the objective before the update, router losses added.
        grad_norm: global L2 norm before clipping.
        learning_rate: used by the update.
        num_trees: tasks, each one tree.
        num_branches: sequences.
        num_loss_tokens: trained tokens, counted per branch (as in the loss's denominator).
        num_branch_tokens: flat tokens.
        num_tokens: computed tokens; with layout "packed" all flat tokens.
        num_micro_batches: micro-batches and partitions.
        num_recomputed_tokens: tokens computed a second time because their activations did not fit into memory.
        num_unshared_trees: trees computed branch by branch because sharing would have been slower.
        peak_memory_bytes: peak memory that torch has allocated on the CUDA device so far; None on CPU.
        metrics: averages of the objective's and the routers' metrics.
        notes: what was decided in this update, a sentence each, for people.
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
    num_unshared_trees: int = 0
    peak_memory_bytes: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def sharing(self) -> float:
        """1 - computed / flat tokens; recomputed tokens count twice."""
        return 1.0 - (self.num_tokens + self.num_recomputed_tokens) / self.num_branch_tokens

    def values(self) -> dict[str, float]:
        """Values under the names of `treering.metrics`."""
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
            metrics.NUM_UNSHARED_TREES: self.num_unshared_trees,
        }


class Updater:
    """A model and its optimizer.

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
        group: RankGroup | None = None,
        ranks: RanksMode | None = None,
    ) -> None:
        """Sets training mode, gradient checkpointing and layers as the options say.

        Args:
            model: prepared, if several ranks train it.
            optim: of the optimizer.
            compute: of the gradients.
            group: the ranks that train the model; None for one.
            ranks: how they keep step, see `backward`.

        Raises:
            ConfigError: no parameter of the model is trainable.
            MissingExtraError, UnsupportedError: see `prepare_model`.
        """
        prepare_model(model, compute)
        self._model = model
        self._optim = optim
        self._compute = compute
        self._group = RankGroup() if group is None else group
        self._ranks = ranks
        self._optimizer = make_optimizer(model, optim)
        self._has_chosen_layers = compute.layers != "auto"

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
        """Updates the weights once, at the learning rate of `step`; the batch is this rank's share of the step's tasks.

        `on_progress` hears how far the gradients are, see `backward`.

        Raises:
            InputError, UnsupportedError: see `backward`.
            StateError: gradients that are not finite. None of these errors changes the weights.
        """
        rate = learning_rate_at(step, self._optim)
        self._optimizer.zero_grad(set_to_none=True)
        compute = self._compute
        notes = self._choose_layers(step, batch, router_losses)
        with precision(self._model, compute.autocast):
            result = backward(
                self._model,
                batch.forests,
                objective,
                compute.max_tokens,
                temperature=temperature,
                parents=compute.parents,
                costs=compute.costs,
                backend=compute.backend,
                ranks=self._ranks,
                router_losses=router_losses,
                on_progress=on_progress,
            )
        norm = clip_gradients(self._model.parameters(), self._optim.max_grad_norm)
        set_learning_rate(self._optimizer, rate)
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
                "num_unshared_trees": len(result.plan.unshared),
            },
            self._group,
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
            metrics=mean_over_ranks(result.averages, result.num_trained_tokens, self._group),
            notes=notes,
        )

    def _choose_layers(self, step: int, batch: StepBatch, router_losses: RouterLosses | None) -> tuple[str, ...]:
        """In the first update of a run, or after it was resumed, chooses how layers run if that is left to us."""
        if self._has_chosen_layers:
            return ()
        self._has_chosen_layers = True
        total = self._compute.num_steps
        choice = auto_layers(
            self._model,
            batch.forests,
            self._compute,
            num_steps=None if total is None else total - step + 1,
            device=next(self._model.parameters()).device,
            num_ranks=self._group.size,
            router_losses=router_losses,
        )
        if choice is None:
            return ()
        if choice.layers != layers_of(self._model):
            set_layers(self._model, choice.layers)
        return (f"layers: {choice.layers} ({choice.reason})",)

    def state(self) -> dict[str, Any]:
        """The optimizer's state: tensors and numbers."""
        return self._optimizer.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        """Resumes from a `state` of an updater over the same parameters.

        Raises:
            StateError: the state is of a model with other parameters.
        """
        try:
            self._optimizer.load_state_dict(self._sharded(state))
        except ValueError as error:
            raise StateError(
                f"an optimiser state belongs to one set of parameters, and this one does not fit ({error}); resume "
                "with the model of the checkpoint"
            ) from error

    def _sharded(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with whole tensors, as one rank saves them, sharded like their weights."""
        weights = [weight for group in self._optimizer.param_groups for weight in group["params"]]
        sharded = {
            number: {name: shard_like(value, weight) for name, value in state["state"][number].items()}
            for number, weight in enumerate(weights)
            if number in state["state"]
        }
        return {**state, "state": {**state["state"], **sharded}}
