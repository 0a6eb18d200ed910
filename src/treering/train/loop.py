"""The training loop: one optimizer step at a time, over tasks as trees or, with the off-switch, as packed sequences.

Owns model, optimiser and step number. Knows nothing of files, displays or how long a run should be.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from treering.errors import ConfigError, InputError, StateError, UnsupportedError
from treering.train.batches import Layout, StepPlan, Task, check_fits, make_batch
from treering.train.objectives import sft
from treering.train.optim import OptimOptions, clip_gradients, learning_rate_at, make_optimizer, set_learning_rate
from treering.train.step import BackwardResult, backward
from treering.train.step_report import StepReport
from treering.train.weights import Normalizer, Shared, Weighting

GradientCheckpointing = Literal["none", "reentrant", "non_reentrant"]
Autocast = Literal["none", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """What a step trains and how it computes.

    Attributes:
        trees_per_step: tasks per optimizer step.
        max_tokens: distinct tokens per micro-batch; None runs a step at one time. Changes rounding only.
        layout: "tree", or "packed" to train every sequence by itself (the off-switch).
        normalizer: of the loss, see `treering.train.weights.Weighting`.
        shared: the convention for shared tokens, see there.
        divisor: of the constant normaliser.
        autocast: "bfloat16" computes in bfloat16 where torch's autocast allows, over the weights' own dtype.
        gradient_checkpointing: recompute activations in the backward, by which of torch's two ways.
        backend: of the attention.
        seed: of the order of the tasks.
    """

    trees_per_step: int
    max_tokens: int | None = None
    layout: Layout = "tree"
    normalizer: Normalizer = "token_mean"
    shared: Shared = "sum"
    divisor: float | None = None
    autocast: Autocast = "none"
    gradient_checkpointing: GradientCheckpointing = "none"
    backend: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        Weighting(normalizer=self.normalizer, shared=self.shared, divisor=self.divisor)
        if self.layout == "packed" and (self.shared == "once" or self.normalizer == "tree_mean"):
            raise ConfigError(
                f'layout "packed" has no trees to share or to average over, got shared={self.shared!r} and '
                f'normalizer={self.normalizer!r}; use shared="sum" and another normalizer, or layout="tree"'
            )


class SftLoop:
    """Supervised fine-tuning of a model on tasks.

    Example:
        >>> options = LoopOptions(trees_per_step=8, max_tokens=16384)
        >>> loop = SftLoop(model, tasks, optim=OptimOptions(learning_rate=1e-4), options=options)  # doctest: +SKIP
        >>> [loop.step().loss for _ in range(3)]                                                   # doctest: +SKIP
        [6.24, 6.11, 5.97]
    """

    def __init__(self, model: nn.Module, tasks: Sequence[Task], *, optim: OptimOptions, options: LoopOptions) -> None:
        """Puts the model in training mode, with gradient checkpointing as the options say.

        Raises:
            InputError: no task, nothing to train, or a tree larger than `max_tokens`.
        """
        self.model = model
        self.plan = StepPlan(num_tasks=len(tasks), trees_per_step=options.trees_per_step, seed=options.seed)
        self._tasks = tuple(tasks)
        self._optim = optim
        self._options = options
        self._num_steps_done = 0
        if not any(task.num_trained_tokens for task in tasks):
            raise InputError(f"no token of the {len(tasks)} tasks is trained: every loss mask is 0; check the masks")
        check_fits(tasks, layout=options.layout, max_tokens=options.max_tokens)
        model.train()
        enable_gradient_checkpointing(model, options.gradient_checkpointing)
        self._optimizer = make_optimizer(model, optim)

    @property
    def num_steps_done(self) -> int:
        """Optimizer steps since the start of the run, resumed ones included."""
        return self._num_steps_done

    def step(self) -> StepReport:
        """Trains the next step's tasks and updates the model.

        Raises:
            StateError: gradients that are not finite; the weights are still those of the last step.
        """
        started = time.perf_counter()
        step = self._num_steps_done + 1
        rate = learning_rate_at(step, self._optim)
        self._optimizer.zero_grad(set_to_none=True)
        result = self._backward(step)
        norm = clip_gradients(self.model.parameters(), self._optim.max_grad_norm)
        set_learning_rate(self._optimizer, rate)
        self._optimizer.step()
        self._num_steps_done = step
        return StepReport(
            step=step,
            epoch=self.plan.epoch_of(step),
            loss=result.loss,
            grad_norm=norm,
            learning_rate=rate,
            num_trees=self.plan.tasks_of(step).size,
            num_branches=result.plan.num_branches,
            num_loss_tokens=result.num_trained_tokens,
            num_branch_tokens=result.plan.num_branch_tokens,
            num_tokens=result.plan.num_tokens,
            num_micro_batches=len(result.plan.micro_batches),
            seconds=time.perf_counter() - started,
            peak_memory_bytes=_peak_memory_bytes(self.model),
            metrics=result.averages,
        )

    def state(self) -> dict[str, Any]:
        """What a resumed run needs beside the weights: step number and optimiser state, all tensors and numbers."""
        return {"num_steps_done": self._num_steps_done, "optimizer": self._optimizer.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state` of a loop over the same parameters.

        Raises:
            StateError: the state is of a model with other parameters.
        """
        try:
            self._optimizer.load_state_dict(state["optimizer"])
        except ValueError as error:
            raise StateError(
                f"an optimiser state belongs to one set of parameters, and this one does not fit ({error}); resume "
                "with the model of the checkpoint"
            ) from error
        self._num_steps_done = state["num_steps_done"]

    def _backward(self, step: int) -> BackwardResult:
        options = self._options
        batch = make_batch([self._tasks[i] for i in self.plan.tasks_of(step)], options.layout)
        objective = sft(batch.loss_masks, options.normalizer, options.shared, divisor=options.divisor)
        with self._precision():
            return backward(self.model, batch.forests, objective, options.max_tokens, backend=options.backend)

    def _precision(self) -> AbstractContextManager[object]:
        if self._options.autocast == "none":
            return nullcontext()
        device = next(self.model.parameters()).device.type
        return torch.autocast(device, dtype=torch.bfloat16)


def enable_gradient_checkpointing(model: nn.Module, mode: GradientCheckpointing) -> None:
    """Turns activation recomputation on, by either name that transformers has for it; "none" leaves the model alone.

    Raises:
        UnsupportedError: the model has no such switch.
    """
    if mode == "none":
        return
    arguments = {"use_reentrant": mode == "reentrant"}
    # transformers 5.23 deprecates the older name, and 5.17 knows no other.
    enable: Any = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:
        enable(activation_checkpointing_kwargs=arguments)
        return
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no gradient checkpointing to enable; set gradient_checkpointing to none"
        )
    enable(gradient_checkpointing_kwargs=arguments)


def _peak_memory_bytes(model: nn.Module) -> int | None:
    device = next(model.parameters()).device
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
