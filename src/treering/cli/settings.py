"""Settings of both commands that train: translated to the records that training takes, and as a run's identity."""

from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedModel

from treering.config import Config, RlConfig, SftConfig
from treering.config.load import of_same_name
from treering.config.model import ModelConfig
from treering.config.optim import OptimConfig
from treering.config.router import RouterConfig
from treering.config.steps import StepsConfig
from treering.config.teacher import TeacherConfig
from treering.train.gradient.router_losses import RouterLosses
from treering.train.loop.adapters import base_checksum
from treering.train.loop.compute import ComputeOptions
from treering.train.loop.distill import DistillOptions
from treering.train.loop.optim import OptimOptions

Scalar = str | int | float | bool | None

_SHAPE = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "tie_word_embeddings"),
)
# Settings that change rounding at most.
_FREE_TO_CHANGE = frozenset(
    {
        *("max_batch_tokens", "parents", "sharing", "gradient_checkpointing", "layers", "ranks"),
        "num_train_threads",
    }
)
_LENGTH = frozenset({"num_steps", "num_epochs"})


def optim_options(config: OptimConfig, num_steps: int) -> OptimOptions:
    """The optimizer's options for a run of `num_steps` steps."""
    length = {"num_steps": num_steps if config.schedule == "cosine" else None}
    return OptimOptions(**of_same_name(OptimOptions, config) | length)


def compute_options(model: ModelConfig, section: StepsConfig, num_steps: int | None = None) -> ComputeOptions:
    """How the steps of a section are computed, without costs; `num_steps` of the run, for layers that are measured."""
    own = {
        "max_tokens": section.max_batch_tokens,
        "autocast": "bfloat16" if model.dtype == "bfloat16" else "none",
        "num_steps": num_steps,
    }
    return ComputeOptions(**of_same_name(ComputeOptions, section) | own)


def router_losses(section: RouterConfig) -> RouterLosses | None:
    """The losses on routers; None if the section sets none."""
    return RouterLosses(balance=section.balance or 0.0, z=section.z or 0.0) if section.is_set else None


def distill_options(section: TeacherConfig) -> DistillOptions | None:
    """How the student is compared with its teacher; None if the section sets none."""
    return DistillOptions(**section.model_dump(exclude={"path", "revision"})) if section.is_set else None


def training_identity(config: SftConfig | RlConfig, model: PreTrainedModel) -> dict[str, Scalar]:
    """What a resumed run must share with the original one, whatever it trains on.

    With a constant learning rate, length is left out: a finished run may go on with a larger num_steps.
    """
    name, section = ("rl", config.rl) if isinstance(config, RlConfig) else ("train", config.train)
    schedule = config.optim.schedule if isinstance(config, RlConfig) else config.train.schedule
    free = _FREE_TO_CHANGE | (_LENGTH if schedule == "constant" else frozenset())
    return {
        **model_identity(config, model),
        **section_identity(name, section, free=free),
        **section_identity("teacher", config.teacher),
    }


def model_identity(config: SftConfig | RlConfig, model: PreTrainedModel) -> dict[str, Scalar]:
    """What a resumed run's model must share with the original one.

    Checkpoints of adapters leave the base weights out, so a resumed run could meet others in the same place.
    """
    own = config.model
    return {
        **{f"model.{key}": getattr(model.config, key, None) for key in _SHAPE},
        "model.path": None if own.path is None else str(Path(own.path)),
        **{f"model.{key}": getattr(own, key) for key in ("revision", "dtype", "vision")},
        **section_identity("lora", config.lora),
        **({"lora.base": base_checksum(model)} if config.lora.is_set else {}),
        **section_identity("router", config.router),
    }


def section_identity(name: str, section: Config, *, free: frozenset[str] = frozenset()) -> Mapping[str, Scalar]:
    """The settings of a section by dotted name, except those that may change on resume.

    Example: the section `[train]` with seed 3 has "train.seed": 3.
    """
    settings = section.model_dump(mode="json", exclude=set(free))
    return {f"{name}.{key}": str(value) if isinstance(value, list | dict) else value for key, value in settings.items()}
