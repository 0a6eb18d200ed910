"""How the decoder and the head of a sharded model are called.

N tokens   C hidden size
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from treering.errors import UnsupportedError
from treering.ranks.units import device_of, enter, is_unit, param_dtype, path_to, units_of, without_hooks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shards:
    """The units around the parts of a sharded model.

    Attributes:
        units: all of them, outer ones before those inside.
        run: calls the decoder, compiled if the model was.
        decoder_path: those that hold the decoder, outermost first.
        head_path: those that hold the head, and the head if it is one.
        head: the head, without the hooks of a unit.
        device: where weights are gathered to.
        dtype: what layers compute in, if the policy sets it.
    """

    units: tuple[Any, ...]
    run: Callable[..., Any]
    decoder_path: tuple[Any, ...]
    head_path: tuple[Any, ...]
    head: nn.Module
    device: torch.device
    dtype: torch.dtype | None

    def run_decoder(self, **arguments: Any) -> Any:
        """Calls the decoder inside the units that hold it."""
        return enter(self.decoder_path, self.run, **arguments)

    def on_head(self, run: Callable[[nn.Module, Tensor], Any], hidden: Float[Tensor, "N C"]) -> Any:
        """`run(head, hidden)` with the head's weights gathered once, however often `run` calls the head.

        `run` returns a tensor, or a tuple of tensors and None.
        """
        head = self.head
        return enter(self.head_path, lambda rows: run(head, rows), hidden)

    def release(self) -> None:
        """Gives back the weights that a forward has gathered and no backward will; the outermost unit keeps its own."""
        for unit in self.units:
            unit.reshard()

    def zero(self, hidden: Float[Tensor, "N C"]) -> Float[Tensor, ""]:
        """0 with gradients of 0 for all weights, the head's too, which ranks that score nothing must reduce as well."""
        # Scaled inside, because a unit warns of views that it returns.
        of_head: Tensor = self.on_head(lambda head, rows: 0.0 * head(rows[:1])[0, 0], hidden)
        return of_head + 0.0 * hidden[0, 0]

    def zero_in_one_entry(self, hidden_of: Callable[[Callable[..., Any]], Tensor]) -> Tensor:
        """`zero` of one forward that enters each unit once: its backward reduces what earlier passes left in one go.

        Args:
            hidden_of: hidden states [N, C] of some tokens, from a function that calls the decoder.
        """
        common = tuple(unit for unit in self.decoder_path if any(unit is other for other in self.head_path))
        inner_decoder, inner_head = (path[len(common) :] for path in (self.decoder_path, self.head_path))

        def forward() -> Tensor:
            hidden = hidden_of(partial(enter, inner_decoder, self.run))
            logits: Tensor = enter(inner_head, self.head, hidden[:1])
            return 0.0 * hidden[0, 0] + 0.0 * logits[0, 0]

        total: Tensor = enter(common, forward)
        return total


def find_shards(model: nn.Module, *, decoder: nn.Module, head: nn.Module, run: Callable[..., Any]) -> Shards | None:
    """The units around a model's parts; None for a model that is not sharded.

    Args:
        model: with its wrappers.
        decoder: of the model.
        head: of the model.
        run: calls the decoder.

    Raises:
        UnsupportedError: a unit inside the head.
    """
    units = units_of(model)
    if not units:
        return None
    inside = [unit for unit in units if unit is not head and any(unit is module for module in head.modules())]
    if inside:
        raise UnsupportedError(
            f"a head is gathered once per forward, and {type(inside[0]).__name__} inside it is sharded apart: shard "
            "the head itself, or leave it to the unit around it"
        )
    return Shards(
        units=units,
        run=run,
        decoder_path=path_to(decoder, units, with_itself=False),
        head_path=path_to(head, units, with_itself=True),
        head=without_hooks(head) if is_unit(head) else head,
        device=device_of(units),
        dtype=param_dtype(units),
    )
