"""Losses on the routers of a mixture of experts: load balance, and the size of the router logits.

Both are means over every token of every branch of the optimizer batch and over all layers with experts, so a shared
token counts once per branch through it. The balance loss is a product of two such means. One of them, the routed
shares, has no gradient: once it is known for the whole batch, the loss is a sum over tokens, and any micro-batch,
partition or rank can add its part.

    N tokens   E experts   k experts per token   L layers with experts
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from treering.arrays import Float64Array, Int64Array
from treering.attention.layout import to_device
from treering.model.routers import Routers, Routes, find_routers, recorded_routes
from treering.model.tree_model import TreeModel
from treering.train.entries import SumOverRanks
from treering.tree.forest import Forest


@runtime_checkable
class RouterFactors(Protocol):
    """Factors of both losses, such as `treering.RouterLosses`; None drops a loss, and 0 only measures it."""

    @property
    def balance(self) -> float | None:
        """Factor of the load-balancing loss."""

    @property
    def z(self) -> float | None:
        """Factor of the mean squared log-sum-exp of router logits."""


def branches_through(forest: Forest) -> Int64Array:
    """Count the branches through each token: int64 [N].

    Example: in the forest of [5, 6], [5, 7] and [5], token 5 has 3 branches through it, 6 and 7 have 1 each.
    """
    ends = np.zeros(forest.num_tokens + 1, np.int64)
    np.cumsum(np.bincount(forest.branch_end, minlength=forest.num_tokens), out=ends[1:])
    return ends[forest.subtree_end] - ends[:-1]


class Routing:
    """Router losses of one optimizer batch, added up forward by forward.

    Each token must be counted once, by `count` or by its `loss`. Then `share_load` sums the counts over all ranks:
    before the first `loss` if there is a balance loss, and always before `total` and `metrics`. All ranks must call the
    methods that sum over ranks equally often.

    Attributes:
        routers: routers of the model.
        losses: the coefficients.
        counts_first: whether forwards without gradients count, because a backward needs the load of the batch first.
    """

    counts_first = False

    def __init__(
        self, losses: RouterFactors, routers: Routers, num_branch_tokens: int, sum_over_ranks: SumOverRanks
    ) -> None:
        """Start with nothing counted; `num_branch_tokens` is the number in this rank's batch."""
        self.routers = routers
        self.losses = losses
        self._sum_over_ranks = sum_over_ranks
        total = float(sum_over_ranks(np.array([num_branch_tokens], np.float64))[0])
        self._num_rows = max(total, 1.0) * len(routers.modules)
        self._counts = np.zeros((len(routers.modules), routers.num_experts), np.float64)
        # Counts, mean probabilities and squares of each forward; read once all work of the step is queued.
        self._counted: list[Tensor] = []
        self._means: list[Tensor] = []
        self._squares: list[Tensor] = []
        self._has_load = False

    @property
    def has_load(self) -> bool:
        """Whether the load of the whole batch is known."""
        return self._has_load

    def forward(self, run: Callable[[], Tensor], branches: Int64Array) -> tuple[Tensor, Tensor | None]:
        """Run a forward of N tokens; return its hidden states, and with gradients its router loss."""
        trains = torch.is_grad_enabled()
        if not trains and not self.counts_first:
            return run(), None
        with recorded_routes(self.routers) as routes:
            hidden = run()
        if not trains:
            self.count(routes, branches)
            return hidden, None
        if self.losses.balance and not self._has_load:
            # This forward is the whole batch, so it also provides the load.
            self.count(routes, branches)
            self.share_load()
        return hidden, self.loss(routes, branches)

    def count(self, routes: Sequence[Routes], branches: Int64Array) -> None:
        """Count the experts of the N tokens of a forward; `branches` [N] counts the branches through each token."""
        assert not self._has_load, "counted after the counts were shared"
        num_experts = self.routers.num_experts
        self._counted.append(_stacked([_num_routed(route.chosen, branches, num_experts) for route in routes]))

    def share_load(self) -> None:
        """Sum the counts over all ranks."""
        for counted in self._counted:
            self._counts += _to_host(counted)
        summed = self._sum_over_ranks(self._counts.ravel())
        self._counts = np.asarray(summed, np.float64).reshape(self._counts.shape)
        self._has_load = True

    def loss(self, routes: Sequence[Routes], branches: Int64Array) -> Tensor:
        """Return the router loss of the N tokens of a forward, a differentiable scalar; call it once per forward."""
        assert self._has_load or not self.losses.balance, "a balance loss before the load is known"
        if not self._has_load:
            self.count(routes, branches)
        weights = branches / self._num_rows
        probabilities = [_mean_probabilities(route.logits, weights) for route in routes]
        squares = [_mean_square(route.logits, weights) for route in routes]
        self._means.append(_stacked(probabilities))
        self._squares.append(_stacked(squares))
        total = torch.zeros_like(squares[0])
        if self.losses.balance:
            factor = self.losses.balance * self.routers.num_experts * self._shares
            for mean in probabilities:
                total = total + (to_device(factor, mean.device).to(mean.dtype) * mean).sum().to(total)
        if self.losses.z:
            for square in squares:
                total = total + self.losses.z * square.to(total)
        return total

    @property
    def total(self) -> float:
        """The router loss of this rank's tokens."""
        balance = self.routers.num_experts * float((self._shares * self._probabilities).sum())
        return (self.losses.balance or 0.0) * balance + (self.losses.z or 0.0) * self._z

    def metrics(self) -> dict[str, float]:
        """Return metrics over all ranks: `router_balance` and `router_z` without coefficients, and `expert_load_max`.

        `expert_load_max` is the largest load of any expert in any layer over the mean: 1 is even, E / k is one expert
        for all.
        """
        own = np.array([self._z, *self._probabilities], np.float64)
        z, *probabilities = np.asarray(self._sum_over_ranks(own), np.float64).tolist()
        mean_load = self._counts.mean() if self._counts.any() else 1.0
        return {
            "router_balance": float(self.routers.num_experts * (self._shares * np.array(probabilities)).sum()),
            "router_z": float(z),
            "expert_load_max": float(self._counts.max() / mean_load),
        }

    @property
    def _probabilities(self) -> Float64Array:
        """Mean probability of each expert over this rank's tokens, over all layers: [E]."""
        none: Float64Array = np.zeros(self.routers.num_experts, np.float64)
        return sum((_to_host(means).sum(0) for means in self._means), start=none)

    @property
    def _z(self) -> float:
        """Mean square of the log-sum-exps of this rank's tokens, over all layers."""
        return sum((float(_to_host(squares).sum()) for squares in self._squares), start=0.0)

    @property
    def _shares(self) -> Float64Array:
        """Share of tokens that each expert gets, over all layers: [E], summing to k."""
        shares: Float64Array = self._counts.sum(0) / self._num_rows
        return shares


def check_routers(model: nn.Module, losses: RouterFactors | None) -> None:
    """Refuse router losses of a model without routers.

    Raises:
        UnsupportedError: a model without routers; names its type.
    """
    if losses is not None:
        find_routers(TreeModel.of(model))


def _num_routed(chosen: Int[Tensor, "N k"], branches: Int64Array, num_experts: int) -> Int[Tensor, " E"]:
    # In integers, so that the order of additions, which varies on a GPU, does not matter.
    counts = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
    weights = to_device(branches, chosen.device).repeat_interleave(chosen.shape[1])
    return counts.index_add_(0, chosen.reshape(-1).long(), weights)


def _mean_probabilities(logits: Float[Tensor, "N E"], weights: Float64Array) -> Float[Tensor, " E"]:
    """Return this layer's part of each expert's mean probability, in float32 or wider."""
    logits = _wide(logits)
    return (to_device(weights, logits.device).to(logits.dtype)[:, None] * logits.softmax(-1)).sum(0)


def _mean_square(logits: Float[Tensor, "N E"], weights: Float64Array) -> Float[Tensor, ""]:
    """Return this layer's part of the mean square of the log-sum-exp, in float32 or wider."""
    logits = _wide(logits)
    return (to_device(weights, logits.device).to(logits.dtype) * logits.logsumexp(-1) ** 2).sum()


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Stack one tensor per layer, on any devices, to [L, ...]."""
    return torch.stack([part.detach().to(parts[0].device) for part in parts])


def _to_host(stacked: Tensor) -> Float64Array:
    values: Float64Array = stacked.cpu().double().numpy()
    return values
