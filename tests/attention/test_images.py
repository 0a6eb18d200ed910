"""Bidirectional attention within images: every backend obeys the mask, with windows and in partitions."""

import numpy as np
import pytest
import torch

from tests.attention.given import results
from tests.tree.test_partition import tree_of_images
from treering.attention import ScoreOptions, TreeLayout
from treering.attention.dispatch import attend
from treering.attention.rectangles import forest_calls
from treering.data.image import ImageData, PlacedImage
from treering.tree.forest import Forest
from treering.tree.image_tokens import image_spans

LARGE = [ImageData(values=np.full((1, 2), n, np.float32), num_tokens=n) for n in (150, 50, 33)]


def large_tree() -> Forest:
    """Return a tree of images that need their own calls, longer and shorter than the windows."""
    ids = [1, *[9] * 150, 2, *[9] * 50, 3, *[9] * 33]
    starts = (1, 152, 203)
    placed = [PlacedImage(start=at, image=one) for at, one in zip(starts, LARGE, strict=True)]
    sequences = [[*ids, *range(4, 60)], [*ids, 5, 6], [*ids[:202], *range(10, 80)], [1, *range(4, 50)]]
    return Forest.from_sequences(sequences, images=[placed, placed, placed[:2], []])


def expected_mask(forest: Forest, window: int | None) -> np.ndarray:
    """Build the mask by definition: ancestors and all tokens of the query's own image, within the window."""
    visible = np.zeros((forest.num_tokens, forest.num_tokens), bool)
    span_of = {token: span for span in image_spans(forest) for token in range(*span)}
    for query in range(forest.num_tokens):
        at = query
        while at >= 0:
            visible[query, at] = True
            at = int(forest.parent[at])
        visible[query, slice(*span_of.get(query, (0, 0)))] = True
    if window is None:
        return visible
    return visible & (forest.position[:, None] - forest.position[None, :] < window)


TREES = [*(tree_of_images(seed) for seed in range(8)), large_tree()]


@pytest.mark.parametrize("window", [None, 4, 60, 200])
@pytest.mark.parametrize("number", range(len(TREES)))
def test_calls_cover_the_visible_pairs_once(number: int, window: int | None) -> None:
    forest = TREES[number]
    layout = TreeLayout(forest, torch.device("cpu"), sees_whole_images=True)
    expected = expected_mask(forest, window)
    assert (layout.visible(window).numpy() == expected).all()
    calls = forest_calls(layout.ranges, forest.segment_start, window)
    count = np.zeros(expected.shape, int)
    for call in (*calls.within, *calls.across):
        rows = np.arange(call.query_start, call.query_stop)
        keys = call.key_indices()
        pairs = np.ones((rows.size, keys.size), bool)
        if call.visibility.value == "causal":
            pairs = np.tril(pairs)
        elif call.visibility.value == "masked":
            pairs = call.mask(layout.ranges, layout.ranges.position)
        count[np.ix_(rows, keys)] += pairs
    assert (count == expected).all()


@pytest.mark.parametrize(("backend", "window"), [("segments", None), ("segments", 60), ("triton", 20), ("flex", 60)])
def test_backends_agree_with_the_reference(backend: str, window: int | None) -> None:
    # The kernels' interpreter is slow.
    forest = TREES[6] if backend == "triton" else TREES[-1]
    torch.manual_seed(0)
    dtype = torch.float32 if backend == "triton" else torch.float64
    given = [torch.randn(1, heads, forest.num_tokens, 8, dtype=dtype) for heads in (2, 1, 1)]

    def run(name: str) -> list[torch.Tensor]:
        leaves = [one.clone().requires_grad_(backend != "flex") for one in given]
        layout = TreeLayout(forest, torch.device("cpu"), sees_whole_images=True)
        return results(
            attend, leaves, None, layout=layout, options=ScoreOptions(scale=0.3, window=window), backend=name
        )

    for mine, wanted in zip(run(backend), run("reference"), strict=True):
        assert torch.allclose(mine, wanted, rtol=0, atol=(1e-9 if dtype == torch.float64 else 1e-4))
