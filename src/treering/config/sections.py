"""Sections that the configurations of `treering sft` and `treering train` have in common. Imports no torch."""

from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from treering.config.eval import EvalConfig
from treering.config.model import DistillOptions, LoraOptions, ModelConfig
from treering.config.optim import OptimOptions, check_warmup
from treering.config.record import Config
from treering.config.run import MetricsConfig, RunConfig
from treering.config.steps import RouterLosses, StepsOptions
from treering.errors import ConfigError


class TrainingConfig(Config):
    """A run that trains a model."""

    steps_name: ClassVar[str]
    """Section of the steps."""
    step_size_name: ClassVar[str]
    """Its setting of tasks, or prompts, per step."""

    # First two: if two sections have a mistaken key, the later one is suggested.
    teacher: DistillOptions = Field(default_factory=DistillOptions, description="Teacher of a distillation.")
    eval: EvalConfig
    model: ModelConfig = Field(default_factory=ModelConfig, description="The model.")
    lora: LoraOptions = Field(default_factory=LoraOptions, description="Adapters instead of all weights.")
    optim: OptimOptions = Field(default_factory=OptimOptions, description="The optimisation.")
    router: RouterLosses = Field(default_factory=RouterLosses, description="Losses on routers of experts.")
    metrics: MetricsConfig = Field(default_factory=MetricsConfig, description="Where metrics go.")
    run: RunConfig = Field(default_factory=RunConfig, description="The output.")

    @property
    def steps(self) -> StepsOptions:
        """Section of the steps as it is in the file."""
        found: StepsOptions = getattr(self, self.steps_name)
        return found

    @property
    def options_elsewhere(self) -> dict[str, Any]:
        """Settings of other sections that steps need."""
        return {
            "distill": self.teacher if self.teacher.is_set else None,
            "router_losses": self.router if self.router.is_set else None,
            "autocast": self.model.autocast,
        }

    @model_validator(mode="after")
    def _check_sections(self) -> Self:
        name, steps = self.steps_name, self.steps
        if steps.num_epochs is None and steps.num_steps is None:
            raise ConfigError(
                f"training needs an end, and neither {name}.num_epochs nor {name}.num_steps is set; set one, or both"
            )
        if self.lora.is_set and self.model.path is None:
            # No checkpoint would hold the random weights.
            raise ConfigError(
                f"adapters need a pre-trained model, got lora.rank = {self.lora.rank} without model.path; set "
                "model.path, or remove [lora]"
            )
        check_warmup(warmup_steps=self.optim.warmup_steps, num_steps=steps.num_steps)
        if self.teacher.is_set and self.teacher.path is None:
            raise ConfigError("[teacher] is set without teacher.path; set it to a Hugging Face model folder")
        return self
