"""Data-parallel ranks: models under `fully_shard` or DDP, or whole on every rank, with exact gradient sums."""

from treering.ranks.group import RankGroup as RankGroup
from treering.ranks.setup import prepare as prepare
