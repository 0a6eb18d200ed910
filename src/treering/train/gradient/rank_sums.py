"""The reduction of a step's gradients over the ranks that train one model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn

from treering.errors import UnsupportedError
from treering.model.families import ModelParts
from treering.model.forward import ONE_TOKEN, hidden_states
from treering.ranks.gathering import gathered, reset, summed, whole_weights
from treering.ranks.setup import StepRanks
from treering.ranks.units import units_of


@contextmanager
def reduced_over_ranks(
    team: StepRanks, parts: ModelParts, model: nn.Module, value_head: nn.Module | None
) -> Iterator[None]:
    """Context manager around the passes of a step, inside `tree_attention`; afterwards gradients are summed over ranks.

    Sharded weights are reduced by their units: in every pass, or at the end. Weights that every rank holds whole, such
    as those of a value head or of a model inside DDP, are summed at the end.

    Raises:
        UnsupportedError: a value head that is sharded.
    """
    if team.mode is None:
        yield
        return
    if value_head is not None and units_of(value_head):
        raise UnsupportedError(
            "a value head is whole on every rank, and fully_shard has sharded this one: leave it out of fully_shard; "
            "backward sums its gradients"
        )
    shards = parts.shards
    units = () if shards is None else shards.units

    def zero() -> Tensor:
        assert shards is not None
        return shards.zero_in_one_entry(lambda run: hidden_states(replace(parts, run=run), ONE_TOKEN))

    weights = whole_weights(units, model, value_head)
    try:
        with summed(weights, team.group), gathered(units if team.mode == "gathered" else (), zero):
            yield
    except BaseException:
        reset(units)
        raise
