"""The [teacher] section: the teacher of a distillation, and the divergence from it."""

from typing import Literal

from pydantic import Field

from treering.config.record import Config
from treering.config.values import Count, ModelPath, Positive, Revision
from treering.errors import ConfigError


class DistillOptions(Config):
    """A teacher with the student's tokenizer, and the divergence from it."""

    path: ModelPath | None = Field(
        default=None, description='Hugging Face model folder or hub id; needed for rl.objective = "distill".'
    )
    revision: Revision = None
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = Field(
        default="forward_kl",
        description="forward_kl: KL(teacher, student). reverse_kl: KL(student, teacher). jsd: "
        "Jensen-Shannon divergence, halfway between both.",
    )
    top_k: Count | None = Field(
        default=None,
        description="Number of the teacher's likeliest tokens to compare, all others as one; none: the whole "
        "vocabulary.",
    )
    weight: Positive | None = Field(
        default=None,
        description="Factor of the divergence, which is added to the loss; none: the divergence is the whole loss, in "
        '[rl] with objective = "distill".',
    )

    @property
    def is_set(self) -> bool:
        """Whether the file has any of these settings."""
        return bool(self.model_fields_set)


def check_teacher(teacher: DistillOptions) -> None:
    """Refuse settings of a teacher without its model.

    Raises:
        ConfigError: `teacher.path` is not set, and another setting is.
    """
    if teacher.is_set and teacher.path is None:
        raise ConfigError("[teacher] is set without teacher.path; set it to a Hugging Face model folder")
