"""Run a recurrent layer along a forest: patch its `forward` to make the calls that `recurrence_calls` lists.

The layer itself stays Hugging Face's: it is called on rows of tokens with our cache (`CallCache`), as generation does
to continue several texts. Rows of different lengths share a call because gates are closed at padding: every token
updates the state by a step that its own gates choose, with Gated DeltaNet a decay and a learning rate, with Mamba-2 a
time step. Both are softplus or sigmoid of a projection; if that is very negative, the step is exactly zero.

    N tokens   C hidden size   R boundary tokens   B rows   L tokens of the longest   D channels of the convolution
    K its kernel size
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from treering.attention import TreeLayout
from treering.attention.gateway import Boundary, StateGateway, States
from treering.attention.layout import to_device
from treering.errors import StateError, UnsupportedError
from treering.model.recurrence_calls import RowCall, calls_of

Mixer = Callable[..., Tensor]


@contextmanager
def routed(mixers: Sequence[nn.Module]) -> Iterator[None]:
    """Make mixers follow the forest passed as `attention_mask`, inside the context; restore them on exit.

    Example:
        >>> with routed([layer.linear_attn for layer in layers]):          # doctest: +SKIP
        ...     out = decoder(..., attention_mask=layout)
    """
    with ExitStack() as undo:
        for mixer in mixers:
            own = mixer.__dict__.get("forward")
            if isinstance(own, _Routed):
                continue
            gates_of(mixer)
            mixer.__dict__["forward"] = _Routed(_forward, mixer, mixer.forward)
            undo.callback(_restore, mixer, own)
        yield


class _Routed(partial[Tensor]):
    """Patched forward of a mixer; the type prevents patching twice when a layer is recomputed inside the block."""


def _restore(mixer: nn.Module, own: object) -> None:
    if own is None:
        del mixer.__dict__["forward"]
    else:
        mixer.__dict__["forward"] = own


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forward(
    mixer: nn.Module,
    original: Mixer,
    hidden_states: Float[Tensor, "1 N C"],
    cache: object = None,
    cache_params: object = None,
    attention_mask: object = None,
    **options: Any,
) -> Float[Tensor, "1 N C"]:
    """Run a mixer's forward on a forest: [1, N, C] in packed order in and out."""
    if not isinstance(attention_mask, TreeLayout):
        raise StateError("a recurrent layer was called inside tree_attention without a forest; use treering.forward")
    layer: Any = mixer.layer_idx
    return run_on_forest(partial(original, **options), mixer, hidden_states[0], layout=attention_mask, layer=layer)[
        None
    ]


def run_on_forest(
    original: Mixer, mixer: nn.Module, hidden: Float[Tensor, "N C"], *, layout: TreeLayout, layer: int
) -> Float[Tensor, "N C"]:
    """Return the mixer's output for every token given its own path; exchange states at the forest's boundary."""
    calls, boundary = calls_of(layout), layout.boundary
    gateway = None if boundary is None else boundary.gateway
    above = None if boundary is None else _received(boundary, layer, layout.device)
    name = _name_of_cache(mixer)
    outputs: list[Tensor] = []
    kept: list[States] = []
    for level in calls.levels:
        ends: list[States] = []
        for call in level:
            cache = CallCache(_started(above, call))
            with closed_gates(mixer, call.padding):
                rows = hidden.index_select(0, call.tokens.reshape(-1)).reshape(*call.tokens.shape, -1)
                out = original(hidden_states=rows, attention_mask=None, **{name: cache})
            outputs.append(out.reshape(-1, out.shape[-1]))
            if call.kept.numel():
                ends.append(cache.ends(call.kept, call.length))
        if gateway is not None:
            kept += ends
        above = _joined(ends) if ends else None
    result = torch.cat(outputs).index_select(0, calls.source)
    if gateway is None:
        return result
    states = States(*(part.index_select(0, calls.left) for part in _joined(kept)))
    gateway.export(layer, states)
    return _ExportStates.apply(result, *states, gateway, layer)  # type: ignore[no-any-return, no-untyped-call]


def _name_of_cache(mixer: nn.Module) -> str:
    """Return the name of a mixer's cache argument: transformers 5.24 ignores the older name."""
    return "cache" if "cache" in inspect.signature(type(mixer).forward).parameters else "cache_params"


def _joined(states: list[States]) -> States:
    if len(states) == 1:
        return states[0]
    return States(*(torch.cat(parts) for parts in zip(*states, strict=True)))


def _started(above: States | None, call: RowCall) -> States | None:
    """Return the initial state of each row of a call; None if all rows start at the top of a tree."""
    return None if above is None else States(*(part.index_select(0, call.start) for part in above))


def _received(boundary: Boundary, layer: int, device: torch.device) -> States | None:
    """Return the states that a partition starts from, as leaves whose gradients are added to the gateway above."""
    if boundary.above is None or boundary.slots.size == 0:
        return None
    gateway, slots = boundary.above, to_device(boundary.slots, device)
    states = States(*(part.index_select(0, slots) for part in gateway.read(layer)))
    if torch.is_grad_enabled():
        for name, part in zip(States._fields, states, strict=True):
            part.requires_grad_(True).register_hook(  # type: ignore[no-untyped-call]
                partial(gateway.add_gradient, layer, name, slots)
            )
    return states


class _ExportStates(torch.autograd.Function):
    """Return a layer's output unchanged; in the backward, add the gradients of states that partitions below used.

    It is attached to the output, which always gets a gradient, unlike a state that only other partitions read.
    """

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, recurrent: Tensor, context: Tensor, gateway: StateGateway, layer: int
    ) -> Tensor:
        ctx.gateway, ctx.layer, ctx.dtypes = gateway, layer, (recurrent.dtype, context.dtype)
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        below = ctx.gateway.take_gradient(ctx.layer)
        if below is None:
            return (*grads, None, None, None, None)
        recurrent, context = (part.to(dtype) for part, dtype in zip(below, ctx.dtypes, strict=True))
        return (*grads, recurrent, context, None, None)


class CallCache:
    """Cache of one call of one layer.

    Example: for rows of 4 tokens and K = 4, `update_conv_state` returns 7 columns, 3 of context and 4 new, and the
        mixer
    drops the first 3 outputs.
    """

    record_past = True
    """Makes the layer not update states in place."""

    def __init__(self, states: States | None) -> None:
        """Start with `states`, the initial state of each row; None if all start from zero."""
        self._given = states
        self._inputs: Tensor | None = None
        self._num_new = 0
        self._last: Tensor | None = None

    def ends(self, rows: Tensor, length: Tensor) -> States:
        """Return the states after the last token of some rows; call it after the layer has run.

        Args:
            rows: int64, indices of rows of the call.
            length: int64 [B] number of tokens of each row of the call.
        """
        assert self._inputs is not None, "the layer has not passed its convolution's inputs"
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
        """Return the convolution's inputs [B, D, L] with their context in front: [B, D, K - 1 + L]."""
        self._num_new = inputs.shape[-1]
        if self._given is None:
            self._inputs = F.pad(inputs, (conv_kernel_size - 1, 0))
        else:
            self._inputs = torch.cat([self._given.context.to(inputs.dtype), inputs], -1)
        return self._inputs

    def update_recurrent_state(self, states: Tensor, layer_idx: int, state_idx: int = 0, **options: object) -> Tensor:
        """Capture the states after the last column of each row."""
        self._last = states
        return states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return None: contexts are part of `update_conv_state`, and only generation reads them here."""
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the initial states of the rows."""
        return None if self._given is None else self._given.recurrent

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether the rows have initial states."""
        return self._given is not None

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return True, because states must not be updated in place."""
        return True

    @property
    def layers(self) -> "CallCache":
        """Cache of every layer: this object."""
        return self

    def __getitem__(self, layer_idx: int) -> "CallCache":
        return self

    @property
    def conv_states(self) -> dict[int, Tensor | None]:
        """None for each layer; see `get_conv_state`."""
        return {0: None}

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        """Initial states of the rows."""
        return {0: self.get_recurrent_state(0)}


CLOSED = -1e4
"""Value whose softplus and sigmoid, plus any bias of a trained model, are exactly 0 in float64 and narrower."""


class Gate(NamedTuple):
    """Projection whose last `num_columns` outputs (None: all) decide how far a token moves the state."""

    projection: nn.Module
    num_columns: int | None


def gates_of(mixer: nn.Module) -> list[Gate]:
    """Return the gates of a mixer.

    Raises:
        UnsupportedError: a mixer whose gates are unknown or cannot be closed; names it.
    """
    name = type(mixer).__name__
    limit: Any = getattr(mixer, "time_step_limit", (0.0, float("inf")))
    if limit[0] > 0:
        raise UnsupportedError(
            f"{name} has time_step_limit={tuple(limit)}, and with a lower bound above 0 padding would move the state; "
            "set it to (0.0, inf) in the config"
        )
    if hasattr(mixer, "in_proj_ba"):
        return [Gate(mixer.in_proj_ba, None)]  # type: ignore[arg-type]
    if hasattr(mixer, "in_proj_a") and hasattr(mixer, "in_proj_b"):
        return [Gate(mixer.in_proj_a, None), Gate(mixer.in_proj_b, None)]  # type: ignore[arg-type]
    if hasattr(mixer, "in_proj") and hasattr(mixer, "dt_bias"):
        return [Gate(mixer.in_proj, mixer.dt_bias.shape[0])]  # type: ignore[arg-type, index]
    raise UnsupportedError(f"recurrent layer {name} is not supported; supported are Gated DeltaNet and Mamba-2 layers")


@contextmanager
def closed_gates(mixer: nn.Module, padding: Tensor | None) -> Iterator[None]:
    """Close a mixer's gates at padding (bool [B, L]) inside the context; None closes nothing.

    Example: with the rows [5, 6, 7] and [5, padding, padding], the second ends in the state after its 5.
    """
    if padding is None:
        yield
        return
    with ExitStack() as undo:
        for gate in gates_of(mixer):
            handle = gate.projection.register_forward_hook(partial(_close, padding, gate.num_columns))
            undo.callback(handle.remove)
        yield


def _close(
    padding: Tensor, num_columns: int | None, module: nn.Module, args: tuple[Any, ...], output: Tensor
) -> Tensor:
    """Return a forward hook that overwrites gates at padding."""
    width = output.shape[-1]
    is_gate = torch.arange(width, device=output.device) >= width - (num_columns or width)
    return output.masked_fill(padding[..., None] & is_gate, CLOSED)
