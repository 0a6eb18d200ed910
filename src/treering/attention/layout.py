"""The attention structure of one forest on one device.

Holds `subtree_end` and what backends derive from it, once per forest and shared by all layers.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
import torch

from treering.attention.ancestors import Ancestor
from treering.attention.gateway import Gateway
from treering.attention.schedule.build import CallSchedule, build_schedule
from treering.attention.schedule.call import Call, Visibility
from treering.attention.schedule.window import narrowed
from treering.attention.states import Boundary
from treering.attention.to_device import to_device
from treering.errors import StateError
from treering.tree.forest import Forest
from treering.tree.plan.fragment import Sight

T = TypeVar("T")


class TreeLayout:
    """The attention structure of one forest on one device; built once per forward, read by every layer.

    Attributes:
        forest: its tokens are the queries of attention.
        device: of index tensors and masks.
        ancestors: if the forest is a partition of a tree, the partitions above; their tokens are keys too.
        gateway: if partitions below need the forest's keys and values, where to export them; else None.
        boundary: if the forest is a partition, the states that its recurrent layers start from and export; else None.
        sight: which of the forest's tokens see each of them.
        prepared: by window what `prepare_flash` has made for compiled layers; empty for other backends.

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
        sees_whole_pictures: bool = False,
    ) -> None:
        """With `sees_whole_pictures` a picture's tokens see all of that picture (Gemma 3)."""
        self.forest = forest
        self.device = device
        self.ancestors = ancestors
        self.gateway = gateway
        self.boundary = boundary
        self.sight = Sight.within(forest, sees_whole_pictures=sees_whole_pictures)
        self._derived: dict[Hashable, object] = {}
        self.prepared: dict[int | None, Any] = {}

    def schedule(self, window: int | None = None) -> CallSchedule:
        """The calls of the `segments` backend under a sliding window, built on first use."""
        window = self.effective_window(window)
        make = partial(build_schedule, self.sight, self.forest.segment_start, window)
        return self.once(("schedule", window), make)

    def ancestor_calls(self, ancestor: Ancestor, window: int | None = None) -> tuple[Call, ...]:
        """The calls that read an ancestor's keys under a sliding window."""
        window = self.effective_window(window)
        if window is None:
            return ancestor.calls

        def make() -> tuple[Call, ...]:
            parts = [narrowed(call, ancestor.sight, self.sight.position, window) for call in ancestor.calls]
            return tuple(call for calls in parts for call in calls)

        return self.once(("calls", id(ancestor), window), make)

    def joined_sight(self) -> Sight:
        """Which rows of the forest see each of all K keys: those of the ancestors, outermost first, then its own.

        Example: of the branches 5, 6 and 5, 7, with the 5 in a partition above, rows 0:2 see key 0, rows 0:1 key 1 and
        rows 1:2 key 2.
        """
        sights = [*(ancestor.sight for ancestor in reversed(self.ancestors)), self.sight]
        return Sight(*(np.concatenate(arrays) for arrays in zip(*sights, strict=True)))

    def visible(self, window: int | None = None) -> torch.Tensor:
        """The whole mask, bool [N, keys], ancestors' keys first. For the reference only: other backends are O(N)."""
        index = torch.arange(self.forest.num_tokens, device=self.device)[:, None]
        first, stop, position = (to_device(array, self.device)[None, :] for array in self.joined_sight())
        visible = (first <= index) & (index < stop)
        if window is None:
            return visible
        own = to_device(self.sight.position, self.device)
        return visible & (own[:, None] - position < window)

    def mask(self, call: Call, dtype: torch.dtype, sight: Sight | None = None) -> torch.Tensor | None:
        """Additive mask of a masked call (0 visible, -inf hidden), [num_queries, num_keys]; None for other calls.

        `sight` belongs to the ancestor whose keys the call reads; None for the forest's own keys.
        """
        if call.visibility is not Visibility.MASKED:
            return None

        def make() -> torch.Tensor:
            visible = to_device(call.mask(sight or self.sight, self.sight.position), self.device)
            hidden = torch.zeros(visible.shape, dtype=dtype, device=self.device)
            return hidden.masked_fill_(~visible, float("-inf"))

        return self.once(("mask", id(call), dtype), make)

    def keys(self, call: Call) -> slice | torch.Tensor:
        """The keys of a call: a range of packed indices, or int64 [num_keys]."""
        if call.keys is None:
            return slice(call.key_start, call.key_stop)
        return self.once(("keys", id(call)), partial(to_device, call.keys, self.device))

    def close(self) -> None:
        """Closes the gateways after the last read from below."""
        if self.gateway is not None:
            self.gateway.close()
        if self.boundary is not None and self.boundary.gateway is not None:
            self.boundary.gateway.close()

    def once(self, name: Hashable, make: Callable[[], T]) -> T:
        """A value that a caller derives from the layout, computed on first use and shared by all layers."""
        if name not in self._derived:
            self._derived[name] = make()
        return cast(T, self._derived[name])

    def effective_window(self, window: int | None) -> int | None:
        """The window, or None if it hides nothing because no path is longer."""
        longest = int(self.sight.position.max(initial=-1)) + 1
        return None if window is None or window >= longest else window

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> NoReturn:
        """Refuses torch operations: another attention implementation has mistaken the layout for a mask."""
        _refuse_as_mask()

    def __getitem__(self, item: object) -> NoReturn:
        """Refuses indexing: a recurrent layer has mistaken the layout for a padding mask."""
        _refuse_as_mask()


def _refuse_as_mask() -> NoReturn:
    raise StateError(
        "a layer that was run on a forest is recomputed outside tree_attention by another attention "
        "implementation: call backward() inside the `with tree_attention(model):` block"
    )
