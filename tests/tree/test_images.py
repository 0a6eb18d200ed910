"""Images in a forest: prefixes merge by pixels, and parts of forests keep the table."""

import pickle

import numpy as np
import pytest

from treering.data.image import ImageData, PlacedImage
from treering.data.trajectory import Trajectory
from treering.errors import InputError
from treering.tree.forest import Forest
from treering.tree.image_tokens import image_tokens
from treering.tree.partition import take_fragment

HOLDER = 9


def image(value: float, num_tokens: int = 2) -> ImageData:
    return ImageData(
        values=np.full((4 * num_tokens, 3), value, np.float32), grid=(1, 2, 2 * num_tokens), num_tokens=num_tokens
    )


BLACK, WHITE = image(0.0), image(1.0, 3)


def placed(*images: tuple[int, ImageData]) -> list[PlacedImage]:
    return [PlacedImage(start=start, image=one) for start, one in images]


def test_equal_placeholders_with_other_pixels_do_not_merge():
    other = image(0.5)
    sequences = [[1, HOLDER, HOLDER, 5], [1, HOLDER, HOLDER, 6], [1, HOLDER, HOLDER, 5]]
    equal = placed((1, image(0.0)))
    forest = Forest.from_sequences(sequences, images=[placed((1, BLACK)), equal, placed((1, other))])
    assert forest.tokens.tolist() == [1, -1, -1, 5, 6, -2, -2, 5]
    assert [one.digest for one in forest.images] == [BLACK.digest, other.digest]
    assert Forest.from_sequences(sequences).num_tokens == 5


def test_a_branch_gives_back_its_images_and_their_offsets():
    sequences = [[HOLDER] * 5 + [7], [HOLDER] * 5 + [8], [HOLDER] * 2, [3, HOLDER, HOLDER, HOLDER]]
    both = placed((0, BLACK), (2, WHITE))
    images = [placed((0, BLACK), (2, WHITE)), both, placed((0, BLACK)), placed((1, WHITE))]
    forest = Forest.from_sequences(sequences, images=images)
    where = image_tokens(forest)
    offset = np.full(forest.num_tokens, -1)
    offset[where.at] = where.offset
    assert forest.tokens[forest.path(1)].tolist() == [-1, -1, -2, -2, -2, 8]
    assert offset[forest.path(1)].tolist() == [0, 1, 0, 1, 2, -1]
    assert offset[forest.path(3)].tolist() == [-1, 0, 1, 2]


def test_one_image_several_times_in_a_row_begins_anew():
    forest = Forest.from_sequences(
        [[HOLDER] * 4 + [5], [HOLDER] * 2 + [6]], [placed((0, BLACK), (2, BLACK)), placed((0, BLACK))]
    )
    assert forest.tokens.tolist() == [-1, -1, -1, -1, 5, 6]
    assert image_tokens(forest).offset.tolist() == [0, 1, 0, 1]
    fragment = take_fragment(forest, np.array([2, 3, 4], np.int32))
    assert image_tokens(fragment).offset.tolist() == [0, 1]


def test_forests_side_by_side_have_one_table():
    first = Forest.from_sequences([[HOLDER] * 2], [placed((0, BLACK))])
    second = Forest.from_sequences([[HOLDER] * 3 + [HOLDER] * 2], [placed((0, WHITE), (3, BLACK))])
    text = Forest.from_sequences([[4, 5]])
    joined = Forest.concatenate([first, text, second])
    assert joined.tokens.tolist() == [-1, -1, 4, 5, -2, -2, -2, -1, -1]
    assert len(joined.images) == 2
    assert [tree.images for tree in joined.trees()] == [joined.images] * 3
    assert pickle.loads(pickle.dumps(joined)).images[1].digest == WHITE.digest


@pytest.mark.parametrize(
    ("tokens", "at", "reason"),
    [
        ([HOLDER, HOLDER], [(1, BLACK)], "lie inside"),
        ([HOLDER] * 3, [(0, BLACK), (1, BLACK)], "without overlap"),
        ([HOLDER, 5, 6], [(0, BLACK)], "not one placeholder"),
    ],
)
def test_images_that_do_not_stand_at_their_tokens_are_refused(tokens, at, reason):
    with pytest.raises(InputError, match=reason):
        Forest.from_sequences([tokens], images=[placed(*at)])


@pytest.mark.parametrize(
    ("values", "grid", "num_tokens", "reason"),
    [
        (np.zeros((4, 3)), None, 4, "float32"),
        (np.zeros((8, 3), np.float32), (2, 2, 2), 2, "video"),
        (np.zeros((8, 3), np.float32), (1, 2, 2), 1, "patches"),
        (np.zeros((8, 3), np.float32), (1, 2, 4), 4, "does not fit"),
        (np.zeros((8, 3), np.float32), (1, 2, 4), 0, "at least one"),
    ],
)
def test_a_image_that_is_none_is_refused(values, grid, num_tokens, reason):
    with pytest.raises(InputError, match=reason):
        ImageData(values=values, grid=grid, num_tokens=num_tokens)


def test_a_digest_is_of_values_shape_grid_and_tokens():
    values = np.arange(48, dtype=np.float32)
    digests = {
        ImageData(values=values.reshape(16, 3), grid=grid, num_tokens=num_tokens).digest
        for grid, num_tokens in (((1, 4, 4), 4), ((1, 2, 8), 4), ((1, 4, 4), 16), (None, 4))
    }
    assert len(digests | {ImageData(values=values.reshape(4, 12), num_tokens=4).digest}) == 5
    assert ImageData(values=values.reshape(16, 3), num_tokens=4).digest in digests


@pytest.mark.parametrize("mask", [None, np.array([False, True, False, True])])
def test_a_trajectory_never_trains_a_image(mask):
    tokens = np.array([5, HOLDER, HOLDER, 6], np.int32)
    images = tuple(placed((1, BLACK)))
    with pytest.raises(InputError, match="never trained to write images"):
        Trajectory(task_id="a", tokens=tokens, loss_mask=mask, images=images)
    fine = Trajectory(task_id="a", tokens=tokens, loss_mask=np.array([False, False, False, True]), images=images)
    assert fine.images == images
