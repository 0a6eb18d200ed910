"""Data-parallel ranks: models of `fully_shard`, of DDP, or whole on every rank, whose gradients are summed exactly."""

from treering.ranks.group import RankGroup as RankGroup
from treering.ranks.setup import prepare as prepare
