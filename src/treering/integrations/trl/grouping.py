"""Choose which rows of a trainer share a micro-batch, and bound the sharing that follows.

TRL shuffles a generation batch before splitting it, so a prompt's rollouts fall into different micro-batches. Here
groups follow the shuffle by their first row, and rows inside a group keep the shuffle's order. The order therefore
depends only on TRL's own seed, and no extra random number is drawn.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler
from trl.data_utils import prepare_multimodal_messages
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from treering.errors import ConfigError
from treering.integrations.trl.trl_trainers import ROLLOUT_TRAINERS, Overrides
from treering.tree.forest import Forest

_OTHER_ROWS = "this changes which rows an optimizer step sees (group_batches=False keeps the trainer's order)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How rows are distributed over micro-batches."""

    words: str
    """Text for the line printed to the user."""
    bound: float | None
    """Ratio of the stock path's tokens to distinct tokens; None if unknown before training."""


class TaskSampler(Sampler[int]):
    """Sampler of row indices: batches of `batch_size` neighbours in token order, with the batches in random order.

    Rows are sorted by their tokens, so rows of a task are adjacent, closest to those that they share most with. Every
    epoch has the same batches in a different order; the short batch comes last.
    """

    def __init__(
        self,
        sequences: Sequence[Sequence[int] | NDArray[np.uint8]],
        batch_size: int,
        seed: int,
        epoch: Callable[[], int],
    ) -> None:
        """Sort the rows.

        Args:
            sequences: token ids of each row, or other numbers that share a prefix where rows do.
            batch_size: rows per micro-batch.
            seed: seeds the order of every epoch, with its number.
            epoch: returns the number of the epoch that begins.
        """
        # Big-endian bytes compare as the numbers do.
        keys = [np.asarray(tokens, ">u4").tobytes() for tokens in sequences]
        self._sorted = np.array(sorted(range(len(keys)), key=keys.__getitem__), np.intp)
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[int]:
        yield from self.order(self._epoch()).tolist()

    def order(self, epoch: int) -> NDArray[np.intp]:
        """Return the row indices of an epoch."""
        rows, size = self._sorted, self._batch_size
        num_full = len(rows) // size
        batches = np.random.default_rng((self._seed, epoch)).permutation(num_full)
        shuffled = rows[: num_full * size].reshape(num_full, size)[batches]
        return np.concatenate([shuffled.reshape(-1), rows[num_full * size :]])


def keep_together(trainer: Any, kind: str, overrides: Overrides, *, is_on: bool | None) -> Batching:
    """Make a trainer keep groups or tasks together.

    Args:
        trainer: a TRL trainer.
        kind: its entry of `TRAINERS`.
        overrides: records the replaced methods.
        is_on: whether to replace anything; if False, only the bound is counted. None: on unless it would change
            gradients of rollouts.

    Raises:
        ConfigError: the dataset has no tokens to sort by, or the user chose another order.
    """
    if kind in ROLLOUT_TRAINERS:
        return _groups(trainer, overrides, is_on=is_on)
    if kind == "DistillationTrainer":
        return Batching(words="rows keep their order", bound=None)
    if kind == "KTOTrainer" and trainer.args.train_sampling_strategy == "sequential":
        # Its KL term pairs each row with its neighbour of a fixed micro-batch.
        words = "rows keep the dataset's order, as KTO's KL pairs need: sort the dataset by task to share more"
        return Batching(words=words, bound=None)
    return _tasks(trainer, overrides, is_on=is_on is not False)


def _changed_by_groups(trainer: Any) -> str:
    """Return what in the gradient depends on which rollouts share a micro-batch; empty if nothing does."""
    args = trainer.args
    found = {
        "a loss of its own": not trainer._compute_loss.__module__.startswith("trl."),
        "loss_type='bnpo'": getattr(trainer, "loss_type", None) == "bnpo",
        "top_entropy_quantile": getattr(trainer, "top_entropy_quantile", 1.0) < 1.0,
        "the entropy bonus": getattr(trainer, "_entropy_bonus_enabled", False),
        "the routers' loss": getattr(trainer, "aux_loss_enabled", False),
        "the rows of an optimizer step, a part of a generation": args.gradient_accumulation_steps
        % args.steps_per_generation,
    }
    return " and ".join(name for name, is_changed in found.items() if is_changed)


def _groups(trainer: Any, overrides: Overrides, *, is_on: bool | None) -> Batching:
    changed = _changed_by_groups(trainer)
    if is_on is None and changed:
        words = f"rollouts of a prompt stay scattered, as grouping changes {changed}: group_batches=True groups them"
        return Batching(words=words, bound=None)
    if is_on is False:
        return Batching(words="rollouts of a prompt are scattered over micro-batches (group_batches=False)", bound=None)
    overrides.replace("_prepare_inputs", _Regrouping(trainer))
    num_prompt_tokens = mean_prompt_tokens(trainer)
    moved = f"{changed} and " if changed else ""
    moved = f"changes {moved}logged means of micro-batches (entropy, kl, clip_ratio)"
    words = "rollouts of a prompt stay together"
    if num_prompt_tokens is None:
        return Batching(words=f"{words}, which {moved}", bound=None)
    num_rows = min(trainer.num_generations, trainer.args.per_device_train_batch_size)
    longest = trainer.max_completion_length
    bound = group_bound(num_prompt_tokens=num_prompt_tokens, num_completion_tokens=longest, num_rows=num_rows)
    reached = f"bound {bound:.2f}x by tokens where completions reach {longest}, more where they are shorter"
    if num_rows < trainer.num_generations:
        reached = (
            f"{reached}, and with more than {num_rows} of the {trainer.num_generations} rollouts of a prompt in a "
            "micro-batch (per_device_train_batch_size)"
        )
    return Batching(words=f"{words}; {reached}; this {moved}", bound=bound)


class _Regrouping:
    """`_prepare_inputs` of a trainer with rollouts that regroups rows after each generation."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __call__(self, original: Callable[..., Any], batch: Any) -> Any:
        trainer = self._trainer
        before = trainer._buffered_inputs
        inputs = original(batch)
        if not trainer.model.training or trainer._buffered_inputs is before:
            return inputs
        trainer._buffered_inputs = regroup(trainer._buffered_inputs)
        return trainer._buffered_inputs[trainer._step % len(trainer._buffered_inputs)]


def _tasks(trainer: Any, overrides: Overrides, *, is_on: bool) -> Batching:
    dataset = trainer.train_dataset
    if not hasattr(dataset, "__len__"):
        return Batching(words="rows keep the order of the stream, which cannot be sorted", bound=None)
    if getattr(trainer.args, "packing", False):
        return Batching(words="packed rows keep their order", bound=None)
    if not is_on:
        return Batching(words="rows keep the trainer's own order (group_batches=False)", bound=None)
    strategy = trainer.args.train_sampling_strategy
    if strategy != "random":
        raise ConfigError(
            f"group_batches=True orders rows by task, which conflicts with train_sampling_strategy={strategy!r}; "
            "remove one of them"
        )
    has_images = not IMAGE_COLUMNS.isdisjoint(dataset.column_names)
    sequences = keys_of_images(dataset) if has_images else sequences_of(dataset)
    if sequences is None:
        raise ConfigError(
            f"group_batches=True needs a column input_ids or prompt_ids, but the dataset has {dataset.column_names}; "
            "set group_batches=False"
        )
    args = trainer.args
    seed = args.seed if args.data_seed is None else args.data_seed
    # Read the epoch from the state: wrappers of the sampler need not forward `set_epoch`.
    sampler = TaskSampler(
        sequences, args.per_device_train_batch_size, seed, lambda: int((trainer.state.epoch or 0) + 1e-6)
    )
    overrides.replace("_get_train_sampler", lambda original, *given: sampler)
    if has_images:
        words = (
            "rows with the same images stand together, so a step sees other rows (group_batches=False keeps its own)"
        )
        return Batching(words=words, bound=None)
    bound = dataset_bound(trainer, _micro_batches(sampler, args.per_device_train_batch_size))
    words = f"rows of a task stay together; bound {bound:.2f}x by tokens; {_OTHER_ROWS}"
    return Batching(words=words, bound=bound)


def _micro_batches(sampler: TaskSampler, batch_size: int) -> Iterator[list[int]]:
    rows = sampler.order(0).tolist()
    yield from (rows[start : start + batch_size] for start in range(0, len(rows), batch_size))


MicroBatch = dict[str, Any]
"""Tensors [rows, ...], lists of one entry per row, and values of the whole batch."""


def regroup(batches: list[MicroBatch]) -> list[MicroBatch]:
    """Regroup the rows of one generation batch by prompt.

    Args:
        batches: micro-batches of equal size, in order; rows with equal `prompt_ids`, `prompt_mask` and images form a
            group.

    Returns:
        The same number of micro-batches, of the same sizes.

    Example: prompts [[a, b], [b, a]] become [[a, a], [b, b]].
    """
    if len(batches) < 2:
        return batches
    # TRL concatenates the images of all rows; give each row its own.
    batches = [split_pixel_values_by_grid(batch) for batch in batches]
    joined = {name: _joined([batch[name] for batch in batches]) for name in batches[0]}
    prompts = torch.cat([joined["prompt_mask"], joined["prompt_ids"]], dim=1).cpu().numpy()
    order = group_order(np.concatenate([prompts, _image_keys(joined.get("pixel_values"), len(prompts))], axis=1))
    num_rows = len(order) // len(batches)
    regrouped = (
        {name: _taken(value, order[start : start + num_rows], len(order)) for name, value in joined.items()}
        for start in range(0, len(order), num_rows)
    )
    return [unsplit_pixel_values_by_grid(batch) for batch in regrouped]


def group_order(prompts: NDArray[Any]) -> NDArray[np.intp]:
    """Return row indices that put equal rows together: groups by first row, rows of a group in order.

    Args:
        prompts: [rows, columns].

    Example: rows a, b, a give [0, 2, 1].
    """
    _, first, group = np.unique(prompts, axis=0, return_index=True, return_inverse=True)
    return np.argsort(first[group.reshape(-1)], kind="stable")


def _image_keys(pixels: list[Tensor] | None, num_rows: int) -> NDArray[np.int64]:
    """Return int64 [rows, 2], equal for rows with equal images; [rows, 0] without images."""
    if pixels is None:
        return np.empty((num_rows, 0), np.int64)
    digests = (blake2b(one.float().cpu().numpy().tobytes(), digest_size=16).digest() for one in pixels)
    return np.stack([np.frombuffer(digest, np.int64) for digest in digests])


def _joined(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor) and first.ndim > 0:
        return torch.cat(values)
    if isinstance(first, list):
        return [entry for value in values for entry in value]
    return first


def _taken(value: Any, rows: NDArray[np.intp], num_rows: int) -> Any:
    if isinstance(value, Tensor) and value.ndim > 0:
        return value[torch.from_numpy(rows).to(value.device)]
    if isinstance(value, list) and len(value) == num_rows:
        return [value[row] for row in rows]
    return value


IMAGE_COLUMNS = frozenset({"image", "images"})
"""Columns in which TRL looks for images."""

_TEXT_COLUMNS = ("messages", "prompt", "chosen", "completion", "text")
_NUM_ROWS = 64
"""Rows read at a time, with their encoded images."""


def sequences_of(dataset: Any) -> list[list[int]] | None:
    """Return the token ids of each row of a tokenised dataset; None if no column has them.

    Example: a preference row with prompt_ids [1, 2] and chosen_ids [3] is [1, 2, 3].
    """
    columns = set(getattr(dataset, "column_names", None) or ())
    if "input_ids" in columns:
        return [list(tokens) for tokens in dataset["input_ids"]]
    if "prompt_ids" not in columns:
        return None
    answers = next((dataset[name] for name in ("chosen_ids", "completion_ids") if name in columns), None)
    prompts = list(dataset["prompt_ids"])
    return [[*prompt, *answer] for prompt, answer in zip(prompts, answers or [[]] * len(prompts), strict=True)]


def keys_of_images(dataset: Any) -> list[NDArray[np.uint8]]:
    """Return a sort key for each row: 16 bytes per image, in order, then its text.

    Rows with the same images sort together, and among them rows whose text begins alike. Images are compared by their
    encoded bytes; this decides only which rows are adjacent, not which are merged.

    Args:
        dataset: of TRL, with a column `image` or `images`.

    Example: two rows with the same file and different questions have keys that begin with the same 16 bytes.
    """
    columns = [name for name in (*sorted(IMAGE_COLUMNS), *_TEXT_COLUMNS) if name in dataset.column_names]
    tables = dataset.select_columns(columns).with_format("arrow").iter(batch_size=_NUM_ROWS)
    return [_key(row) for table in tables for row in table.to_pylist()]


def _key(row: Mapping[str, Any]) -> NDArray[np.uint8]:
    digests = (blake2b(image, digest_size=16).digest() for image in _images(row))
    text = json.dumps([row[name] for name in _TEXT_COLUMNS if name in row], default=repr)
    return np.frombuffer(b"".join(digests) + text.encode(), np.uint8)


def _images(row: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield what identifies each image of a row: its bytes, or its stand-in, such as a path."""
    for one in [row.get("image"), *(row.get("images") or ())]:
        if one is not None:
            content = one.get("bytes") if isinstance(one, Mapping) else None
            yield content or repr(one).encode()


_NUM_BATCHES = 32
"""Micro-batches over which the bound of a dataset is counted."""
_NUM_PROMPTS = 64


def dataset_bound(trainer: Any, batches: Iterable[Sequence[int]]) -> float:
    """Return the tokens per distinct token over the first micro-batches of a dataset.

    Args:
        trainer: its collator makes batches of its `train_dataset`.
        batches: row numbers of each micro-batch.

    Example: micro-batches of two equal rows have the bound 2.
    """
    num_flat, num_distinct = 0, 0
    for rows in islice(batches, _NUM_BATCHES):
        batch = trainer.data_collator([trainer.train_dataset[int(row)] for row in rows])
        given = (batch.get(name) for name in ("attention_mask", "position_ids"))
        forest, _ = Forest.from_padded(batch["input_ids"], *given)
        num_flat += forest.num_branch_tokens
        num_distinct += forest.num_tokens
    return num_flat / num_distinct if num_distinct else 1.0


def group_bound(*, num_prompt_tokens: float, num_completion_tokens: float, num_rows: int) -> float:
    """Return the tokens per distinct token of `num_rows` completions that share only their prompt.

    Example: 8 completions of 96 tokens after a prompt of 512 have the bound 3.8.
    """
    flat = num_rows * (num_prompt_tokens + num_completion_tokens)
    return flat / (num_prompt_tokens + num_rows * num_completion_tokens)


def mean_prompt_tokens(trainer: Any) -> float | None:
    """Return the mean length of a dataset's first prompts; None if it is unknown before training."""
    dataset = trainer.train_dataset
    if not hasattr(dataset, "__len__") or getattr(trainer, "environment_factories", None) is not None:
        return None
    prompts = [_prompt(dataset[i]) for i in range(min(len(dataset), _NUM_PROMPTS))]
    lengths = [len(tokens) for tokens in trainer._tokenize_prompts(prompts)[0]]
    return sum(lengths) / len(lengths) if lengths else None


def _prompt(row: Mapping[str, Any]) -> Any:
    """Return a row's prompt with its images in place."""
    images = row.get("images") or ([] if row.get("image") is None else [row["image"]])
    return prepare_multimodal_messages(row["prompt"], images=images) if images else row["prompt"]
