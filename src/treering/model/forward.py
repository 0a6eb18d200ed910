"""The tree forward: compute the log-prob and entropy of every edge of a forest.

N tokens
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from treering.arrays import Int64Array
from treering.attention import TreeLayout
from treering.attention.layout import to_device
from treering.errors import ConfigError, InputError, plural
from treering.families import IMAGE_FAMILIES
from treering.model.checks import check_no_hooks
from treering.model.context import is_active, tree_attention
from treering.model.edges import EdgeScores, edge_table, score_edges, scored_on_head
from treering.model.images import ImageFeatures, distinct_images, embedded
from treering.model.logits import EntropyOf
from treering.model.routers import check_routes, find_routers, replayed_routes
from treering.model.tree_model import TreeModel
from treering.tree.forest import Forest, padded_indices
from treering.tree.image_tokens import rotary_positions

FILLER = Forest.from_sequences([[0, 0]])
"""Forest for a rank without work, so that it gathers weights when the others do. It has two tokens, because compilers
make a separate graph for one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardOutput:
    """Per-token results of a tree forward, indexed like the forest's arrays; float32 or wider, differentiable.

    Attributes:
        logprobs: [N] log-prob of each token given its path, 0 at roots.
        entropy: [N] entropy in nats of the distribution that the token was scored with, 0 at roots.
        values: [N] the value head's output at the state before the token, 0 at roots; None without a value head.
    """

    logprobs: Float[Tensor, " N"]
    entropy: Float[Tensor, " N"]
    values: Float[Tensor, " N"] | None = None


def forward(
    model: nn.Module | TreeModel,
    forest: Forest,
    temperature: float = 1.0,
    *,
    wanted: NDArray[np.bool_] | None = None,
    entropy_of: EntropyOf = "all",
    value_head: nn.Module | None = None,
    backend: str = "auto",
) -> ForwardOutput:
    """Compute every token of a forest once and score its edges.

    Enters `tree_attention` unless the caller is already inside it. The outputs are differentiable. All ranks of a model
    sharded by `fully_shard` must call it equally often; an empty forest will do.

    Args:
        model: a supported Hugging Face causal language model, a PEFT model of one, or the `TreeModel` of either.
        forest: N tokens; an empty one gives empty results.
        temperature: divides the logits; must be positive.
        wanted: bool [N], tokens whose edge is scored; others get 0. None scores all.
        entropy_of: "all" or "none"; "none" saves two passes over the logits and gives zeros.
        value_head: maps hidden states [R, C] to one number each, such as `nn.Linear(C, 1)`.
        backend: attention backend; ignored inside `tree_attention`, which has already chosen one.

    Raises:
        InputError: a token id outside the model's vocabulary, a temperature that is not positive, or a mask of the
            wrong length.
        UnsupportedError: a model whose results would not be exact; names the reason.

    Example:
        >>> forest = Forest.from_sequences([[5, 6, 7], [5, 6, 8]])
        >>> out = forward(model, forest)                                   # doctest: +SKIP
        >>> out.logprobs[forest.path(1)]      # log-probs of [5, 6, 8]     # doctest: +SKIP
    """
    bound = TreeModel.of(model)
    check_no_hooks(bound)
    check_forest(forest, bound)
    check_temperature(temperature)
    if wanted is not None:
        wanted = np.asarray(wanted).astype(bool)
        if wanted.shape != (forest.num_tokens,):
            raise InputError(f"wanted must have one entry per token ({forest.num_tokens}), got shape {wanted.shape}")
    if entropy_of not in get_args(EntropyOf):
        raise ConfigError(f"entropy_of must be one of {', '.join(get_args(EntropyOf))}, got {entropy_of!r}")
    is_sharded = bound.shards is not None
    with nullcontext() if is_active(bound) else tree_attention(bound, backend):
        # Every rank of a sharded model must run a forward, even if its forest is empty.
        hidden = hidden_states(bound, FILLER if is_sharded and forest.num_tokens == 0 else forest)
    table = edge_table(forest, wanted)
    if bound.shards is not None and table.edges.size == 0:
        zeros = torch.zeros(forest.num_tokens, device=hidden.device) + bound.shards.zero(hidden)
        return ForwardOutput(logprobs=zeros, entropy=zeros, values=None if value_head is None else zeros)

    def score(head: nn.Module, rows: Tensor) -> EdgeScores:
        return score_edges(
            bound,
            rows,
            head,
            temperature=temperature,
            table=table,
            entropy_of=entropy_of,
            value_head=value_head,
        )

    scores = scored_on_head(bound, score, hidden)
    spread = partial(_spread, edges=table.edges, forest=forest, hidden=hidden)
    values = None if scores.values is None else spread(scores.values)
    return ForwardOutput(logprobs=spread(scores.logprobs), entropy=spread(scores.entropy), values=values)


def per_token_logps(
    model: nn.Module | TreeModel,
    forest: Forest,
    temperature: float = 1.0,
    *,
    indices: NDArray[np.integer[Any]] | None = None,
    mask: ArrayLike | None = None,
    backend: str = "auto",
) -> Float[Tensor, "B T"]:
    """Compute log-probs in the shape of a padded batch, as the losses of other trainers expect; differentiable.

    Each token of the forest is computed once. Entry t of a row is the log-prob of token t given the tokens before it, 0
    for the first token of a sequence and for padding; TRL's log-probs of C completion columns are the last C columns.

    Args:
        model: see `forward`.
        forest: B branches, the longest with T tokens.
        temperature: divides the logits; must be positive.
        indices: int [B, T], packed index of each token and -1 at padding, as returned by `Forest.from_padded`; None for
            one branch per row, padded on the right.
        mask: [B, T], 0 or False for entries that are not needed, such as a prompt's: they get 0, and take no time.
        backend: see `forward`.

    Raises:
        InputError: indices of another forest, or a mask of another shape; see `forward`.
        UnsupportedError: a model whose results would not be exact; names the reason.

    Example:
        >>> forest = Forest.from_sequences([[5, 6, 7], [5, 8]])
        >>> logps = per_token_logps(model, forest)              # [2, 3]    # doctest: +SKIP
        >>> loss = -(advantages[:, None] * logps).sum()                     # doctest: +SKIP
    """
    indices = _rows_of(forest) if indices is None else np.asarray(indices)
    if indices.ndim != 2 or indices.max(initial=-1) >= forest.num_tokens or indices.min(initial=-1) < -1:
        raise InputError(
            f"indices must be [rows, columns] of packed indices below {forest.num_tokens}, -1 at padding, got shape "
            f"{indices.shape} with {indices.max(initial=-1)}; take both from one Forest.from_padded"
        )
    wanted = indices >= 0
    if mask is not None:
        given = np.asarray(mask.cpu() if isinstance(mask, Tensor) else mask).astype(bool)
        if given.shape != indices.shape:
            raise InputError(f"mask must have the shape of indices, {indices.shape}, got {given.shape}")
        wanted &= given
    scored = np.zeros(forest.num_tokens, np.bool_)
    scored[indices[wanted]] = True
    logprobs = forward(model, forest, temperature, wanted=scored, entropy_of="none", backend=backend).logprobs
    rows = to_device(np.where(wanted, indices, 0), logprobs.device).long()
    return logprobs[rows].masked_fill(~to_device(wanted, logprobs.device), 0.0)


def _rows_of(forest: Forest) -> Int64Array:
    """Return int64 [B, T], the packed indices of each branch, -1 after its end."""
    real = np.arange(forest.branch_length.max(initial=0))[None] < forest.branch_length[:, None]
    return padded_indices(real, forest.paths()[0])


def _spread(scores: Tensor, *, edges: NDArray[np.int64], forest: Forest, hidden: Tensor) -> Float[Tensor, " N"]:
    """Write scores to the packed indices of their edges, 0 elsewhere; differentiable even without scored edges."""
    everywhere = torch.zeros(forest.num_tokens, dtype=scores.dtype, device=scores.device)
    if edges.size == 0:
        return everywhere + 0.0 * hidden[:1, :1].sum()
    return everywhere.index_copy(0, to_device(edges, scores.device), scores)


def hidden_states(
    model: TreeModel,
    forest: Forest,
    layout: TreeLayout | None = None,
    positions: NDArray[np.integer[Any]] | None = None,
) -> Float[Tensor, "N C"]:
    """Return the decoder's last hidden state of every token; call it inside `tree_attention`.

    Args:
        model: the model.
        forest: N tokens.
        layout: layout of a partition with its ancestors; None builds the layout of the forest.
        positions: positions of a partition, see `rotary_positions`; None uses those of the forest.
    """
    if forest.num_tokens == 0:
        weight = next(model.embedding.parameters())
        return torch.zeros(0, weight.shape[1], dtype=weight.dtype, device=model.device)
    if layout is None:
        layout = TreeLayout(forest, model.device, sees_whole_images=model.sees_whole_images)
    has_routes = forest.routed_experts is not None
    with replayed_routes(enumerate(find_routers(model).modules), layout) if has_routes else nullcontext():
        output = model.run(
            **decoder_inputs(model, forest, positions), use_cache=False, return_dict=True, tree_layout=layout
        )
    return output.last_hidden_state[0]  # type: ignore[no-any-return]


def with_features(model: TreeModel, forests: Sequence[Forest]) -> TreeModel:
    """Return the model with the features of all images of some forests, each computed once for all passes.

    Call `model.features.backward()` after the last backward; `model.features` is None without images.
    """
    images = distinct_images(forests)
    if model.vision is None or not images:
        return model
    return replace(model, features=ImageFeatures(model.vision, images, is_apart=True))


def without_gradients(model: TreeModel, forests: Sequence[Forest]) -> TreeModel:
    """Return the result of `with_features` for passes that need no gradients."""
    with torch.no_grad():
        return with_features(model, forests)


def decoder_inputs(
    model: TreeModel,
    forest: Forest,
    positions: NDArray[np.integer[Any]] | None = None,
    *,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Return a forest's token ids and positions as decoder inputs, with embeddings in place of ids if it has images.

    `device` is the device of the tokens; None uses the device on which the model computes.
    """
    device = model.device if device is None else device
    if positions is None:
        positions = rotary_positions(forest)
    at = to_device(positions, device).long()[..., None, :]
    if not forest.images:
        return {"input_ids": to_device(forest.tokens, device)[None].long(), "position_ids": at}
    features = model.features
    if features is None:
        assert model.vision is not None, "check_forest refuses images of a model of text"
        features = ImageFeatures(model.vision, forest.images, is_apart=False)
    return embedded(model.embedding, forest, features, device) | {"position_ids": at}


def check_forest(forest: Forest, model: TreeModel) -> None:
    """Check that `forest` is a Forest whose tokens are in the model's vocabulary, and its routes among its experts.

    Raises:
        InputError: names the token that is out of range; see also `check_routes`.
        UnsupportedError: routes for a model without experts.
    """
    if not isinstance(forest, Forest):
        raise InputError(f"expected a Forest, got {type(forest).__name__}; make one with Forest.from_sequences")
    if model.vision is not None:
        model.vision.check(forest)
    elif forest.images:
        raise InputError(
            f"the forest has {plural(len(forest.images), 'image')}, and model type {model.config.model_type!r} takes "
            f"text only; load a model that takes images ({', '.join(IMAGE_FAMILIES)})"
        )
    if forest.num_tokens and int(forest.tokens.max()) >= model.vocab_size:
        at = int(forest.tokens.argmax())
        raise InputError(
            f"token id {int(forest.tokens[at])} at packed index {at} is outside the model's vocabulary of "
            f"{model.vocab_size}; check that the tokenizer belongs to the model"
        )
    if forest.routed_experts is not None:
        check_routes(forest.routed_experts, model)


def check_temperature(temperature: float) -> None:
    """Check that a temperature is a positive, finite number.

    Raises:
        InputError: it is not.
    """
    is_number = isinstance(temperature, int | float | np.floating) and not isinstance(temperature, bool)
    if not (is_number and 0 < temperature < float("inf")):
        raise InputError(f"temperature must be a positive number, got {temperature!r}")
