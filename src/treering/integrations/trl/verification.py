"""Run the first micro-batch twice: its gradients on trees must equal those of the stock path up to rounding.

Rounding has no fixed size: it depends on the number format, the model and the loss. So the stock path runs again on
slightly wider micro-batches, with embeddings changed by at most one rounding; the resulting difference is the
yardstick.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from treering.errors import StateError
from treering.integrations.trl.trl_trainers import steps_in_backward
from treering.model.context import working_dtype
from treering.model.patch import TreePatch
from treering.model.tree_model import unwrap
from treering.ranks.group import check_images_together
from treering.ranks.units import reducing, units_of

TIMES_YARDSTICK = 16.0
TIMES_EPSILON = 16.0
"""The bound is the larger of 16 yardsticks and 16 units in the last place; a wrong tree differs by 1e-1 or more."""
MAX_BOUND = 0.2
"""Upper limit of the bound: in low precision rounding alone may look like an error (shifted labels cost 0.32)."""
MAX_YARDSTICK_EPSILONS = 1024.0
MAX_YARDSTICK = 0.1
"""A yardstick above the smaller of the two is not rounding: a token depends on its batch, or on noise."""
_EXTRA_COLUMNS = 8
_OF_BACKWARD: dict[str, Any] = {"grad": None, "_backward_hooks": None, "_post_accumulate_grad_hooks": {}}
"""Per-weight attributes that backward writes or calls, and their empty values; torch's hooks must not be None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """L2 distances between gradients over all parameters, relative to the norm of the stock path's."""

    tree: float
    """Distance of the tree's gradients."""
    yardstick: float
    """Distance of the stock path's gradients under different rounding."""
    bound: float
    """Largest distance that counts as rounding."""


class FirstMicroBatch:
    """Comparison of the first micro-batch that has gradients; leaves the run unchanged."""

    def __init__(self, trainer: Any, patches: list[TreePatch]) -> None:
        self._trainer = trainer
        self._patches = patches
        self.difference: Difference | None = None
        """Result; None before the comparison."""

    def check(self, compute_loss: Callable[..., Tensor], inputs: Any, num_items: Any) -> None:
        """Compare gradients, unless an earlier micro-batch did, or all gradients are zero.

        All ranks of a run call this at the same time; if one raises, all do.

        Args:
            compute_loss: the trainer's own.
            inputs: the micro-batch.
            num_items: `num_items_in_batch` of the optimizer batch.

        Raises:
            StateError: gradients differ by more than rounding, rounding is too large to tell (with the figures), or a
                weight has changed.
        """
        if self.difference is not None:
            return
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        epsilon = _epsilon(model, self._trainer)
        is_left_alone = getattr(self._trainer, "is_deepspeed_enabled", False) or steps_in_backward(model)

        def gradients() -> dict[str, Tensor]:
            loss: Any = compute_loss(model, dict(inputs), num_items_in_batch=num_items)
            with torch.autocast(loss.device.type, enabled=False):
                return _gradients(loss, model, is_left_alone=is_left_alone)

        units = units_of(model)
        if units and getattr(self._trainer, "_is_vlm", False):
            # Check first: the stock path would wait forever.
            check_images_together(has_images=inputs.get("pixel_values") is not None)
        with ExitStack() as stack:
            stack.enter_context(reducing(units))
            with self._flat():
                with _untouched(self._trainer, model):
                    stock = {name: grad.detach().cpu().clone() for name, grad in gradients().items()}
                with _untouched(self._trainer, model), _rounded_otherwise(model, epsilon):
                    yardstick = square_apart(gradients(), stock)
            for patch in self._patches:
                stack.enter_context(patch.uncounted())
            with _untouched(self._trainer, model):
                tree = square_apart(gradients(), stock)
        self._judge(square_apart({}, stock), tree, yardstick, epsilon, is_sharded=bool(units))

    def _judge(self, norm: float, tree: float, yardstick: float, epsilon: float, *, is_sharded: bool) -> None:
        """Judge squared distances: per rank, or per shard to be summed over ranks."""
        accelerator = self._trainer.accelerator
        squares = torch.tensor([[norm, tree, yardstick]], dtype=torch.float32, device=accelerator.device)
        squares = accelerator.reduce(squares, reduction="sum") if is_sharded else accelerator.gather(squares)
        norm = float(squares[:, 0].max())
        if norm == 0 or not math.isfinite(norm):
            return
        # A rank whose gradients are all 0 has no norm to compare with; its gradients on trees must be 0 too.
        relative = (squares[:, 1:] / squares[:, :1]).where(squares[:, 1:] != 0, 0.0).sqrt()
        tree, yardstick = relative.amax(0).tolist()
        limit = min(MAX_YARDSTICK_EPSILONS * epsilon, MAX_YARDSTICK)
        if not yardstick <= limit:
            raise StateError(
                f"other rounding of the stock path moves the first micro-batch's gradients by {yardstick:.1e} of their "
                f"norm, above {limit:.1e}, so trees cannot be compared: a layer averages over its batch or draws "
                "noise, or the dtype is too coarse; compare in float32 and, if that is exact, set verify_first=False"
            )
        bound = min(max(TIMES_YARDSTICK * yardstick, TIMES_EPSILON * epsilon), MAX_BOUND)
        self.difference = Difference(tree=tree, yardstick=yardstick, bound=bound)
        if not tree <= bound:
            raise StateError(
                f"the first micro-batch's gradients on trees differ from the stock path's by {tree:.1e} of their norm, "
                f"above {bound:.1e} (other rounding of the stock path moves them by {yardstick:.1e}); train without "
                "share_prefixes, and report the model and the trainer's arguments"
            )

    @contextmanager
    def _flat(self) -> Iterator[None]:
        with ExitStack() as stack:
            for patch in self._patches:
                stack.enter_context(patch.flat())
            yield


def square_apart(gradients: dict[str, Tensor], stock: dict[str, Tensor]) -> float:
    """Return the squared L2 distance over all parameters; a gradient missing on one side counts as 0.

    Example: gradients [3, 0] and [0, 4] of one parameter have the squared distance 25.
    """
    total = 0.0
    for name in gradients.keys() | stock.keys():
        ours, theirs = (side[name].detach().cpu().double() if name in side else 0.0 for side in (gradients, stock))
        total += float(torch.as_tensor(ours - theirs).square().sum())
    return total


def _gradients(loss: Tensor, model: nn.Module, *, is_left_alone: bool) -> dict[str, Tensor]:
    """Return the gradients of the parameters that have one, by name.

    Args:
        loss: of `model`.
        model: trained model.
        is_left_alone: leave `.grad` unset, as DeepSpeed would use it for its own step.
    """
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if not is_left_alone:
        torch.autograd.backward(loss)
        return {name: _own_part(weight.grad) for name, weight in weights.items() if weight.grad is not None}
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    return {name: grad for name, grad in zip(weights, found, strict=True) if grad is not None}


def _own_part(gradient: Any) -> Tensor:
    """Return the rank's shard of a sharded gradient; any other gradient unchanged."""
    own: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return own


def _epsilon(model: nn.Module, trainer: Any) -> float:
    """Return the unit in the last place of the coarsest numbers that the model computes with.

    It is at least float32's, in which layers compute norms and a router's softmax whatever the weights are. Accelerate
    turns autocast on inside the model's forward.
    """
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    own = dtypes.get(trainer.accelerator.mixed_precision, torch.float32)
    tf32 = 2.0**-10 if trainer.args.tf32 else 0.0
    return max(tf32, *(torch.finfo(dtype).eps for dtype in (torch.float32, own, working_dtype(model))))


@contextmanager
def _untouched(trainer: Any, model: nn.Module) -> Iterator[None]:
    """Restore gradients, random states, metrics and the trainer's other attributes on exit.

    Hooks on weights do not run inside: optimizers that step within backward (LOMO, layerwise GaLore) would train.

    Raises:
        StateError: a hook that cannot be skipped has changed a weight.
    """
    before = dict(trainer.__dict__)
    metrics = deepcopy(trainer._metrics)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    kept = {name: {key: getattr(weight, key) for key in _OF_BACKWARD} for name, weight in trained.items()}
    sums = _sums(trained)
    states = random.getstate(), np.random.get_state()
    for weight in trained.values():
        for key, empty in _OF_BACKWARD.items():
            setattr(weight, key, empty)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for name, weight in trained.items():
            for key, value in kept[name].items():
                setattr(weight, key, value)
        random.setstate(states[0])
        np.random.set_state(states[1])
        trainer.__dict__.clear()
        trainer.__dict__.update(before)
        for mode, lists in metrics.items():
            trainer._metrics[mode].clear()
            trainer._metrics[mode].update(lists)
    changed = [name for name, now in _sums(trained).items() if now != sums[name]]
    if changed:
        raise StateError(
            f"comparing the first micro-batch's gradients changed the weight {changed[0]!r}: an optimizer steps within "
            "backward through a hook that the comparison cannot skip; restart with verify_first=False"
        )


def _sums(weights: dict[str, nn.Parameter]) -> dict[str, float]:
    """Return the sum of each weight; `_version` would miss what a hook writes to `weight.data`.

    ZeRO-3 gathers a weight at any time and keeps the rank's shard as `ds_tensor`.
    """
    if not weights:
        return {}
    parts = (_own_part(getattr(weight, "ds_tensor", weight).detach()) for weight in weights.values())
    sums = [part.sum(dtype=torch.float64) for part in parts]
    return dict(zip(weights, torch.stack([one.cpu() for one in sums]).tolist(), strict=True))


@contextmanager
def _rounded_otherwise(model: nn.Module, epsilon: float) -> Iterator[None]:
    """Give the model slightly wider batches, and embeddings that differ by at most one rounding."""
    causal_lm: Any = unwrap(model).model
    # The module that receives the batch; in image models it contains the decoder.
    inner, embedding = causal_lm.base_model, causal_lm.get_input_embeddings()
    generator = torch.Generator().manual_seed(0)

    def widen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids = args[0] if args else kwargs["input_ids"]
        wider = dict(kwargs, input_ids=_wider(ids))
        for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
            if isinstance(kwargs.get(name), Tensor):
                wider[name] = _wider(kwargs[name])
        return args[1:], wider

    def narrow(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        output["last_hidden_state"] = output["last_hidden_state"][:, :-_EXTRA_COLUMNS]
        return output

    def jitter(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        noise = torch.rand(output.shape, generator=generator) - 0.5
        return output * (1 + epsilon * noise).to(output)

    def is_plain(kwargs: dict[str, Any]) -> bool:
        return kwargs.get("position_ids") is None and not kwargs.get("output_router_logits")

    with ExitStack() as stack:
        undo = [
            inner.register_forward_pre_hook(lambda m, a, k: widen(m, a, k) if is_plain(k) else None, with_kwargs=True),
            inner.register_forward_hook(
                lambda m, a, k, o: narrow(m, a, k, o) if is_plain(k) else None, with_kwargs=True
            ),
            embedding.register_forward_hook(jitter),
        ]
        for handle in undo:
            stack.callback(handle.remove)
        yield


def _wider(values: Tensor) -> Tensor:
    return nn.functional.pad(values, (0, _EXTRA_COLUMNS))
