"""Which rows of a trainer stand together in micro-batches, and the bound of sharing that follows.

TRL shuffles a generation batch before it splits it, so a prompt's rollouts fall into different micro-batches. Here
groups stand in the order in which the shuffle shows them first, and rows of a group in the shuffle's order, so the
order is that of TRL's own seed and no further random number is drawn.
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
    """How rows fall into micro-batches."""

    words: str
    """For the line that a user reads."""
    bound: float | None
    """Tokens of the stock path per distinct one; None where it cannot be told before training."""


class TaskSampler(Sampler[int]):
    """Indices of rows: `batch_size` neighbours in the order of their tokens at a time, these batches in random order.

    Rows are sorted by their tokens, so rows of a task stand together, and those that share most are next to each
    other. Every epoch has the same batches in another order; the short one is last.
    """

    def __init__(
        self,
        sequences: Sequence[Sequence[int] | NDArray[np.uint8]],
        batch_size: int,
        seed: int,
        epoch: Callable[[], int],
    ) -> None:
        """Sorts the rows.

        Args:
            sequences: token ids of each row, or other numbers that begin alike where rows do.
            batch_size: rows of a micro-batch.
            seed: of every epoch's order, with its number.
            epoch: the number of the epoch that begins.
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
        """Indices of an epoch."""
        rows, size = self._sorted, self._batch_size
        num_full = len(rows) // size
        batches = np.random.default_rng((self._seed, epoch)).permutation(num_full)
        shuffled = rows[: num_full * size].reshape(num_full, size)[batches]
        return np.concatenate([shuffled.reshape(-1), rows[num_full * size :]])


def keep_together(trainer: Any, kind: str, overrides: Overrides, *, is_on: bool | None) -> Batching:
    """Makes a trainer keep groups or tasks together.

    Args:
        trainer: of TRL.
        kind: which one, see `requirements.TRAINERS`.
        overrides: where replaced methods go.
        is_on: whether anything is replaced; else only the bound is counted. None: unless gradients of rollouts would
            change by that.

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
    """What of the gradient depends on which rollouts stand in one micro-batch; empty if nothing does."""
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
    return Batching(words=f"{words}; {reached}; this {moved}", bound=bound)


class _Regrouping:
    """`_prepare_inputs` of a trainer with rollouts, regrouped after each generation."""

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
        return Batching(words="rows keep the order of the stream, which has no other", bound=None)
    if getattr(trainer.args, "packing", False):
        return Batching(words="packed rows keep their order", bound=None)
    if not is_on:
        return Batching(words="rows keep the trainer's own order (group_batches=False)", bound=None)
    strategy = trainer.args.train_sampling_strategy
    if strategy != "random":
        raise ConfigError(
            f"group_batches=True orders rows by task, and train_sampling_strategy={strategy!r} by something else; "
            "leave one of them out"
        )
    has_pictures = not IMAGE_COLUMNS.isdisjoint(dataset.column_names)
    sequences = keys_of_pictures(dataset) if has_pictures else sequences_of(dataset)
    if sequences is None:
        raise ConfigError(
            f"group_batches=True sorts rows by input_ids or prompt_ids, and the dataset has {dataset.column_names}; "
            "set group_batches=False"
        )
    args = trainer.args
    seed = args.seed if args.data_seed is None else args.data_seed
    # The state says where a resumed run is, whichever wrapper of the sampler forwards `set_epoch`.
    sampler = TaskSampler(
        sequences, args.per_device_train_batch_size, seed, lambda: int((trainer.state.epoch or 0) + 1e-6)
    )
    overrides.replace("_get_train_sampler", lambda original, *given: sampler)
    if has_pictures:
        words = (
            "rows with the same pictures stand together, so a step sees other rows (group_batches=False keeps its own)"
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
    """The micro-batches of one generation batch, their rows regrouped by prompt.

    Args:
        batches: equally large, in order; rows with equal `prompt_ids`, `prompt_mask` and pictures are one group.

    Returns:
        As many micro-batches, of the same sizes.

    Example: prompts [[a, b], [b, a]] become [[a, a], [b, b]].
    """
    if len(batches) < 2:
        return batches
    # TRL holds the pictures of all rows one after another; here each row has its own.
    batches = [split_pixel_values_by_grid(batch) for batch in batches]
    joined = {name: _joined([batch[name] for batch in batches]) for name in batches[0]}
    prompts = torch.cat([joined["prompt_mask"], joined["prompt_ids"]], dim=1).cpu().numpy()
    order = group_order(np.concatenate([prompts, _picture_keys(joined.get("pixel_values"), len(prompts))], axis=1))
    num_rows = len(order) // len(batches)
    regrouped = (
        {name: _taken(value, order[start : start + num_rows], len(order)) for name, value in joined.items()}
        for start in range(0, len(order), num_rows)
    )
    return [unsplit_pixel_values_by_grid(batch) for batch in regrouped]


def group_order(prompts: NDArray[Any]) -> NDArray[np.intp]:
    """Indices of rows, equal rows together: groups by their first row, rows of a group in order.

    Args:
        prompts: [rows, columns].

    Example: rows a, b, a give [0, 2, 1].
    """
    _, first, group = np.unique(prompts, axis=0, return_index=True, return_inverse=True)
    return np.argsort(first[group.reshape(-1)], kind="stable")


def _picture_keys(pixels: list[Tensor] | None, num_rows: int) -> NDArray[np.int64]:
    """int64 [rows, 2], equal for rows with equal pictures; [rows, 0] without pictures."""
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
"""Columns in which TRL looks for pictures."""

_TEXT_COLUMNS = ("messages", "prompt", "chosen", "completion", "text")
_NUM_ROWS = 64
"""Rows that are read at a time, with their encoded pictures."""


def sequences_of(dataset: Any) -> list[list[int]] | None:
    """Token ids of each row of a tokenised dataset; None where no columns have them.

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


def keys_of_pictures(dataset: Any) -> list[NDArray[np.uint8]]:
    """A key of each row: 16 bytes for each of its pictures in order, then its text.

    Rows with the same pictures sort together, and among them those whose text begins alike. Pictures are compared by
    their encoded bytes: which rows stand together depends on that, and which are merged does not.

    Args:
        dataset: of TRL, with a column `image` or `images`.

    Example: two rows with the same file and other questions have keys that begin with the same 16 bytes.
    """
    columns = [name for name in (*sorted(IMAGE_COLUMNS), *_TEXT_COLUMNS) if name in dataset.column_names]
    tables = dataset.select_columns(columns).with_format("arrow").iter(batch_size=_NUM_ROWS)
    return [_key(row) for table in tables for row in table.to_pylist()]


def _key(row: Mapping[str, Any]) -> NDArray[np.uint8]:
    digests = (blake2b(picture, digest_size=16).digest() for picture in _pictures(row))
    text = json.dumps([row[name] for name in _TEXT_COLUMNS if name in row], default=repr)
    return np.frombuffer(b"".join(digests) + text.encode(), np.uint8)


def _pictures(row: Mapping[str, Any]) -> Iterator[bytes]:
    """What tells a row's pictures apart: their bytes, else what stands in their place, such as a path."""
    for one in [row.get("image"), *(row.get("images") or ())]:
        if one is not None:
            content = one.get("bytes") if isinstance(one, Mapping) else None
            yield content or repr(one).encode()


_NUM_BATCHES = 32
"""Micro-batches of which the bound of a dataset is counted."""
_NUM_PROMPTS = 64


def dataset_bound(trainer: Any, batches: Iterable[Sequence[int]]) -> float:
    """Tokens per distinct one over the first micro-batches of a dataset.

    Args:
        trainer: whose collator makes batches of its `train_dataset`.
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
    """Tokens per distinct one of `num_rows` completions of one prompt that share nothing but it.

    Example: 8 completions of 96 tokens after a prompt of 512 have the bound 3.8.
    """
    flat = num_rows * (num_prompt_tokens + num_completion_tokens)
    return flat / (num_prompt_tokens + num_rows * num_completion_tokens)


def mean_prompt_tokens(trainer: Any) -> float | None:
    """Mean tokens of the first prompts of a trainer's dataset; None where they cannot be told beforehand."""
    dataset = trainer.train_dataset
    if not hasattr(dataset, "__len__") or getattr(trainer, "environment_factories", None) is not None:
        return None
    prompts = [_prompt(dataset[i]) for i in range(min(len(dataset), _NUM_PROMPTS))]
    lengths = [len(tokens) for tokens in trainer._tokenize_prompts(prompts)[0]]
    return sum(lengths) / len(lengths) if lengths else None


def _prompt(row: Mapping[str, Any]) -> Any:
    """A row's prompt, with its pictures in their places."""
    images = row.get("images") or ([] if row.get("image") is None else [row["image"]])
    return prepare_multimodal_messages(row["prompt"], images=images) if images else row["prompt"]
