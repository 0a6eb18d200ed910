"""Make a model's attention follow the forest, not the packed order, inside `tree_attention`.

`backward` and `forward` use it; `patch.py` is for the calls of other trainers. The patch is small and undone on exit:
the name of the attention implementation, one hook per layer that passes it the forest, and the checkpointing functions.
The layout reaches the layers as their `attention_mask`, so a recompute by any other attention implementation fails (see
`TreeLayout.__torch_function__`) instead of using a wrong mask.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig

from treering.attention import BACKENDS, AttentionShape, Backend, ScoreOptions, TreeLayout, attend, choose_backend
from treering.attention.dispatch import verify
from treering.attention.flash import attend_by_tables, prepare_flash
from treering.errors import StateError
from treering.model.checks import check_embedding_hooks, check_no_dropout
from treering.model.recurrence import routed
from treering.model.routers import find_routers, replayed_routes
from treering.model.tree_model import TreeModel

_PREFIX = "treering_"
_OWNER = "_tree_attention_owner"


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeContext:
    """State that a `tree_attention` block has set up.

    Attributes:
        backend: name of the attention backend.
        reason: why it was chosen, as text.
        prepare: builds a forest's tables before compiled layers run, so that they need no graph break; called by the
            decoder's hook, or by a caller of the decoder's forward without its hooks.
    """

    backend: Backend
    reason: str
    prepare: Callable[[TreeLayout], None]


@contextmanager
def tree_attention(model: nn.Module | TreeModel, backend: str = "auto") -> Iterator[TreeContext]:
    """Route a model's attention through the forest that `forward` gives it; restore the model on exit.

    Gradients of a forward stay exact after the block has exited, with Hugging Face's gradient checkpointing in both
    modes; any other recompute raises instead of using the wrong mask.

    Args:
        model: a Hugging Face causal language model of a supported family (`treering.families`), a PEFT model of
            one, or its `TreeModel`.
        backend: "auto", or a name from `treering.attention.BACKENDS`.

    Raises:
        UnsupportedError: a layer, head, position encoding, dropout or embedding hook that would not be exact; names it.
        ConfigError: an unknown backend.
        StateError: the model is already inside a `tree_attention` block.

    Example:
        >>> with tree_attention(model) as active:       # doctest: +SKIP
        ...     out = forward(model, forest)
        >>> active.backend                              # doctest: +SKIP
        'segments'
    """
    bound = TreeModel.of(model, calls_modules=True)
    check_no_dropout(bound)
    check_embedding_hooks(bound)
    sharded = None if bound.shards is None else bound.shards.dtype
    dtype = sharded or working_dtype(bound.decoder)
    choice = choose_backend(backend, attention_shape(bound.config, bound.device, dtype))
    name = _PREFIX + choice.backend
    for each in BACKENDS:
        AttentionInterface.register(_PREFIX + each, partial(_attention, backend=each))
    with ExitStack() as undo:
        undo.enter_context(_owned(bound))
        configs = _configs(bound)
        undo.enter_context(_implementation(configs, name))
        for layer in bound.layers:
            handle = layer.register_forward_pre_hook(_pass_layout, with_kwargs=True)
            undo.callback(handle.remove)
        prepare: Callable[[TreeLayout], None] = _prepare_nothing
        if choice.backend == "flash":
            shape = attention_shape(bound.config, bound.device, dtype)
            prepare = partial(_prepare_flash, model=bound, shape=shape)
            hook = partial(_prepare_first, prepare=prepare)
            undo.callback(bound.decoder.register_forward_pre_hook(hook, with_kwargs=True).remove)
        if bound.mixers:
            undo.enter_context(routed(bound.mixers))
        _route_checkpoints(bound, configs, name, undo)
        yield TreeContext(backend=choice.backend, reason=choice.reason, prepare=prepare)


@contextmanager
def without_cast_cache(device: torch.device) -> Iterator[None]:
    """Switch off autocast's cache of cast weights before torch 2.11.

    A pass after one without gradients would reuse its casts, and give these weights no gradient.
    """
    before = torch.is_autocast_cache_enabled()
    is_stale = torch.__version__ < "2.11" and torch.is_autocast_enabled(device.type)
    torch.set_autocast_cache_enabled(before and not is_stale)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def attention_shape(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> AttentionShape:
    """Return the heads of a model with weights of the given dtype, and the dtype in which its attention is computed.

    Example: under bfloat16 autocast a float32 model computes attention in bfloat16.
    """
    num_heads: int = config.num_attention_heads
    return AttentionShape(
        num_heads=num_heads,
        num_key_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        dtype=torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype,
        device=device,
        softcap=getattr(config, "attn_logit_softcapping", None),
    )


def working_dtype(module: nn.Module) -> torch.dtype:
    """Return the coarsest dtype of a module's unquantised weights; embeddings and norms may be in float32."""
    dtypes = {weight.dtype for weight in module.parameters() if weight.is_floating_point() and weight.itemsize > 1}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def is_active(model: TreeModel) -> bool:
    """Return whether the model is inside a `tree_attention` block of this thread.

    Raises:
        StateError: the model is inside a block of another thread, which could exit at any moment.
    """
    owner = model.decoder.__dict__.get(_OWNER)
    if owner is None:
        return False
    if owner.thread != threading.get_ident():
        raise StateError("the model is inside tree_attention in another thread; use one thread, or a copy of the model")
    return True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Owner:
    thread: int


@contextmanager
def _owned(model: TreeModel) -> Iterator[None]:
    """Mark the model as patched by this block; `setdefault` makes the claim atomic between threads."""
    mine = _Owner(thread=threading.get_ident())
    if model.decoder.__dict__.setdefault(_OWNER, mine) is not mine:
        raise StateError("the model is already inside tree_attention; leave that block before entering another one")
    try:
        yield
    finally:
        del model.decoder.__dict__[_OWNER]


def _configs(model: TreeModel) -> list[PreTrainedConfig]:
    """Return the model's configuration, and the copies in layers that PEFT's `layer_replication` made."""
    held = (module.__dict__.get("config") for layer in model.layers for module in layer.modules())
    copies = {id(config): config for config in held if isinstance(config, PreTrainedConfig)}
    return list({id(model.config): model.config, **copies}.values())


@contextmanager
def _implementation(configs: list[PreTrainedConfig], name: str) -> Iterator[None]:
    previous = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = name
    try:
        yield
    finally:
        for config, before in zip(configs, previous, strict=True):
            config._attn_implementation = before


def _pass_layout(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    kwargs = _with_layout_as_mask(kwargs)
    if not isinstance(kwargs.get("attention_mask"), TreeLayout):
        raise StateError("the model was called inside tree_attention without a forest; call treering.forward instead")
    return args, kwargs


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _prepare_first(
    decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, prepare: Callable[[TreeLayout], None]
) -> None:
    layout = kwargs.get("tree_layout")
    if isinstance(layout, TreeLayout):
        prepare(layout)


def _prepare_nothing(layout: TreeLayout) -> None:
    """Do nothing, for backends that compiled layers call outside their graphs."""


def _prepare_flash(layout: TreeLayout, *, model: TreeModel, shape: AttentionShape) -> None:
    mixers = [mixer for layer in model.layers for mixer in layer.modules() if hasattr(mixer, "layer_idx")]
    for window in {getattr(mixer, "sliding_window", None) for mixer in mixers}:
        has_sinks = any(hasattr(mixer, "sinks") for mixer in mixers)
        verify("flash", shape._replace(has_window=window is not None, has_sinks=has_sinks))
        prepare_flash(layout, window, shape.dtype, shape.head_size)


def _with_layout_as_mask(kwargs: dict[str, Any]) -> dict[str, Any]:
    kwargs = dict(kwargs)
    layout = kwargs.pop("tree_layout", None)
    return kwargs if layout is None else {**kwargs, "attention_mask": layout}


def _route_checkpoints(model: TreeModel, configs: list[PreTrainedConfig], name: str, undo: ExitStack) -> None:
    """Make checkpointed layers use tree attention in their recompute, even after the block has exited."""
    checkpointed = [layer for layer in model.layers if getattr(layer, "gradient_checkpointing", False)]
    for layer in checkpointed:
        original: Any = layer._gradient_checkpointing_func
        route = partial(_checkpoint_routed, original, configs, name, *_parts_within(layer, model))
        if layer._compiled_call_impl is not None and type(layer).__call__ is nn.Module.__call__:
            undo.callback(setattr, layer, "_compiled_call_impl", layer._compiled_call_impl)
            layer._compiled_call_impl = _checkpointed_around(layer, route)
            continue
        layer.__dict__["_gradient_checkpointing_func"] = route
        undo.callback(layer.__dict__.__setitem__, "_gradient_checkpointing_func", original)
    _route_wrappers(model, configs, name, undo)
    if checkpointed and not any(weight.requires_grad for weight in model.embedding.parameters()):
        # Reentrant checkpointing drops all gradients of a block whose inputs need none (frozen embeddings with LoRA).
        handle = model.embedding.register_forward_hook(_require_grad)
        undo.callback(handle.remove)


def _route_wrappers(model: TreeModel, configs: list[PreTrainedConfig], name: str, undo: ExitStack) -> None:
    """Do the same for torch's `checkpoint_wrapper`, by which Accelerate checkpoints the layers of FSDP2."""
    wrappers: list[Any] = [module for layer in model.layers for module in layer.modules()]
    for wrapper in wrappers:
        original = vars(wrapper).get("checkpoint_fn")
        if original is None:
            continue
        wrapper.checkpoint_fn = partial(_checkpoint_routed, original, configs, name, *_parts_within(wrapper, model))
        undo.callback(setattr, wrapper, "checkpoint_fn", original)


def _parts_within(module: nn.Module, model: TreeModel) -> tuple[list[nn.Module], list[tuple[int, nn.Module]]]:
    """Return the recurrent mixers inside a module, and its routers with their numbers among the model's."""
    inner = set(module.modules())
    routers = find_routers(model).modules if model.family.router else ()
    mixers = [mixer for mixer in model.mixers if mixer in inner]
    return mixers, [(number, router) for number, router in enumerate(routers) if router in inner]


def _checkpointed_around(layer: Any, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of a compiled layer that is checkpointed around its graphs.

    From transformers 5.23 on, a layer checkpoints inside its call, where torch would compile none of it.
    """
    compiled = layer._compiled_call_impl

    def unchecked(*args: Any, **kwargs: Any) -> Any:
        layer.gradient_checkpointing = False
        try:
            return compiled(*args, **kwargs)
        finally:
            layer.gradient_checkpointing = True

    return lambda *args, **kwargs: checkpoint(partial(unchecked, **kwargs), *args)


def _checkpoint_routed(
    checkpoint: Callable[..., Any],
    configs: list[PreTrainedConfig],
    name: str,
    mixers: list[nn.Module],
    routers: list[tuple[int, nn.Module]],
    block: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if isinstance(block, partial):
        # transformers before 5.23 checkpoints a layer with its hooks, and our hook is removed before the recompute.
        block = partial(block.func, *block.args, **_with_layout_as_mask(block.keywords))

    layout = {**getattr(block, "keywords", {}), **_with_layout_as_mask(kwargs)}.get("attention_mask")

    def on_forest(*block_args: Any, **block_kwargs: Any) -> Any:
        # A block without a layout fails in its own hook.
        replay = replayed_routes(routers, layout) if isinstance(layout, TreeLayout) else nullcontext()
        with _implementation(configs, name), routed(mixers), replay:
            return block(*block_args, **block_kwargs)

    # Without gradients there is nothing to recompute.
    return checkpoint(on_forest, *args, **kwargs) if torch.is_grad_enabled() else on_forest(*args, **kwargs)


def _require_grad(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.requires_grad_(True) if torch.is_grad_enabled() else output


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    backend: Backend,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention with Hugging Face's signature: [1, heads, N, D] in, [1, N, heads, D] out."""
    if backend == "flash" and torch.compiler.is_compiling() and isinstance(attention_mask, TreeLayout):
        window = options.get("sliding_window")
        if window in attention_mask.prepared:
            tables = attention_mask.prepared[window]
            out = attend_by_tables(
                query.to(value.dtype), key.to(value.dtype), value, options.get("s_aux"), tables,
                scale=options["scaling"], softcap=options.get("softcap"),
            )  # fmt: skip
            return out.transpose(1, 2), None
    result: tuple[Tensor, None] = _attention_outside_graphs(
        module, query, key, value, attention_mask, backend=backend, **options
    )
    return result


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attention_outside_graphs(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    scaling: float,
    backend: Backend,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **host_options: Any,
) -> tuple[Tensor, None]:
    """Compute attention by any backend; compiled layers call it outside their graph.

    `host_options` are passed to every implementation and ignored here (position ids, no dropout); options that would
    change the result are refused on entry of the context.
    """
    if not isinstance(attention_mask, TreeLayout):
        raise StateError(
            "a model outside tree_attention shares its configuration object with one inside; give each model its own, "
            "with copy.deepcopy(config)"
        )
    # Under autocast, norms and rotations leave queries and keys in float32 while values are bfloat16.
    query, key = query.to(value.dtype), key.to(value.dtype)
    layer: Any = module.layer_idx
    options = ScoreOptions(scale=scaling, window=sliding_window, softcap=softcap)
    out = attend(query, key, value, layout=attention_mask, options=options, sinks=s_aux, backend=backend, layer=layer)
    return out.transpose(1, 2), None
