"""Settings of every training subcommand: translated to the records that training takes, and as a run's identity."""

from collections.abc import Mapping
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from torch import nn
from transformers import PreTrainedModel

from treering.cli.run_folder import COSTS_FILE
from treering.config import Config
from treering.config.lora import LoraConfig
from treering.config.model import ModelConfig
from treering.config.optim import OptimConfig
from treering.config.rl import LoopConfig
from treering.config.router import RouterConfig
from treering.config.sft import TrainConfig
from treering.config.teacher import TeacherConfig
from treering.model.context import tree_attention
from treering.train.fit_costs import cached_costs
from treering.train.gradient.router_losses import RouterLosses
from treering.train.loop.adapters import base_checksum
from treering.train.loop.compute import Autocast, ComputeOptions, precision, prepare_model
from treering.train.loop.distill import DistillOptions
from treering.train.loop.optim import OptimOptions

Scalar = str | int | float | bool | None

_SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "tie_word_embeddings",
)


class _Record(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def of_same_name(record: type[_Record], section: Config) -> dict[str, Any]:
    """The settings of a section that a record of options has under the same names."""
    return {
        each.name: getattr(section, each.name) for each in fields(record) if each.name in type(section).model_fields
    }


def optim_options(config: OptimConfig, num_steps: int) -> OptimOptions:
    """The optimizer's options for a run of `num_steps` steps."""
    length = {"num_steps": num_steps if config.schedule == "cosine" else None}
    return OptimOptions(**of_same_name(OptimOptions, config) | length)


def compute_options(
    model: ModelConfig, section: TrainConfig | LoopConfig, num_steps: int | None = None
) -> ComputeOptions:
    """How the steps of a section are computed, without costs; `num_steps` of the run, for layers that are measured."""
    own = {
        "max_tokens": section.max_batch_tokens,
        "autocast": "bfloat16" if model.dtype == "bfloat16" else "none",
        "num_steps": num_steps,
    }
    return ComputeOptions(**of_same_name(ComputeOptions, section) | own)


def with_costs(
    compute: ComputeOptions, sharing: Literal["always", "measured"], model: nn.Module, run_dir: Path
) -> ComputeOptions:
    """The options with the measured costs that decide where sharing pays; unchanged if sharing is "always".

    The costs are fitted once per run, to stock layers, and kept in its folder.

    Raises:
        StateError: the file is damaged.
    """
    if sharing == "always":
        return compute
    prepare_model(model, replace(compute, layers="stock"))
    with precision(model, compute.autocast):
        return replace(compute, costs=cached_costs(model, run_dir / COSTS_FILE))


def attention_in_words(model: nn.Module, autocast: Autocast) -> str:
    """The attention backend of a run and the reason for it.

    Example: "attention: segments (auto: the fastest that is exact on CPU, as measured)".
    """
    with precision(model, autocast), tree_attention(model) as attention:
        return f"attention: {attention.backend} ({attention.reason})"


def router_losses(section: RouterConfig) -> RouterLosses | None:
    """The losses on routers; None if the section sets none."""
    return RouterLosses(balance=section.balance or 0.0, z=section.z or 0.0) if section.is_set else None


def router_identity(section: RouterConfig) -> Mapping[str, Scalar]:
    """The router settings that a resumed run must share with the original one; empty if routers are left alone."""
    return section_identity("router", section) if section.is_set else {}


def distill_options(section: TeacherConfig) -> DistillOptions | None:
    """How the student is compared with its teacher; None if the section sets none."""
    return DistillOptions(**section.model_dump(exclude={"path", "revision"})) if section.is_set else None


def teacher_identity(section: TeacherConfig) -> Mapping[str, Scalar]:
    """The teacher's settings that a resumed run must share with the original one; empty without a teacher."""
    # Only hub ids have revisions.
    free = frozenset({"revision"} if section.revision is None else ())
    return section_identity("teacher", section, free=free) if section.is_set else {}


def model_identity(config: ModelConfig, model: PreTrainedModel) -> dict[str, Scalar]:
    """What a resumed run's model must share with the original one."""
    shape = {f"model.{key}": getattr(model.config, key, None) for key in _SHAPE}
    path = None if config.path is None else str(Path(config.path))
    revision = {} if config.revision is None else {"model.revision": config.revision}
    # A run of a release that knew no pictures trained all.
    frozen = {} if config.vision == "trained" else {"model.vision": config.vision}
    return {**shape, "model.path": path, **revision, "model.dtype": config.dtype, **frozen}


def lora_identity(section: LoraConfig, model: PreTrainedModel) -> Mapping[str, Scalar]:
    """The settings of adapters and their base weights, which a resumed run must share; empty without adapters.

    Checkpoints of adapters leave the base weights out, so a resumed run could meet others in the same place.
    """
    if not section.is_set:
        return {}
    return {**section_identity("lora", section), "lora.base": base_checksum(model)}


def parameters_in_words(model: PreTrainedModel) -> str:
    """How many parameters a model has.

    Example: "917,504 parameters", and with adapters "917,504 parameters, 24,576 of them trained".
    """
    words = f"{model.num_parameters():,} parameters"
    num_trained = model.num_parameters(only_trainable=True)
    return words if num_trained == model.num_parameters() else f"{words}, {num_trained:,} of them trained"


def section_identity(name: str, section: Config, *, free: frozenset[str] = frozenset()) -> Mapping[str, Scalar]:
    """The settings of a section by dotted name, except those that may change on resume.

    Example: the section `[train]` with seed 3 has "train.seed": 3.
    """
    settings = section.model_dump(mode="json", exclude=set(free))
    return {f"{name}.{key}": str(value) if isinstance(value, list | dict) else value for key, value in settings.items()}
