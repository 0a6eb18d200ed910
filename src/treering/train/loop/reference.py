"""The policy that a loop began with, which a KL penalty compares with: a frozen model, or adapters switched off."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from treering.arrays import Float64Array
from treering.model.checks import check_whole
from treering.model.families import find_parts
from treering.train.gradient.branch_logprobs import branch_logprobs
from treering.train.loop.adapters import has_adapter
from treering.train.loop.batches import StepBatch
from treering.train.loop.compute import ComputeOptions, precision

MakeReference = Callable[[], nn.Module]
"""Makes a whole model with the weights that the run began with, also after a resume."""


def needs_copy(model: nn.Module, num_ranks: int) -> bool:
    """Whether the reference is a model of its own: it is the trained one without its adapters where one rank has both.

    Example: of LoRA on one rank False, of LoRA on two and of full fine-tuning True.
    """
    return num_ranks > 1 or not has_adapter(model)


class Reference:
    """Scores batches with the weights that a run began with.

    Example:
        >>> reference = Reference(model, None, ComputeOptions())          # LoRA: the model itself    # doctest: +SKIP
        >>> reference.logprobs(batch, 1.0)                                                            # doctest: +SKIP
        [array([ 0.  ,  0.  , -2.31])]
    """

    def __init__(self, policy: nn.Module, make: MakeReference | None, compute: ComputeOptions) -> None:
        """Takes the reference that `make` makes at the first batch; None: the policy without its adapters."""
        self._policy = policy
        self._make = make
        self._compute = compute
        self._frozen: nn.Module | None = None

    def logprobs(self, batch: StepBatch, temperature: float) -> list[Float64Array]:
        """Log-probs of the trained tokens of each branch, float64 [T], 0 elsewhere; see `branch_logprobs`."""
        with self._model() as model, precision(model, self._compute.autocast):
            return branch_logprobs(
                model,
                batch.forests,
                batch.loss_masks,
                max_tokens=self._compute.max_tokens_on_ranks,
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
            check_whole(find_parts(self._frozen), "a reference")
        yield self._frozen


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Inside it a model computes as its base model.

    Example: `with adapters_off(model): forward(model, forest)`.
    """
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()
