"""A loop's teacher: how the student is compared with it, and the objective that this makes."""

from dataclasses import dataclass
from functools import partial

from torch import nn

from treering.errors import ConfigError
from treering.model.distillation.divergence import DivergenceKind
from treering.model.families import find_parts
from treering.train.gradient.teacher import teacher_parts
from treering.train.objectives import Objective, distill, sft


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillOptions:
    """How the student is compared with its teacher; see `treering.objectives.distill`.

    Attributes:
        divergence: its kind.
        beta: of jsd.
        top_k: tokens of the teacher per state; None compares the whole vocabulary.
        temperature: of both models; None takes the step's.
        weight: factor of the divergence beside the loop's own loss; None trains the divergence alone.
    """

    divergence: DivergenceKind = "forward_kl"
    beta: float | None = None
    top_k: int | None = None
    temperature: float | None = None
    weight: float | None = None

    def objective(self, teacher: nn.Module, plain: Objective) -> Objective:
        """The loop's own loss with the divergence, or the divergence alone, with the same masks and weighting."""
        divergence = partial(
            distill, teacher, self.divergence, beta=self.beta, top_k=self.top_k, temperature=self.temperature
        )
        if self.weight is not None:
            return divergence(added_to=plain, weight=self.weight)
        weighting = plain.weighting
        return divergence(
            loss_masks=plain.loss_masks,
            normalizer=weighting.normalizer,
            shared=weighting.shared,
            divisor=weighting.divisor,
        )


def check_teacher(student: nn.Module, teacher: nn.Module | None, options: DistillOptions | None) -> None:
    """Checks a loop's teacher before its first step.

    Raises:
        ConfigError: a teacher without options, options without a teacher, or options that contradict each other.
        InputError: a teacher of another vocabulary.
        UnsupportedError: a teacher that would not be exact.
    """
    if (teacher is None) != (options is None):
        raise ConfigError(
            "a loop distills with a teacher and options.distill, and one of them is None: give both, or neither"
        )
    if teacher is not None and options is not None:
        distillation = options.objective(teacher, sft()).distillation
        teacher_parts(distillation, student=find_parts(student), forests=())
