"""The cache that a Hugging Face recurrent layer sees in one call: provides initial states, captures the new ones.

Implements the interface of transformers before 5.23 (`has_previous_state`, `layers[i].recurrent_states[0]`) and since
(`get_recurrent_state`). Nothing is updated in place, so gradients flow through.

    B rows   L tokens of the longest   D channels of the convolution   K its kernel size
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from treering.attention.states import States


class CallCache:
    """The cache of one call of one layer.

    Example: for rows of 4 tokens and K = 4, `update_conv_state` returns 7 columns, 3 of context and the 4 new ones, and
    the mixer drops the first 3 outputs.
    """

    record_past = True
    """Tells the layer not to update states in place."""

    def __init__(self, states: States | None) -> None:
        """`states`: the initial state of each row; None if all start from zero."""
        self._given = states
        self._inputs: Tensor | None = None
        self._num_new = 0
        self._last: Tensor | None = None

    def ends(self, rows: Tensor, length: Tensor) -> States:
        """States after the last token of some rows; call it after the layer has run.

        Args:
            rows: int64, of the call.
            length: int64 [B] tokens of each row of the call.
        """
        assert self._inputs is not None, "the layer has not shown its convolution's inputs"
        assert self._last is not None, "the layer has not updated its state"
        inputs = self._inputs[rows]
        num_columns = inputs.shape[-1] - self._num_new
        # Column K - 1 + i is token i: the K - 1 columns before token `length`.
        columns = length[rows][:, None] + torch.arange(num_columns, device=rows.device)
        context = inputs.gather(2, columns[:, None].expand(-1, inputs.shape[1], -1))
        return States(self._last[rows], context)

    def update_conv_state(
        self, inputs: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 1, **options: object
    ) -> Tensor:
        """The convolution's inputs [B, D, L] with their context in front: [B, D, K - 1 + L]."""
        self._num_new = inputs.shape[-1]
        if self._given is None:
            self._inputs = F.pad(inputs, (conv_kernel_size - 1, 0))
        else:
            self._inputs = torch.cat([self._given.context.to(inputs.dtype), inputs], -1)
        return self._inputs

    def update_recurrent_state(self, states: Tensor, layer_idx: int, state_idx: int = 0, **options: object) -> Tensor:
        """Captures the states after the last column of each row."""
        self._last = states
        return states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """None: contexts are part of `update_conv_state`; only generation reads them here."""
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The initial states of the rows."""
        return None if self._given is None else self._given.recurrent

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the rows have initial states."""
        return self._given is not None

    def is_recording_past(self, layer_idx: int) -> bool:
        """True: states must not be updated in place."""
        return True

    @property
    def layers(self) -> "CallCache":
        """The cache itself, as the cache of every layer."""
        return self

    def __getitem__(self, layer_idx: int) -> "CallCache":
        return self

    @property
    def conv_states(self) -> dict[int, Tensor | None]:
        """None, see `get_conv_state`."""
        return {0: None}

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        """The initial states of the rows."""
        return {0: self.get_recurrent_state(0)}
