"""Translates the settings of `treering sft` to the records that training takes, and to the run's identity."""

from transformers import PreTrainedModel

from treering.cli.corpus import Corpus
from treering.cli.settings import Scalar, distill_options, router_losses, training_identity
from treering.config import SftConfig
from treering.config.load import of_same_name
from treering.train.loop.compute import ComputeOptions
from treering.train.loop.sft import LoopOptions

_TREES_PER_STEP = 8
_STEPS_PER_EPOCH = 16


def with_step_size(config: SftConfig, num_tasks: int, num_ranks: int) -> SftConfig:
    """The configuration with a number of trees per step: few enough for a training, and one for each rank.

    Example: 30 tasks on one rank have 1 tree per step, 64 have 4, and 128 or more have 8.
    """
    if config.train.trees_per_step != "auto":
        return config
    size = min(_TREES_PER_STEP, max(num_ranks, num_tasks // _STEPS_PER_EPOCH))
    return config.model_copy(update={"train": config.train.model_copy(update={"trees_per_step": size})})


def loop_options(config: SftConfig, compute: ComputeOptions) -> LoopOptions:
    """The options of the loop."""
    return LoopOptions(
        **of_same_name(LoopOptions, config.train),
        compute=compute,
        router_losses=router_losses(config.router),
        distill=distill_options(config.teacher),
    )


def identity(config: SftConfig, corpus: Corpus, model: PreTrainedModel) -> dict[str, Scalar]:
    """What a resumed run must share with the original one: model, data, optimization, layout."""
    return {**training_identity(config, model), "data": corpus.digest}
