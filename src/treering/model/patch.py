"""Run a model's decoder and fused head on trees whenever they get a padded batch, without changing the caller.

A trainer calls `model(input_ids, attention_mask, labels)` with a batch [B, T]. The patched decoder merges the rows into
a forest, computes each distinct token once, and returns hidden states in the shape of the batch. So losses, logged
metrics and every outer wrapper (DDP, autocast, PEFT) work as before. A fused head, such as TRL's, scores each token's
state once with each label that follows it.

    B rows   T columns   N distinct tokens   E distinct pairs of a token and its label   C hidden size
    L labels of the batch
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from treering.attention import TreeLayout
from treering.attention.layout import to_device
from treering.errors import InputError, StateError, UnsupportedError
from treering.model.checks import check_embedding_hooks, check_no_dropout
from treering.model.context import tree_attention
from treering.model.forward import check_forest, decoder_inputs
from treering.model.images import OF_IMAGES, images_of_batch
from treering.model.layers import compiled_layers
from treering.model.tree_model import TreeModel
from treering.ranks.group import check_images_together
from treering.tree.forest import Forest, split_padded

When = Literal["training", "always"]
"""Calls that run on trees: those in training mode, or all. Generation with a cache never does."""

IGNORED_LABEL = -100
_PACKING = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "cache_position"})
"""Arguments that repeat what position ids say about packed sequences."""
_REFUSED = MappingProxyType(
    {
        "inputs_embeds": "merging sequences needs token ids",
        "output_hidden_states": "only the last layer's states go back to the batch",
        "output_attentions": "attention weights of a forest do not fit the shape of a batch",
        "token_type_ids": "types may differ between equal tokens",
    }
)
_CACHES = frozenset({"cache", "past_key_values"})
"""Arguments with a decoder's cache: transformers has "cache" since 5.24."""
_OWN = frozenset({"input_ids", "attention_mask", "position_ids", "use_cache", "return_dict"}) | _CACHES
"""Arguments that the patch sets itself when it calls the decoder."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Batch:
    """Padded batch as a forest."""

    forest: Forest
    indices: NDArray[np.int64]
    """int64 [B, T], packed index of each token, -1 at padding."""


@dataclass(slots=True, kw_only=True, eq=False)
class _FusedBatch:
    """Batch whose states a fused head scores, in one or several calls."""

    batch: _Batch
    rows: Tensor
    """int64, indices of the states that the decoder's next call returns."""
    output: Any = None
    """Output of the decoder, with states [N, C]; None before it has run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCounts:
    """Counts of patched calls since the counts were last taken.

    Example: two rows of 3 tokens that share 2 are 6 flat tokens and 4 computed tokens.
    """

    num_calls: int = 0
    """Number of calls that ran on a forest."""
    num_flat_tokens: int = 0
    """Real tokens of their batches."""
    num_tokens: int = 0
    """Distinct tokens, each computed once."""

    @property
    def token_ratio(self) -> float:
        """Flat tokens per computed token, an upper bound on the speedup; 1.0 without calls."""
        return self.num_flat_tokens / self.num_tokens if self.num_tokens else 1.0

    def with_call(self, forest: Forest) -> "TreeCounts":
        """Return these counts plus a call on the forest."""
        return TreeCounts(
            num_calls=self.num_calls + 1,
            num_flat_tokens=self.num_flat_tokens + forest.num_branch_tokens,
            num_tokens=self.num_tokens + forest.num_tokens,
        )


class TreePatch:
    """Patched model; `undo` restores it."""

    def __init__(
        self,
        model: nn.Module | TreeModel,
        *,
        backend: str = "auto",
        when: When = "training",
        mode_of: nn.Module | None = None,
    ) -> None:
        """Patch a model; see `patch`."""
        bound = TreeModel.of(model, calls_modules=True)
        self._compile = bound.compile_part
        # The decoder is called inside wrappers such as PEFT's, so it is bound to the model without them.
        self._model = TreeModel.of(bound.causal_lm, calls_modules=True)
        check_no_dropout(bound)
        check_embedding_hooks(bound)
        self._vision = bound.vision
        # In an image model, a module around the decoder gets the batch and embeds its images.
        self._decoder: Any = bound.decoder if bound.vision is None else bound.vision.model
        self._vocab_size = bound.vocab_size
        for module in (bound.causal_lm, self._decoder):
            if is_replaced(module):
                raise StateError(
                    "the model is already patched to run on trees; undo that patch before making another one"
                )
        self._backend = backend
        self._when = when
        self._mode_of: nn.Module = self._decoder if mode_of is None else mode_of
        self._is_flat = False
        self._scored: _FusedBatch | None = None
        self._counts = TreeCounts()
        self._layers: Callable[[], AbstractContextManager[None]] = nullcontext
        self._undo = [
            replace_forward(self._decoder, self._run_decoder),
            replace_forward(bound.causal_lm, self._run_head),
        ]

    def undo(self) -> None:
        """Restore the model; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def take_counts(self) -> TreeCounts:
        """Return the counts since the last call of this method."""
        counts, self._counts = self._counts, TreeCounts()
        return counts

    def compile_layers(self, **options: Any) -> None:
        """Compile the layers for calls on trees; forests of all shapes run the same graphs.

        Args:
            options: options of `torch.compile`, such as its backend and mode.
        """
        self._layers = compiled_layers(TreeModel.of(self._model, calls_modules=True).layers, **options)

    @contextmanager
    def flat(self) -> Iterator[None]:
        """Run the stock model, without trees, inside the context."""
        before, self._is_flat = self._is_flat, True
        try:
            yield
        finally:
            self._is_flat = before

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count calls inside the context."""
        before = self._counts
        try:
            yield
        finally:
            self._counts = before

    # torch.compile cannot trace the merge into a forest. If the model was compiled, its decoder or layers still are.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_decoder(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        scored = self._scored
        if scored is None:
            batch = self._batch(args, kwargs)
            if batch is None:
                return original(*args, **kwargs)
            output = self._on_forest(original, batch, kwargs)
            output["last_hidden_state"] = _spread(output.last_hidden_state[0], batch.indices)
            return output
        if scored.output is None:
            scored.output = self._on_forest(original, scored.batch, kwargs)
        output = copy(scored.output)
        output["last_hidden_state"] = output.last_hidden_state[0].index_select(0, scored.rows)[None]
        return output

    def _on_forest(self, original: Callable[..., Any], batch: _Batch, kwargs: Mapping[str, Any]) -> Any:
        """Return the decoder's output with states [1, N, C], and router logits in the shape of the batch."""
        forest = batch.forest
        # A trainer may have sharded or moved the model since the patch, or given it other adapters.
        self._model = bound = TreeModel.of(self._model, calls_modules=True)
        if self._vision is not None:
            check_forest(forest, bound)
            if bound.shards is not None:
                check_images_together(has_images=bool(forest.images))
            original = bound.decoder
        own = _OWN | _PACKING | _REFUSED.keys() | OF_IMAGES
        options = {name: value for name, value in kwargs.items() if name not in own}
        device = next(self._decoder.parameters()).device
        layout = TreeLayout(forest, device, sees_whole_images=bound.sees_whole_images)
        with self._layers(), tree_attention(bound, self._backend) as active:
            active.prepare(layout)
            output = self._compile(original)(
                **decoder_inputs(bound, forest, device=device),
                tree_layout=layout,
                use_cache=False,
                return_dict=True,
                **options,
            )
        if self._vision is not None:
            # The model's head also reads these fields, whose names changed in transformers 5.24.
            output.image_hidden_states = output.image_outputs = output.video_outputs = None
        if getattr(output, "router_logits", None) is not None:
            layers: Any = output.router_logits
            output["router_logits"] = tuple(_spread(layer, batch.indices).flatten(0, 1) for layer in layers)
        self._counts = self._counts.with_call(forest)
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_head(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Score each distinct pair of a token and its label once, if the caller asks for a fused head."""
        labels: Any = kwargs.get("labels")
        if labels is not None and not self._stays_flat(kwargs):
            _check_labels(labels, kwargs.get("attention_mask"))
        batch = self._batch(args, kwargs) if kwargs.get("fused_lm_head") and labels is not None else None
        if batch is None:
            return original(*args, **kwargs)
        mask = labels[:, 1:] != IGNORED_LABEL
        pairs = label_pairs(batch.indices, labels, mask)
        if pairs.rows.numel() == 0:
            return original(*args, **kwargs)
        num_items = kwargs.get("num_items_in_batch")
        given = {**kwargs, "labels": None, "num_items_in_batch": mask.sum() if num_items is None else num_items}
        outputs = []
        self._scored = _FusedBatch(batch=batch, rows=pairs.rows)
        try:
            for part in parts_of(pairs, self._vocab_size):
                self._scored.rows = pairs.rows[part]
                outputs.append(original(*args, **given, shift_labels=pairs.labels[None, part]))
                # The loss of routers covers the whole batch, and the first part contains it.
                given["output_router_logits"] = False
        finally:
            self._scored = None
        return as_batch(outputs, pairs, mask, given["num_items_in_batch"])

    def _stays_flat(self, kwargs: Mapping[str, Any]) -> bool:
        is_generating = any(kwargs.get(name) is not None for name in _CACHES) or kwargs.get("use_cache")
        is_evaluating = self._when == "training" and not self._mode_of.training
        return bool(self._is_flat or "tree_layout" in kwargs or is_generating or is_evaluating)

    def _batch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "_Batch | None":
        """Return the forest of a call; None for a call that stays flat."""
        ids = args[0] if args else kwargs.get("input_ids")
        if self._stays_flat(kwargs):
            return None
        for name, why in _REFUSED.items():
            if self._vision is not None and name == "token_type_ids":
                continue
            if kwargs.get(name) is not None and kwargs[name] is not False:
                raise UnsupportedError(f"a model that runs on trees does not support {name}: {why}; remove it")
        if len(args) > 1 or ids is None:
            raise UnsupportedError(
                "a model that runs on trees needs input_ids; pass it, and every other argument by name"
            )
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
            raise UnsupportedError(
                "a model that runs on trees builds its own attention mask and accepts only a padding mask, [rows, "
                "columns]; remove attention_mask, or set it to 1 for tokens and 0 for padding"
            )
        given: list[Any] = [None if x is None else x.cpu() for x in (ids, mask, positions)]
        images = None
        if self._vision is not None:
            images = images_of_batch(self._vision, split_padded(given[0], given[1], None).sequences, kwargs)
        forest, indices = Forest.from_padded(given[0], given[1], given[2], images)
        _check_bounds(kwargs.get("cu_seq_lens_q"), forest)
        return _Batch(forest=forest, indices=indices)


def patch(
    model: nn.Module | TreeModel, *, backend: str = "auto", when: When = "training", mode_of: nn.Module | None = None
) -> TreePatch:
    """Make a model run on trees from its next call on, for any trainer with padded batches.

    A prefix that rows of a batch share is computed once, forward and backward, and every output has the shape of the
    batch. Padding may be on either side; a row may pack several sequences, marked by position ids. Hidden states at
    padding are 0. A model with TRL's fused head scores each distinct pair of token and label once.

    Gradients are exact with DDP around the model, autocast, gradient checkpointing and PEFT. Patch the model before DDP
    wraps it.

    Args:
        model: a supported Hugging Face causal language model, or a PEFT model of one.
        backend: see `tree_attention`.
        when: see `When`.
        mode_of: model whose training mode `when` refers to; for a reference, the policy. None: `model` itself.

    Raises:
        UnsupportedError: a model whose results would not be exact; names the reason.
        StateError: the model is patched already.

    Example:
        >>> patched = patch(model)                                          # doctest: +SKIP
        >>> loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss        # doctest: +SKIP
        >>> patched.take_counts().token_ratio                               # doctest: +SKIP
        3.2
    """
    return TreePatch(model, backend=backend, when=when, mode_of=mode_of)


def _check_bounds(bounds: Tensor | None, forest: Forest) -> None:
    """Refuse packed sequences that position ids do not separate, and that would attend to each other."""
    num_sequences = forest.num_branches if bounds is None else int((bounds.diff() > 0).sum())
    if num_sequences != forest.num_branches:
        raise InputError(
            f"cu_seq_lens_q has {num_sequences} sequences, and position_ids have {forest.num_branches}; pass "
            "position_ids that begin at 0 in each sequence"
        )


def _check_labels(labels: Tensor, mask: Any) -> None:
    """Refuse labels that the stock model would score from the state of padding, which a tree does not compute."""
    if not isinstance(mask, Tensor) or mask.shape != labels.shape:
        return
    wrong = (labels[:, 1:] != IGNORED_LABEL) & (mask[:, :-1] == 0)
    if bool(wrong.any()):
        row, column = (int(i) for i in wrong.nonzero()[0])
        raise InputError(
            f"a label needs a token before it, and labels[{row}, {column + 1}] follows padding, like the first "
            "token of a left-padded row; set it to -100"
        )


def _spread(values: Float[Tensor, "N C"], indices: NDArray[np.int64]) -> Float[Tensor, "B T C"]:
    """Return values of packed tokens in the shape of the batch, 0 at padding."""
    at = to_device(indices, values.device)
    back = values.index_select(0, at.clamp(min=0).flatten()).reshape(*at.shape, -1)
    return back if bool((indices >= 0).all()) else back.masked_fill((at < 0).unsqueeze(-1), 0.0)


MAX_CPU_LOGITS = 2**23
"""Most logits of one call of the head on CPU: 32 MiB in float32. Larger temporaries are allocated on fresh pages each
time: for 768 pairs and a vocabulary of 32,000 TRL's head took 1.65 s with them, 0.95 s without (one thread)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabelPairs:
    """Distinct pairs of a token and its label."""

    rows: Tensor
    """int64 [E], packed indices of the tokens whose states are scored."""
    labels: Tensor
    """int64 [E], the labels."""
    inverse: Tensor
    """int64 [L], for each label of the batch in row-major order, the index of its pair."""


def label_pairs(indices: NDArray[np.int64], labels: Tensor, mask: Tensor) -> LabelPairs:
    """Return the distinct pairs of a batch.

    Args:
        indices: int64 [B, T], packed index of each token, -1 at padding.
        labels: int64 [B, T], not shifted.
        mask: bool [B, T - 1], True where a label of `labels[:, 1:]` counts.

    Raises:
        InputError: a label without a token before it.

    Example: two equal rows have the same pairs as one of them.
    """
    wanted = mask.cpu().numpy()
    rows = indices[:, :-1][wanted]
    if (rows < 0).any():
        raise InputError("a label needs a token before it, and one follows padding; set labels there to -100")
    targets = labels[:, 1:].cpu().numpy()[wanted].astype(np.int64)
    keys, inverse = np.unique(np.stack([rows, targets]), axis=1, return_inverse=True)
    device = labels.device
    return LabelPairs(
        rows=to_device(keys[0], device),
        labels=to_device(keys[1], device),
        inverse=to_device(inverse.reshape(-1), device),
    )


def parts_of(pairs: LabelPairs, vocab_size: int) -> list[slice]:
    """Split pairs into ranges that the head scores in one call each: on CPU at most `MAX_CPU_LOGITS` logits.

    Example: 1,000 pairs with a vocabulary of 32,000 take 4 calls of at most 262 pairs.
    """
    num_pairs = pairs.rows.numel()
    size = max(1, MAX_CPU_LOGITS // vocab_size) if pairs.rows.device.type == "cpu" else num_pairs
    return [slice(start, start + size) for start in range(0, num_pairs, size)]


def as_batch(outputs: Sequence[Any], pairs: LabelPairs, mask: Tensor, num_items: Any) -> Any:
    """Combine a fused head's outputs for E pairs into one for the batch: fields per label, and the loss over all.

    Args:
        outputs: records with `loss`, `log_probs` [1, pairs of the part] and others, in order.
        pairs: the pairs that were scored.
        mask: bool [B, T - 1], as for `label_pairs`.
        num_items: number by which the head divides its loss.

    Raises:
        UnsupportedError: an output is not such a record.
    """
    output = outputs[0]
    names = [field.name for field in fields(output)] if is_dataclass(output) else []
    if not {"loss", "log_probs"}.issubset(names):
        raise UnsupportedError(
            f"a fused head must return a record, as TRL's does, got {type(output).__name__}; update trl"
        )
    if len(outputs) > 1:
        output = _joined(outputs, names)
    spread: dict[str, Any] = {}
    for name in names:
        value = getattr(output, name)
        if isinstance(value, Tensor) and value.shape == (1, pairs.rows.numel()):
            each = value[0].index_select(0, pairs.inverse)
            spread[name] = value.new_zeros(mask.shape).masked_scatter(mask, each)
    # The rest of the loss, such as that of routers, already covers the whole batch.
    rest = output.loss + output.log_probs.sum() / num_items
    return replace(output, **spread | {"label_mask": mask, "loss": rest - spread["log_probs"].sum() / num_items})


def _joined(outputs: Sequence[Any], names: list[str]) -> Any:
    """Join consecutive records: values per pair in order, the sum of the losses, other fields of the first."""
    first = outputs[0]
    per_pair = [name for name in names if isinstance(value := getattr(first, name), Tensor) and value.ndim == 2]
    joined = {name: torch.cat([getattr(output, name) for output in outputs], dim=1) for name in per_pair}
    losses: list[Tensor] = [output.loss for output in outputs]
    return replace(first, **joined | {"loss": torch.stack(losses).sum()})


_MARK = "_treering_patch"


def is_replaced(module: Any) -> bool:
    """Return whether a replacement by `replace_forward` is active on the module, under any wrappers of its forward."""
    forward = module.forward
    while forward is not None:
        if getattr(forward, _MARK, False):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def replace_forward(module: Any, run: Callable[..., Any]) -> Callable[[], None]:
    """Replace a module's forward; return a function that restores it.

    If a library has wrapped the replacement, as Accelerate does for autocast, the wrapper stays and calls the original.

    Args:
        module: module whose `forward` is replaced.
        run: called with the original forward, then the arguments of each call.

    Example: with `run = lambda original, x: original(x) + 1` a linear layer's output is one larger.
    """
    original, had_own = module.forward, "forward" in module.__dict__

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return run(original, *args, **kwargs) if getattr(forward, _MARK) else original(*args, **kwargs)

    setattr(forward, _MARK, True)
    module.forward = forward

    def restore() -> None:
        setattr(forward, _MARK, False)
        if module.__dict__.get("forward") is not forward:
            return
        if had_own:
            module.forward = original
        else:
            del module.forward

    return restore
