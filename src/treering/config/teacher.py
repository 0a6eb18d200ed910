"""The section [teacher] of `treering sft`: whom the student is compared with, and how."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from treering.config.load import Config
from treering.config.values import Count, FilePath, Positive
from treering.errors import ConfigError


class TeacherConfig(Config):
    """A teacher of the student's tokenizer, and the divergence from it."""

    path: FilePath | None = Field(
        default=None, description='Hugging Face model folder; needed for train.objective = "distill".'
    )
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = Field(
        default="forward_kl",
        description="forward_kl: KL(teacher, student). reverse_kl: KL(student, teacher). jsd: generalised "
        "Jensen-Shannon divergence.",
    )
    beta: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="The teacher's weight in the mixture of jsd; none: 0.5."
    )
    top_k: Count | None = Field(
        default=None,
        description="Compares the teacher's most likely tokens, and all others as one; none: the whole vocabulary.",
    )
    temperature: Positive = Field(default=1.0, description="Divides the logits of both models.")
    weight: Positive | None = Field(
        default=None, description="Factor of the divergence beside the loss of sft; none: the divergence alone."
    )

    @property
    def is_set(self) -> bool:
        """Whether the file has any of these settings."""
        return bool(self.model_fields_set)

    @model_validator(mode="after")
    def _check_beta(self) -> Self:
        if self.beta is not None and self.divergence != "jsd":
            raise ConfigError(
                f'beta belongs to divergence = "jsd", and here divergence = "{self.divergence}" with beta = '
                f'{self.beta}; remove beta, or set divergence = "jsd"'
            )
        return self
