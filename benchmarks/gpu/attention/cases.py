"""Forests, head shapes and forms that tree attention is measured on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.data import Workload
from benchmarks.gpu.workloads import chain, deep_tree, forest_of, star
from treering.attention import ScoreOptions
from treering.tree.forest import Forest


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The heads of a model's attention layer.

    Example: Qwen3-1.7B has 16 query heads and 8 key heads of size 128.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionCase:
    """A forest, the heads that attend over it, and the window and softcap of scores."""

    name: str
    forest: Forest
    heads: HeadShape
    window: int | None = None
    softcap: float | None = None

    @property
    def options(self) -> ScoreOptions:
        """Scale, window and softcap for `attend`."""
        return ScoreOptions(scale=self.heads.head_size**-0.5, window=self.window, softcap=self.softcap)


QWEN3_1_7B = HeadShape(name="qwen3-1.7b", num_heads=16, num_kv_heads=8, head_size=128)
QWEN3_8B = HeadShape(name="qwen3-8b", num_heads=32, num_kv_heads=8, head_size=128)
TINY = HeadShape(name="tiny", num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32)

DENSE_LENGTHS = (8_192, 32_768)
TINY_LENGTHS = (48, 100)
MAX_SET_TOKENS = 32_768
WINDOW = 1_024
SOFTCAP = 50.0


def full_cases(sets: Sequence[Workload]) -> list[AttentionCase]:
    """All cases by importance: if time runs out, the last ones are missing."""
    shapes = {
        "chain 8k": chain(8_192),
        "star": star(prompt=8_192, response=512, group=32),
        "deep": deep_tree(segment=256, depth=7),
    }
    chains = {"chain 32k": chain(32_768), "chain 64k": chain(65_536)}
    long = {**chains, **{f"set {some.name}": forest_of(some, MAX_SET_TOKENS) for some in sets[:4]}}
    plain = [
        AttentionCase(name=name, forest=forest, heads=heads)
        for heads, forests in ((QWEN3_8B, {**shapes, **long}), (QWEN3_1_7B, shapes))
        for name, forest in forests.items()
    ]
    deep = shapes["deep"]
    return [
        *plain,
        AttentionCase(name="deep, window", forest=deep, heads=QWEN3_8B, window=WINDOW),
        AttentionCase(name="deep, softcap", forest=deep, heads=QWEN3_8B, softcap=SOFTCAP),
    ]


def tiny_cases(sets: Sequence[Workload]) -> list[AttentionCase]:
    """A small one of each kind, for machines without a device."""
    deep = deep_tree(segment=6, depth=4)
    return [
        AttentionCase(name="chain", forest=chain(TINY_LENGTHS[1]), heads=TINY),
        AttentionCase(name="star", forest=star(prompt=40, response=12, group=3), heads=TINY),
        *(AttentionCase(name=f"set {some.name}", forest=forest_of(some, 128), heads=TINY) for some in sets[:1]),
        AttentionCase(name="deep, window", forest=deep, heads=TINY, window=12),
        AttentionCase(name="deep, softcap", forest=deep, heads=TINY, softcap=5.0),
    ]
