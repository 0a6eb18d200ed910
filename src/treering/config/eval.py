"""The [eval] sections: held-out data for evaluations during training. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from treering.config.record import Config
from treering.config.values import Count, FilePath, FilePaths, NonNegative
from treering.data.held_out_tasks import is_held_out, split_held_out
from treering.data.trajectory import TaskId
from treering.errors import ConfigError, InputError


class EvalConfig(Config):
    """Settings that `treering sft` and `treering train` have in common."""

    share: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="Share held out of training, chosen by ids, so that adding data does not change the choice.",
    )
    every: Count | None = Field(
        default=None,
        description="Steps between evaluations, in addition to those at the start and the end; none: only those two.",
    )

    keep_best: Literal["on", "off"] = Field(
        default="off",
        description="on: also save and keep the checkpoint of the best evaluation, linked as checkpoints/best; best is "
        "the lowest loss of sft, the highest reward of train.",
    )

    @property
    def own_data(self) -> tuple[Path, ...]:
        """Files of held-out data."""
        raise NotImplementedError

    @property
    def is_set(self) -> bool:
        """Whether anything is held out."""
        return self.share is not None or bool(self.own_data)

    def held_out(self, ids: Sequence[TaskId], what: str) -> list[bool]:
        """Return whether each task or prompt is in the held-out share, by its id; errors call them `what`.

        If one side would be empty, the nearest possible share is used.

        Raises:
            InputError: there are fewer than two.
        """
        assert self.share is not None, "the caller checks it"
        if len(ids) < 2:
            raise InputError(
                f"eval.share = {self.share} needs at least two {what}, one on each side, got {len(ids)}; add some, or "
                f"set eval.{self._files_names}"
            )
        return split_held_out(ids, self.share, seed=0)

    def share_notes(self, ids: Sequence[TaskId], what: str) -> list[str]:
        """Return a line if the nearest possible share replaces the configured one."""
        assert self.share is not None, "the caller checks it"
        num_set, num_held = sum(is_held_out(each, self.share, seed=0) for each in ids), sum(self.held_out(ids, what))
        if num_set == num_held:
            return []
        return [
            f"eval.share = {self.share} of {len(ids)} {what} is {num_set} by their ids; {num_held} held out instead"
        ]

    @property
    def _files_names(self) -> str:
        return " or ".join(name for name in ("file", "files") if name in type(self).model_fields)

    @model_validator(mode="after")
    def _check_data(self) -> Self:
        names = self._files_names
        if self.share is not None and self.own_data:
            raise ConfigError(
                f"held-out data must be a share of the training data or separate files, got share = {self.share} with "
                f"{names}; remove one of them"
            )
        if not self.is_set and self.model_fields_set:
            given = ", ".join(sorted(self.model_fields_set))
            raise ConfigError(f"an evaluation needs held-out data, and {given} is set without; set share or {names}")
        return self


class SftEvalConfig(EvalConfig):
    """Held-out trajectories; without them there is no evaluation."""

    files: FilePaths = Field(default=(), description="Held-out trajectory files, read with the settings of [data].")

    @property
    def own_data(self) -> tuple[Path, ...]:
        """Files of held-out data."""
        return self.files


class RlEvalConfig(EvalConfig):
    """Held-out prompts, and sampling of their rollouts; without them there is no evaluation."""

    file: FilePath | None = Field(
        default=None, description='Held-out prompts, read with the settings of [task]; for task.kind = "prompts".'
    )
    num_samples: Count = Field(default=1, description="Rollouts per prompt; pass@k is reported for k = 1, 2, 4, ...")
    temperature: NonNegative = Field(default=0.0, description="Divides the logits; 0: greedy sampling.")
    pass_reward: float = Field(default=1.0, description="Smallest reward that passes.")

    @property
    def own_data(self) -> tuple[Path, ...]:
        """Files of held-out data."""
        return () if self.file is None else (self.file,)

    @model_validator(mode="after")
    def _check_samples(self) -> Self:
        if self.temperature == 0 and self.num_samples > 1:
            raise ConfigError(
                f"at temperature = 0 all rollouts of a prompt are equal, got num_samples = {self.num_samples}; set "
                "eval.temperature, or num_samples = 1"
            )
        return self
