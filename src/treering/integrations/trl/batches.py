"""Which rows of a trainer stand together in micro-batches, and the bound of sharing that follows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from treering.errors import ConfigError
from treering.integrations.trl.expected import dataset_bound, group_bound, mean_prompt_tokens
from treering.integrations.trl.groups import regroup
from treering.integrations.trl.overrides import Overrides
from treering.integrations.trl.requirements import ROLLOUT_TRAINERS
from treering.integrations.trl.task_sampler import IMAGE_COLUMNS, TaskSampler, keys_of_pictures, sequences_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How rows fall into micro-batches."""

    words: str
    """For the line that a user reads."""
    bound: float | None
    """Tokens of the stock path per distinct one; None where it cannot be told before training."""


def keep_together(trainer: Any, kind: str, overrides: Overrides, *, is_on: bool) -> Batching:
    """Makes a trainer keep groups or tasks together.

    Args:
        trainer: of TRL.
        kind: which one, see `requirements.TRAINERS`.
        overrides: where replaced methods go.
        is_on: whether anything is replaced; else only the bound is counted.

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
    return _tasks(trainer, overrides, is_on=is_on)


def _groups(trainer: Any, overrides: Overrides, *, is_on: bool) -> Batching:
    if not is_on:
        return Batching(words="rollouts of a prompt are scattered over micro-batches (group_batches=False)", bound=None)
    overrides.replace("_prepare_inputs", _Regrouping(trainer))
    num_prompt_tokens = mean_prompt_tokens(trainer)
    words = "rollouts of a prompt stay together"
    if num_prompt_tokens is None:
        return Batching(words=words, bound=None)
    num_rows = min(trainer.num_generations, trainer.args.per_device_train_batch_size)
    longest = trainer.max_completion_length
    bound = group_bound(num_prompt_tokens=num_prompt_tokens, num_completion_tokens=longest, num_rows=num_rows)
    return Batching(
        words=f"{words}; bound {bound:.2f}x by tokens where completions reach {longest}, more where they are shorter",
        bound=bound,
    )


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
        return Batching(words="rows with the same pictures stand together", bound=None)
    bound = dataset_bound(trainer, _micro_batches(sampler, args.per_device_train_batch_size))
    return Batching(words=f"rows of a task stay together; bound {bound:.2f}x by tokens", bound=bound)


def _micro_batches(sampler: TaskSampler, batch_size: int) -> Iterator[list[int]]:
    rows = sampler.order(0).tolist()
    yield from (rows[start : start + batch_size] for start in range(0, len(rows), batch_size))
