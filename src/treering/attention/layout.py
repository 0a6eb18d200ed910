"""Attention structure of one forest on one device: how layers transform scores and join keys.

A layout holds `subtree_end` and what backends derive from it, once per forest and shared by all layers. A window counts
positions on a token's own path, never packed indices.

    N tokens   K keys, the ancestors' and the N own ones   G key heads   D head size
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from treering.attention.gateway import Boundary, Gateway, KeysValues
from treering.attention.rectangles import AttentionCall, ForestCalls, Visibility, ancestor_calls, forest_calls, narrowed
from treering.errors import ConfigError, StateError
from treering.tree.forest import Forest
from treering.tree.partition import QueryRanges
from treering.types import is_count


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """How scores become weights: softmax over visible keys of `softcap * tanh(scale * q k / softcap)`.

    Attributes:
        scale: factor on the scores, usually D ** -0.5.
        window: a query sees the keys less than this many positions before it, itself included; None sees all its path.
        softcap: bound on the scores (Gemma 2), None for none.

    Example: with a window of 2 the last token of the path 5, 6, 7 sees 6 and 7.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.window is not None and not is_count(self.window, least=1):
            raise ConfigError(f"a sliding window must be an integer of at least 1, or None, got {self.window!r}")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise ConfigError(f"a softcap must be a positive number, or None, got {self.softcap!r}")


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Return the array as a tensor on a device; on CPU it shares the memory of a writable array.

    On CUDA the copy goes through pinned memory, so that the host goes on at once. A copy from pageable memory would
    wait until the device has done all earlier work.

    Example: `to_device(np.array([1, 2]), torch.device("cpu"))` is an int64 tensor [2].
    """
    # Torch warns about read-only arrays, because it could not keep a tensor from writing to them.
    tensor = torch.from_numpy(np.ascontiguousarray(array) if array.flags.writeable else array.copy())
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ancestor:
    """A partition above: its keys and values, and which query rows see them.

    Attributes:
        gateway: gateway that holds the ancestor's keys and values.
        ranges: query rows that see each of its M tokens.
        calls: attention calls that cover every visible pair once.
    """

    gateway: Gateway
    ranges: QueryRanges
    calls: tuple[AttentionCall, ...]

    @classmethod
    def from_ranges(cls, gateway: Gateway, ranges: QueryRanges) -> "Ancestor":
        """Build the calls from the ranges."""
        return cls(gateway=gateway, ranges=ranges, calls=tuple(ancestor_calls(ranges)))


T = TypeVar("T")


class TreeLayout:
    """Attention structure of one forest on one device; built once per forward, read by every layer.

    Attributes:
        forest: the forest; its tokens are the queries of attention.
        device: device of index tensors and masks.
        ancestors: the partitions above, if the forest is a partition of a tree; their tokens are keys too.
        gateway: where to export the forest's keys and values if partitions below need them; else None.
        boundary: the states that recurrent layers start from and export, if the forest is a partition; else None.
        ranges: forest rows that see each of the forest's tokens.
        prepared: tables that `prepare_flash` built for compiled layers, by window; empty for other backends.

    Example:
        >>> layout = TreeLayout(Forest.from_sequences([[5, 6], [5, 7]]), torch.device("cpu"))
        >>> layout.visible().int().tolist()
        [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """

    def __init__(
        self,
        forest: Forest,
        device: torch.device,
        *,
        ancestors: tuple[Ancestor, ...] = (),
        gateway: Gateway | None = None,
        boundary: Boundary | None = None,
        sees_whole_images: bool = False,
    ) -> None:
        """With `sees_whole_images` an image's tokens see all of that image (Gemma 3)."""
        self.forest = forest
        self.device = device
        self.ancestors = ancestors
        self.gateway = gateway
        self.boundary = boundary
        self.ranges = QueryRanges.within(forest, sees_whole_images=sees_whole_images)
        self._derived: dict[Hashable, object] = {}
        self.prepared: dict[int | None, Any] = {}

    def calls(self, window: int | None = None) -> ForestCalls:
        """Return the calls of the `segments` backend under a sliding window, built on first use."""
        window = self.effective_window(window)
        make = partial(forest_calls, self.ranges, self.forest.segment_start, window)
        return self.once(("own calls", window), make)

    def ancestor_calls(self, ancestor: Ancestor, window: int | None = None) -> tuple[AttentionCall, ...]:
        """Return the calls that read an ancestor's keys under a sliding window."""
        window = self.effective_window(window)
        if window is None:
            return ancestor.calls

        def make() -> tuple[AttentionCall, ...]:
            parts = [narrowed(call, ancestor.ranges, self.ranges.position, window) for call in ancestor.calls]
            return tuple(call for calls in parts for call in calls)

        return self.once(("calls", id(ancestor), window), make)

    def joined_ranges(self) -> QueryRanges:
        """Return the rows that see each of the K keys: the ancestors' keys, outermost first, then the forest's own.

        Example: of the branches 5, 6 and 5, 7, with the 5 in a partition above, rows 0:2 see key 0, rows 0:1 key 1 and
        rows 1:2 key 2.
        """
        all_ranges = [*(ancestor.ranges for ancestor in reversed(self.ancestors)), self.ranges]
        return QueryRanges(*(np.concatenate(arrays) for arrays in zip(*all_ranges, strict=True)))

    def visible(self, window: int | None = None) -> torch.Tensor:
        """Return the whole mask, bool [N, keys], ancestors' keys first. For the reference only: the others are O(N)."""
        index = torch.arange(self.forest.num_tokens, device=self.device)[:, None]
        first, stop, position = (to_device(array, self.device)[None, :] for array in self.joined_ranges())
        visible = (first <= index) & (index < stop)
        if window is None:
            return visible
        own = to_device(self.ranges.position, self.device)
        return visible & (own[:, None] - position < window)

    def mask(self, call: AttentionCall, dtype: torch.dtype, ranges: QueryRanges | None = None) -> torch.Tensor | None:
        """Return the additive mask of a masked call (0 visible, -inf hidden), [num_queries, num_keys], or None.

        `ranges` belongs to the ancestor whose keys the call reads; None for the forest's own keys.
        """
        if call.visibility is not Visibility.MASKED:
            return None

        def make() -> torch.Tensor:
            visible = to_device(call.mask(ranges or self.ranges, self.ranges.position), self.device)
            hidden = torch.zeros(visible.shape, dtype=dtype, device=self.device)
            return hidden.masked_fill_(~visible, float("-inf"))

        return self.once(("mask", id(call), dtype), make)

    def keys(self, call: AttentionCall) -> slice | torch.Tensor:
        """Return the keys of a call: a range of packed indices, or int64 [num_keys]."""
        if call.keys is None:
            return slice(call.key_start, call.key_stop)
        return self.once(("keys", id(call)), partial(to_device, call.keys, self.device))

    def close(self) -> None:
        """Close the gateways after the last read from below."""
        if self.gateway is not None:
            self.gateway.close()
        if self.boundary is not None and self.boundary.gateway is not None:
            self.boundary.gateway.close()

    def once(self, name: Hashable, make: Callable[[], T]) -> T:
        """Return a value that a caller derives from the layout, computed on first use and shared by all layers."""
        if name not in self._derived:
            self._derived[name] = make()
        return cast(T, self._derived[name])

    def effective_window(self, window: int | None) -> int | None:
        """Return the window, or None if it hides nothing because no path is longer."""
        longest = int(self.ranges.position.max(initial=-1)) + 1
        return None if window is None or window >= longest else window

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> NoReturn:
        """Refuse torch operations: another attention implementation has mistaken the layout for a mask."""
        _refuse_as_mask()

    def __getitem__(self, item: object) -> NoReturn:
        """Refuse indexing: a recurrent layer has mistaken the layout for a padding mask."""
        _refuse_as_mask()


def _refuse_as_mask() -> NoReturn:
    raise StateError(
        "a layer that ran on a forest is recomputed outside tree_attention, by another attention implementation: call "
        "backward() inside the `with tree_attention(model):` block"
    )


def join(own: KeysValues, layout: TreeLayout, layer: int) -> KeysValues:
    """Return keys and values [1, G, K, D] of a layer, without gradients for the ancestors' part."""
    return _concatenated([*(ancestor.gateway.read(layer) for ancestor in reversed(layout.ancestors)), own])


def scatter_key_gradients(gradient: KeysValues, layout: TreeLayout, layer: int) -> KeysValues:
    """Add the ancestors' part of a gradient [1, G, K, D] to their gateways and return that of the own keys.

    The returned gradient includes those that partitions below added for the own keys.
    """
    start = 0
    for ancestor in reversed(layout.ancestors):
        stop = start + ancestor.ranges.first.size
        part = KeysValues(*(tensor[:, :, start:stop] for tensor in gradient))
        ancestor.gateway.add_gradient(layer, slice(None), part)
        start = stop
    own = KeysValues(*(tensor[:, :, start:] for tensor in gradient))
    below = None if layout.gateway is None else layout.gateway.take_gradient(layer)
    return own if below is None else KeysValues(*(mine + theirs for mine, theirs in zip(own, below, strict=True)))


def join_differentiably(own: KeysValues, layout: TreeLayout, layer: int) -> KeysValues:
    """Return keys and values [1, G, K, D] by an autograd function that uses `scatter_key_gradients`.

    The own ones are exported to the layout's gateway, if it has one.
    """
    if layout.gateway is not None:
        layout.gateway.export(layer, own)
    if layout.gateway is None and not layout.ancestors:
        return own
    return KeysValues(*_Join.apply(*own, layout, layer))  # type: ignore[no-untyped-call]


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, layout: TreeLayout, layer: int) -> tuple[Tensor, ...]:
        ctx.layout, ctx.layer = layout, layer
        return tuple(tensor.view_as(tensor) for tensor in join(KeysValues(key, value), layout, layer))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own = scatter_key_gradients(KeysValues(*grads), ctx.layout, ctx.layer)
        return (*(mine.to(grad.dtype) for mine, grad in zip(own, grads, strict=True)), None, None)


def _concatenated(parts: Iterable[KeysValues]) -> KeysValues:
    keys, values = zip(*parts, strict=True)
    return KeysValues(*(tensors[0] if len(tensors) == 1 else _in_token_order(tensors) for tensors in (keys, values)))


def _in_token_order(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate along tokens into [1, G, K, D] whose memory is [K, G, D], like that of the parts."""
    return torch.cat([tensor.transpose(1, 2) for tensor in tensors], 1).transpose(1, 2)
