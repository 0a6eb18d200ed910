"""Other models of a loop: its teacher, and the initial policy as the reference of a KL."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from treering.arrays import Float64Array
from treering.config.model import DistillOptions
from treering.config.steps import ComputeOptions, StepsOptions
from treering.errors import ConfigError
from treering.model.checks import check_whole
from treering.model.tree_model import TreeModel
from treering.train.branch_logprobs import branch_logprobs
from treering.train.loop.batches import StepBatch
from treering.train.loop.compute import precision, tokens_on_ranks
from treering.train.loop.lora_adapters import has_adapter
from treering.train.objective import Objective
from treering.train.objectives.distill import distill
from treering.train.objectives.sft import sft
from treering.train.step_teacher import bound_teacher


def distill_objective(options: DistillOptions, teacher: nn.Module, plain: Objective) -> Objective:
    """Return the loop's own loss plus the divergence, or only the divergence, with the same masks and weighting."""
    divergence = partial(distill, teacher, options.divergence, top_k=options.top_k)
    if options.weight is not None:
        return divergence(added_to=plain, weight=options.weight)
    weighting = plain.weighting
    return divergence(
        loss_masks=plain.loss_masks,
        normalizer=weighting.normalizer,
        shared=weighting.shared,
        divisor=weighting.divisor,
    )


def check_teacher(student: nn.Module, teacher: nn.Module | None, steps: StepsOptions) -> None:
    """Check the teacher of a loop before its first step.

    Raises:
        ConfigError: a teacher without options, options without a teacher, or options that contradict each other.
        InputError: a teacher with another vocabulary.
        UnsupportedError: a teacher whose scores would not be exact.
    """
    options = steps.distill
    if (teacher is None) != (options is None):
        raise ConfigError(
            "distillation needs a teacher and options.distill, and one of them is None; give both, or neither"
        )
    if teacher is not None and options is not None:
        distillation = distill_objective(options, teacher, sft()).distillation
        bound_teacher(distillation, student=TreeModel.of(student), forests=())


MakeReference = Callable[[], nn.Module]
"""Build a whole model with the initial weights of the run, also after a resume."""


def needs_copy(model: nn.Module, num_ranks: int) -> bool:
    """Return whether the reference is a separate model, not the trained one without its adapters on one rank.

    Example: False for LoRA on one rank, True for LoRA on two ranks and for full fine-tuning.
    """
    return num_ranks > 1 or not has_adapter(model)


class Reference:
    """Scorer of batches with the initial weights of a run.

    Example:
        >>> reference = Reference(model, None, ComputeOptions())          # LoRA: the model itself    # doctest: +SKIP
        >>> reference.logprobs(batch, 1.0)                                                            # doctest: +SKIP
        [array([ 0.  ,  0.  , -2.31])]
    """

    def __init__(self, policy: nn.Module, make: MakeReference | None, compute: ComputeOptions) -> None:
        """Use the reference that `make` builds at the first batch; None uses the policy without its adapters."""
        self._policy = policy
        self._make = make
        self._compute = compute
        self._frozen: nn.Module | None = None

    def logprobs(self, batch: StepBatch, temperature: float) -> list[Float64Array]:
        """Return the log-probs of each branch's trained tokens, float64 [T], 0 elsewhere; see `branch_logprobs`.

        The reference chooses its own experts, whatever routes the rollouts have.
        """
        with self._model() as model, precision(model, self._compute.autocast):
            return branch_logprobs(
                model,
                [forest.without_routes() for forest in batch.forests],
                batch.loss_masks,
                max_tokens=tokens_on_ranks(self._compute),
                temperature=temperature,
                backend=self._compute.backend,
            )

    @contextmanager
    def _model(self) -> Iterator[nn.Module]:
        if self._make is None:
            with adapters_off(self._policy):
                yield self._policy
            return
        if self._frozen is None:
            self._frozen = self._make().eval().requires_grad_(False)
            check_whole(TreeModel.of(self._frozen), "a reference")
        yield self._frozen


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Make the model compute as its base model inside the context.

    Example: `with adapters_off(model): forward(model, forest)`.
    """
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()
