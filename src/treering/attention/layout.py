"""What attention needs to know of a forest, on the device where it runs.

Holds `subtree_end` and what backends derive from it, once per forest and shared by all layers. Holds no token ids.
"""

import torch

from treering.attention.schedule import Call, Schedule, Visibility, build_schedule
from treering.errors import StateError
from treering.tree.forest import Forest


class TreeLayout:
    """The attention structure of one forest on one device; built once per forward, read by every layer.

    Attributes:
        forest: the forest that it was made of.
        device: where index tensors and masks live.

    Example:
        >>> layout = TreeLayout(Forest.from_sequences([[5, 6], [5, 7]]), torch.device("cpu"))
        >>> layout.visible().int().tolist()
        [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """

    def __init__(self, forest: Forest, device: torch.device) -> None:
        self.forest = forest
        self.device = device
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
        """The whole mask, bool [N, N]. For the reference only: every other backend stays O(N)."""
        subtree_end = torch.tensor(self.forest.subtree_end, device=self.device)
        index = torch.arange(self.forest.num_tokens, device=self.device)
        return (index[None, :] <= index[:, None]) & (index[:, None] < subtree_end[None, :])

    def mask(self, call: Call, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask of a masked call (0 visible, -inf hidden), [num_queries, num_keys]; None for other calls."""
        if call.visibility is not Visibility.MASKED:
            return None
        key = (id(call), dtype)
        if key not in self._masks:
            visible = torch.from_numpy(call.mask(self.forest.subtree_end)).to(self.device)
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
