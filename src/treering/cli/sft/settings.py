"""Translates the settings of `treering sft` to the records that training takes, and to the run's identity."""

from transformers import PreTrainedModel

from treering.cli.corpus import Corpus
from treering.cli.run_folder import chat_settings, first_settings
from treering.cli.run_notes import RunLength
from treering.cli.settings import (
    Scalar,
    distill_options,
    lora_identity,
    model_identity,
    of_same_name,
    router_identity,
    router_losses,
    section_identity,
    teacher_identity,
)
from treering.config import SftConfig
from treering.train.loop.batches import StepPlan
from treering.train.loop.compute import ComputeOptions
from treering.train.loop.sft import LoopOptions

# Settings that change rounding at most.
_FREE_TO_CHANGE = frozenset({"max_batch_tokens", "parents", "sharing", "gradient_checkpointing", "layers", "ranks"})
_LENGTH = frozenset({"num_steps", "num_epochs"})
_TREES_PER_STEP = 8
_STEPS_PER_EPOCH = 16


def as_begun(config: SftConfig) -> SftConfig:
    """The configuration with what a run keeps from its first start, where nothing is set."""
    data, train = config.data, config.train
    data = data.model_copy(update=chat_settings(config.run, "data", data.template, data.date))
    if train.trees_per_step == "auto":
        size = first_settings(config.run, "train").get("trees_per_step", "auto")
        train = train.model_copy(update={"trees_per_step": size})
    return config.model_copy(update={"data": data, "train": train})


def with_step_size(config: SftConfig, num_tasks: int, num_ranks: int) -> SftConfig:
    """The configuration with a number of trees per step: few enough for a training, and one for each rank.

    Example: 30 tasks on one rank have 1 tree per step, 64 have 4, and 128 or more have 8.
    """
    if config.train.trees_per_step != "auto":
        return config
    size = min(_TREES_PER_STEP, max(num_ranks, num_tasks // _STEPS_PER_EPOCH))
    return config.model_copy(update={"train": config.train.model_copy(update={"trees_per_step": size})})


def run_length(config: SftConfig, num_tasks: int) -> RunLength:
    """How long the run is; `with_step_size` comes first."""
    train = config.train
    return RunLength(
        section="train",
        per_step="trees_per_step",
        plan=StepPlan(num_tasks=num_tasks, trees_per_step=int(train.trees_per_step), seed=train.seed),
        num_steps=train.num_steps,
        num_epochs=train.num_epochs,
        schedule=train.schedule,
    )


def loop_options(config: SftConfig, compute: ComputeOptions) -> LoopOptions:
    """The options of the loop."""
    return LoopOptions(
        **of_same_name(LoopOptions, config.train),
        compute=compute,
        router_losses=router_losses(config.router),
        distill=distill_options(config.teacher),
    )


def identity(config: SftConfig, corpus: Corpus, model: PreTrainedModel) -> dict[str, Scalar]:
    """What a resumed run must share with the original one: model shape, data, optimization, layout.

    With a constant learning rate, length is left out: a finished run may go on with a larger num_steps.
    """
    free = _FREE_TO_CHANGE | (_LENGTH if config.train.schedule == "constant" else frozenset())
    # A run without a teacher is that of a release that knew none.
    free |= frozenset({"objective"} if config.train.objective == "sft" else ())
    train = section_identity("train", config.train, free=free)
    return {
        **model_identity(config.model, model),
        **lora_identity(config.lora, model),
        "data": corpus.digest,
        **train,
        **teacher_identity(config.teacher),
        **router_identity(config.router),
    }
