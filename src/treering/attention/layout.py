"""What attention needs to know of a forest, on the device where it runs.

Holds `subtree_end` and what backends derive from it, once per forest and shared by all layers. Holds no token ids.
"""

import numpy as np
import torch

from treering.attention.ancestors import Ancestor
from treering.attention.gateway import Gateway
from treering.attention.schedule import Call, Schedule, Visibility, build_schedule
from treering.errors import StateError
from treering.tree.forest import Forest
from treering.tree.fragment import Sight


class TreeLayout:
    """The attention structure of one forest on one device; built once per forward, read by every layer.

    Attributes:
        forest: the forest that it was made of; the queries of attention are its tokens.
        device: where index tensors and masks live.
        ancestors: where the forest is a partition of a tree, the partitions above; their tokens are keys too.
        gateway: where partitions below need the forest's keys and values, else None.

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
    ) -> None:
        self.forest = forest
        self.device = device
        self.ancestors = ancestors
        self.gateway = gateway
        self._sight = Sight(first=np.arange(forest.num_tokens), stop=forest.subtree_end.astype(np.int64))
        self._schedule: Schedule | None = None
        self._masks: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._keys: dict[int, torch.Tensor] = {}

    @property
    def schedule(self) -> Schedule:
        """The calls of the `segments` backend, cut on first use."""
        if self._schedule is None:
            self._schedule = build_schedule(self.forest.subtree_end, self.forest.segment_start)
        return self._schedule

    def visible(self) -> torch.Tensor:
        """The whole mask, bool [N, N], ancestors' keys before the own ones. For the reference only: others are O(N)."""
        index = torch.arange(self.forest.num_tokens, device=self.device)[:, None]
        sights = [*(ancestor.sight for ancestor in self.ancestors), self._sight]
        first, stop = (torch.from_numpy(np.concatenate(ranges)).to(self.device) for ranges in zip(*sights, strict=True))
        return (first[None, :] <= index) & (index < stop[None, :])

    def mask(self, call: Call, dtype: torch.dtype, sight: Sight | None = None) -> torch.Tensor | None:
        """Additive mask of a masked call (0 visible, -inf hidden), [num_queries, num_keys]; None for other calls.

        `sight` is that of the ancestor whose keys the call reads, None for the forest's own.
        """
        if call.visibility is not Visibility.MASKED:
            return None
        key = (id(call), dtype)
        if key not in self._masks:
            visible = torch.from_numpy(call.mask(sight or self._sight)).to(self.device)
            hidden = torch.zeros(visible.shape, dtype=dtype, device=self.device)
            self._masks[key] = hidden.masked_fill_(~visible, float("-inf"))
        return self._masks[key]

    def keys(self, call: Call) -> torch.Tensor | None:
        """Packed key indices int64 [num_keys] of a call whose keys are no range; None where they are one."""
        if call.keys is None:
            return None
        if id(call) not in self._keys:
            self._keys[id(call)] = torch.from_numpy(call.keys).to(self.device)
        return self._keys[id(call)]

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> None:
        """Any torch operation on a layout is another attention implementation that took it for a mask."""
        raise StateError(
            "a layer that was run on a forest is recomputed outside tree_attention by another attention "
            "implementation: call backward() inside the `with tree_attention(model):` block"
        )
