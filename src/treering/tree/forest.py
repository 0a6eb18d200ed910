"""Forest: sequences merged by token identity into prefix trees, with each distinct token stored once.

A packed index is a token's index in the arrays of the forest. A branch is stored as the packed index of its last token;
walking up the parents gives its path.

The placeholders of `images[n]` are stored as the negative token -(1 + n), so prefixes merge only if their pixels are
equal, and code that ignores images fails instead of embedding a wrong token. The placeholders of an image are equal
tokens, so branches never diverge inside an image.

Tokens that a mixture of experts routed differently while sampling do not merge either, if their routes are given.

    N distinct tokens   K branches (the given sequences)   S segments   F flat tokens (the sum of branch lengths)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treering.arrays import BoolArray, Int32Array, Int64Array
from treering.data.image import ImageData, PlacedImage, check_image_positions
from treering.data.routed_experts import NO_ROUTE, as_routes, merge_routes
from treering.errors import InputError
from treering.tree import radix
from treering.types import MAX_TOKEN_ID


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forest:
    """Prefix trees of K sequences in depth-first pre-order. All arrays are int32 and read-only.

    Key k is visible to query q iff `k <= q < subtree_end[k]`: one integer per token is the whole attention mask.
    Siblings are in the order of their first appearance in the input.

    Attributes:
        tokens: [N] token ids; -(1 + n) at the placeholders of image n.
        parent: [N] packed index of the token before, -1 at a root.
        position: [N] depth, 0 at a root; the RoPE position.
        subtree_end: [N] packed index one past the token's last descendant.
        branch_end: [K] packed index of each branch's last token; equal for duplicates, inside a path for prefixes.
        segment_start: [S] packed index of each segment's first token, ascending.
        segment_parent: [S] segment above, -1 at a root.
        images: distinct images, empty for text; `trees` and `take_branches` keep all of them.
        routed_experts: int16 [N, L, k], the experts that each token was routed to in each of L layers, ascending, -1
            for a token without a route; forwards replay them. None if the model chooses everywhere.

    Example:
        >>> forest = Forest.from_sequences([[5, 6, 7], [5, 6, 8, 9], [5, 6]])
        >>> forest.tokens.tolist(), forest.parent.tolist()
        ([5, 6, 7, 8, 9], [-1, 0, 1, 1, 3])
        >>> forest.position.tolist(), forest.subtree_end.tolist()
        ([0, 1, 2, 2, 3], [5, 5, 3, 5, 5])
        >>> forest.path(1).tolist(), round(forest.sharing, 3)
        ([0, 1, 3, 4], 0.444)
    """

    tokens: Int32Array
    parent: Int32Array
    position: Int32Array
    subtree_end: Int32Array
    branch_end: Int32Array
    segment_start: Int32Array
    segment_parent: Int32Array
    images: tuple[ImageData, ...] = ()
    routed_experts: NDArray[np.int16] | None = None

    def __post_init__(self) -> None:
        lengths = {self.tokens.size, self.parent.size, self.position.size, self.subtree_end.size}
        if self.routed_experts is not None:
            lengths.add(self.routed_experts.shape[0])
            self.routed_experts.flags.writeable = False
        assert len(lengths) == 1, f"ragged forest: {lengths}"
        assert self.segment_start.size == self.segment_parent.size
        for name in _ARRAYS:
            getattr(self, name).flags.writeable = False

    @classmethod
    def from_sequences(
        cls,
        sequences: Iterable[Sequence[int] | NDArray[np.integer[Any]]],
        images: Sequence[Sequence[PlacedImage]] | None = None,
        routed_experts: Sequence[ArrayLike | None] | None = None,
    ) -> "Forest":
        """Merge sequences of token ids into a forest.

        Duplicates, strict prefixes of others, single tokens and an empty iterable are all allowed.

        Args:
            sequences: K non-empty one-dimensional sequences of integers in [0, 2**31).
            images: images of each sequence, in order; prefixes with different images do not merge. None for text.
            routed_experts: routes of each sequence, integers [tokens, L, k] or None, as vLLM returns them; prefixes
                with different routes do not merge. The last token may be left out. None without routes.

        Raises:
            InputError: a sequence is empty or ragged, an entry is not an integer, an id is out of range, `images` or
                `routed_experts` and `sequences` differ in length, an image is not at placeholder tokens, routes do not
                fit their sequence, or both images and routes are given.
        """
        _check_iterable(sequences)
        parts = [_as_token_ids(i, sequence) for i, sequence in enumerate(sequences)]
        table = ImageTable()
        if images is not None:
            if len(images) != len(parts):
                raise InputError(
                    f"images must have one entry for each of {len(parts)} sequences, got {len(images)}; pass [] for a "
                    "sequence without images"
                )
            parts = [table.tokens(part, placed) for part, placed in zip(parts, images, strict=True)]
        if routed_experts is None:
            return cls._merged(parts, table.images)
        if len(routed_experts) != len(parts):
            raise InputError(
                f"routed_experts must have one entry for each of {len(parts)} sequences, got {len(routed_experts)}; "
                "give None for a sequence without routes"
            )
        checked = [
            as_routes(own, part.size, f"routed_experts of sequence {number}")
            for number, (own, part) in enumerate(zip(routed_experts, parts, strict=True))
        ]
        if table.images and any(own is not None for own in checked):
            raise InputError(
                "routed_experts are replayed for text, and the sequences have images; leave the routes out to let the "
                "model choose"
            )
        return cls._merged(parts, table.images, checked)

    @classmethod
    def _merged(
        cls,
        parts: Sequence[Int32Array],
        images: tuple[ImageData, ...],
        routes: Sequence[NDArray[np.int16] | None] = (),
    ) -> "Forest":
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([part.size for part in parts], out=offsets[1:])
        flat = np.concatenate(parts) if parts else np.empty(0, np.int32)
        if all(own is None for own in routes):
            arrays = radix.lay_out(flat, offsets, radix.insert_sequences(flat, offsets))
            return cls(**arrays._asdict(), images=images)
        merged = merge_routes(flat, routes, [part.size for part in parts])
        arrays = radix.lay_out(merged.ids, offsets, radix.insert_sequences(merged.ids, offsets))
        numbers = arrays.tokens
        tokens, routed_experts = merged.tokens[numbers], merged.routes[numbers]
        return cls(**arrays._replace(tokens=tokens)._asdict(), images=images, routed_experts=routed_experts)

    @classmethod
    def from_padded(
        cls,
        ids: ArrayLike,
        mask: ArrayLike | None = None,
        position_ids: ArrayLike | None = None,
        images: Sequence[Sequence[PlacedImage]] | None = None,
    ) -> tuple["Forest", Int64Array]:
        """Merge the sequences of a padded batch [B, T], as trainers make them; see `split_padded`.

        `images` holds the images of each sequence, with offsets that do not count padding; see `from_sequences`.

        Returns:
            The forest, and indices, int64 [B, T]: the packed index of each token, -1 at padding. `values[indices]`
            gives per-token values of the forest in the shape of the batch; mask out the padding.

        Raises:
            InputError: a batch that `split_padded` refuses, or an id out of range.

        Example:
            >>> forest, indices = Forest.from_padded([[0, 5, 6], [5, 7, 0]], [[0, 1, 1], [1, 1, 0]])
            >>> forest.num_tokens, indices.tolist()
            (3, [[-1, 0, 1], [0, 2, -1]])
        """
        sequences, real = split_padded(ids, mask, position_ids)
        forest = cls.from_sequences(sequences, images)
        return forest, padded_indices(real, forest.paths()[0])

    @classmethod
    def concatenate(cls, forests: Sequence["Forest"]) -> "Forest":
        """Put forests side by side in one index space, without merging across them; branches keep their order."""
        if len(forests) == 1:
            return forests[0]
        token_offsets = np.cumsum([0, *(forest.num_tokens for forest in forests)])
        segment_offsets = np.cumsum([0, *(forest.segment_start.size for forest in forests)])

        def joined(name: str, offsets: Int64Array) -> Int32Array:
            arrays = [np.empty(0, np.int32), *(getattr(forest, name) for forest in forests)]
            flat = np.concatenate(arrays)
            shift = np.repeat(offsets[:-1], [array.size for array in arrays[1:]])
            return np.where(flat < 0, flat, flat + shift).astype(np.int32)

        zeros = np.zeros(len(forests) + 1, np.int64)
        table = ImageTable()
        tokens = [np.empty(0, np.int32), *(table.renumbered(forest) for forest in forests)]
        return cls(
            tokens=np.concatenate(tokens),
            parent=joined("parent", token_offsets),
            position=joined("position", zeros),
            subtree_end=joined("subtree_end", token_offsets),
            branch_end=joined("branch_end", token_offsets),
            segment_start=joined("segment_start", token_offsets),
            segment_parent=joined("segment_parent", segment_offsets),
            images=table.images,
            routed_experts=_joined_routes(forests) if any(one.routed_experts is not None for one in forests) else None,
        )

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        # The constructor makes copies read-only too.
        return _rebuild, tuple(getattr(self, field.name) for field in fields(self))

    @property
    def num_tokens(self) -> int:
        """N, the number of distinct tokens."""
        return self.tokens.size

    @property
    def num_branches(self) -> int:
        """K, the number of input sequences, duplicates included."""
        return self.branch_end.size

    @property
    def num_segments(self) -> int:
        """S, the number of maximal unbranched runs."""
        return self.segment_start.size

    @property
    def num_trees(self) -> int:
        """Number of roots; sequences that differ in their first token are in different trees."""
        return self.tree_start.size

    @property
    def tree_start(self) -> Int64Array:
        """Packed index of each tree's root, ascending."""
        return np.flatnonzero(self.parent < 0)

    @property
    def branch_length(self) -> Int64Array:
        """[K] tokens of each branch."""
        return self.position[self.branch_end].astype(np.int64) + 1

    @property
    def branch_tree(self) -> Int64Array:
        """[K] tree index of each branch."""
        return np.searchsorted(self.tree_start, self.branch_end, side="right") - 1

    @property
    def num_branch_tokens(self) -> int:
        """F, the tokens computed when every branch is trained separately."""
        return int(self.branch_length.sum())

    @property
    def sharing(self) -> float:
        """1 - N / F, the share of flat tokens that the forest saves; 0.0 for an empty forest."""
        num_branch_tokens = self.num_branch_tokens
        return 1.0 - self.num_tokens / num_branch_tokens if num_branch_tokens else 0.0

    def path(self, branch: int) -> Int32Array:
        """Return the packed indices of one branch from its root to its last token: int32 [length].

        Raises:
            IndexError: the branch does not exist.
        """
        end = self.branch_end[branch]
        length = np.array([0, self.position[end] + 1], np.int64)
        indices: Int32Array = radix.branch_indices(self.parent, end.reshape(1), length)
        return indices

    def paths(self) -> tuple[Int32Array, Int64Array]:
        """Return all branches one after another: packed indices int32 [F] and offsets int64 [K + 1] into them.

        Example:
            >>> indices, offsets = Forest.from_sequences([[5, 6], [5, 7]]).paths()
            >>> indices.tolist(), offsets.tolist()
            ([0, 1, 0, 2], [0, 2, 4])
        """
        offsets = np.zeros(self.num_branches + 1, np.int64)
        np.cumsum(self.branch_length, out=offsets[1:])
        return radix.branch_indices(self.parent, self.branch_end, offsets), offsets

    def take_branches(self, branches: Iterable[int]) -> "Forest":
        """Build a forest of some branches, in the given order.

        Example:
            >>> Forest.from_sequences([[5, 6], [9], [5, 7]]).take_branches([2, 1]).tokens.tolist()
            [5, 7, 9]
        """
        paths = [self.path(branch) for branch in branches]
        routes = [] if self.routed_experts is None else [self.routed_experts[path] for path in paths]
        return self._merged([self.tokens[path] for path in paths], self.images, routes)

    def without_routes(self) -> "Forest":
        """Return the same forest for a model that chooses its own experts, such as a teacher."""
        return self if self.routed_experts is None else replace(self, routed_experts=None)

    def trees(self) -> list["Forest"]:
        """Return each tree as its own forest; the branches of a tree keep their order."""
        if self.num_trees == 1:
            return [self]
        starts = np.append(self.tree_start, self.num_tokens)
        segment_bounds = np.searchsorted(self.segment_start, starts)
        return [
            self._slice(
                tokens=slice(starts[i], starts[i + 1]),
                segments=slice(segment_bounds[i], segment_bounds[i + 1]),
                branches=branches,
            )
            for i, branches in enumerate(self.branches_by_tree())
        ]

    def branches_by_tree(self) -> list[Int64Array]:
        """Return the branch indices of each tree, trees in packed order, branches in input order.

        Example:
            >>> [b.tolist() for b in Forest.from_sequences([[5, 6], [9], [5, 7]]).branches_by_tree()]
            [[0, 2], [1]]
        """
        branch_tree = self.branch_tree
        order = np.argsort(branch_tree, kind="stable")
        return np.split(order, np.searchsorted(branch_tree[order], np.arange(1, self.num_trees)))[: self.num_trees]

    def _slice(self, *, tokens: slice, segments: slice, branches: Int64Array) -> "Forest":
        # int32 scalars keep the differences int32 without a cast: a batch may have many small trees.
        start, first_segment = np.int32(tokens.start), np.int32(segments.start)
        return Forest(
            tokens=self.tokens[tokens],
            parent=np.maximum(self.parent[tokens] - start, np.int32(-1)),
            position=self.position[tokens],
            subtree_end=self.subtree_end[tokens] - start,
            branch_end=self.branch_end[branches] - start,
            segment_start=self.segment_start[segments] - start,
            segment_parent=np.maximum(self.segment_parent[segments] - first_segment, np.int32(-1)),
            images=self.images,
            routed_experts=None if self.routed_experts is None else self.routed_experts[tokens],
        )


_ARRAYS = tuple(field.name for field in fields(Forest) if field.name not in ("images", "routed_experts"))


def _joined_routes(forests: Sequence[Forest]) -> NDArray[np.int16]:
    shapes = {forest.routed_experts.shape[1:] for forest in forests if forest.routed_experts is not None}
    if len(shapes) > 1:
        raise InputError(
            f"forests that are computed together must have routes of the same layers and experts per token, got "
            f"{sorted(shapes)}; train the rollouts of one model together"
        )
    width = shapes.pop()
    return np.concatenate(
        [
            np.full((forest.num_tokens, *width), NO_ROUTE, np.int16)
            if forest.routed_experts is None
            else forest.routed_experts
            for forest in forests
        ]
    )


def _rebuild(*values: Any) -> Forest:
    return Forest(**{field.name: value for field, value in zip(fields(Forest), values, strict=True)})


def _check_iterable(sequences: object) -> None:
    if isinstance(sequences, str | bytes) or not hasattr(sequences, "__iter__"):
        raise InputError(f"sequences must be an iterable of integer sequences, got {type(sequences).__name__}")


def _as_token_ids(index: int, sequence: Sequence[int] | NDArray[np.integer[Any]]) -> Int32Array:
    try:
        ids = np.asarray(sequence)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise InputError(
            f"sequence {index} must be a flat list of token ids, and it cannot be read ({error}); pass integers only"
        ) from error
    if ids.ndim != 1:
        raise InputError(f"sequence {index} must be one-dimensional, got shape {ids.shape}: pass a list of sequences")
    if ids.size == 0:
        raise InputError(f"sequence {index} is empty: a sequence needs at least one token; drop it")
    if ids.dtype.kind not in "iu":
        raise InputError(f"sequence {index} must hold integer token ids, got dtype {ids.dtype} (first: {ids[0]!r})")
    bad = np.flatnonzero((ids < 0) | (ids > MAX_TOKEN_ID)) if _out_of_range(ids) else ids[:0]
    if bad.size:
        at = int(bad[0])
        raise InputError(f"sequence {index}, token {at}: id {int(ids[at])} is out of range [0, {MAX_TOKEN_ID}]")
    return ids.astype(np.int32, copy=False)


def _out_of_range(ids: NDArray[np.integer[Any]]) -> bool:
    return int(ids.min()) < 0 or int(ids.max()) > MAX_TOKEN_ID


class ImageTable:
    """Distinct images in the order of their first appearance.

    Example:
        >>> black, white = (ImageData(values=np.full((1, 3), x, np.float32), num_tokens=2) for x in (0.0, 1.0))
        >>> table = ImageTable()
        >>> table.tokens([9, 9, 5], [PlacedImage(start=0, image=white)]).tolist()
        [-1, -1, 5]
        >>> two = [PlacedImage(start=0, image=black), PlacedImage(start=2, image=white)]
        >>> table.tokens([9, 9, 9, 9], two).tolist()
        [-2, -2, -1, -1]
    """

    def __init__(self) -> None:
        self._number: dict[bytes, int] = {}
        self._images: list[ImageData] = []

    @property
    def images(self) -> tuple[ImageData, ...]:
        """The distinct images that were added."""
        return tuple(self._images)

    def add(self, image: ImageData) -> int:
        """Return the number of an image; add the image if its digest is not in the table."""
        number = self._number.setdefault(image.digest, len(self._images))
        if number == len(self._images):
            self._images.append(image)
        return number

    def tokens(self, tokens: Sequence[int] | NDArray[np.int32], placed: Sequence[PlacedImage]) -> Int32Array:
        """Return a sequence as int32, with -(1 + n) at the placeholders of image n.

        Raises:
            InputError: see `check_image_positions`.
        """
        ids = np.array(tokens, np.int32)
        check_image_positions(placed, ids)
        for one in placed:
            ids[one.start : one.stop] = -1 - self.add(one.image)
        return ids

    def renumbered(self, forest: Forest) -> Int32Array:
        """Return the tokens of a forest, with the image numbers of this table."""
        numbers = np.array([self.add(image) for image in forest.images], np.int32)
        own = forest.tokens
        # A forest of text has no numbers to look up.
        return np.where(own < 0, -1 - numbers[np.clip(-1 - own, 0, numbers.size - 1)], own) if numbers.size else own


class PaddedSequences(NamedTuple):
    """Sequences of a batch, row after row."""

    sequences: list[NDArray[np.integer[Any]]]
    """Integers as given, one array per sequence."""
    real: BoolArray
    """bool [B, T], True at real tokens; in row-major order they are the concatenated sequences."""


def split_padded(ids: ArrayLike, mask: ArrayLike | None, position_ids: ArrayLike | None) -> PaddedSequences:
    """Split a padded batch into its sequences.

    Args:
        ids: integers [B, T].
        mask: [B, T], 0 at padding on either side of a row's tokens; None without padding.
        position_ids: [B, T] or [T]; a position that does not rise starts the next sequence of a packed row. None for
            one sequence per row.

    Raises:
        InputError: a wrong shape or dtype, padding between tokens, positions with gaps, or a row whose first position
            is not 0.

    Example: the row [0, 5, 6] with the mask [0, 1, 1] is the sequence [5, 6]; [5, 6, 5, 7] with the positions
    [0, 1, 0, 1] are [5, 6] and [5, 7].
    """
    tokens = _integers("ids", ids)
    if tokens.ndim != 2:
        raise InputError(f"ids must be a batch [rows, columns], got shape {tokens.shape}; add a dimension for one row")
    real = np.ones(tokens.shape, np.bool_) if mask is None else _real("mask", mask, tokens.shape)
    rows, columns = np.nonzero(real)
    begins = np.ones(rows.size, np.bool_)
    begins[1:] = rows[1:] != rows[:-1]
    steps = np.diff(columns, prepend=0)
    if position_ids is not None:
        positions = np.broadcast_to(_integers("position_ids", position_ids), tokens.shape)[real]
        _check_whole(rows, columns, positions)
        steps = np.diff(positions, prepend=0)
        begins |= steps < 1
    skipped = np.flatnonzero(~begins & (steps != 1))
    if skipped.size:
        row, column = int(rows[skipped[0]]), int(columns[skipped[0]])
        raise InputError(
            f"the tokens of a sequence must be contiguous, but row {row} has a gap before column {column}; move "
            "padding to the sides of the row, and count position_ids without gaps"
        )
    starts = np.flatnonzero(begins)[1:]
    return PaddedSequences(sequences=np.split(tokens[real], starts) if rows.size else [], real=real)


def padded_indices(real: BoolArray, paths: Int32Array) -> Int64Array:
    """Return the packed index of each token, int64 [B, T], -1 at padding; `paths` int32 [F] in row-major order."""
    indices = np.full(real.shape, -1, np.int64)
    indices[real] = paths
    return indices


def _check_whole(rows: NDArray[np.int64], columns: NDArray[np.int64], positions: NDArray[Any]) -> None:
    wrong = np.flatnonzero((columns == 0) & (positions != 0))
    if wrong.size:
        raise InputError(
            f"a sequence must begin at position 0, but row {int(rows[wrong[0]])} begins at "
            f"{int(positions[wrong[0]])}: the tokens before it are missing, as with sequence or context parallelism; "
            "set its size to 1 to keep sequences whole, or count positions from 0"
        )


def _integers(name: str, values: ArrayLike) -> NDArray[Any]:
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise InputError(f"{name} must hold integers, got {array.dtype}; convert it")
    return array


def _real(name: str, values: ArrayLike, shape: tuple[int, ...]) -> BoolArray:
    array = np.asarray(values)
    if array.shape != shape:
        raise InputError(f"{name} must have the shape of ids, {shape}, got {array.shape}; give one entry per token")
    real: BoolArray = np.not_equal(array, 0)
    return real
