"""Translates the settings of `treering sft` to the records that training takes, and to the run's identity."""

from transformers import PreTrainedModel

from treering.cli.corpus import Corpus
from treering.cli.settings import (
    Scalar,
    distill_options,
    lora_identity,
    model_identity,
    router_identity,
    router_losses,
    section_identity,
    teacher_identity,
)
from treering.config import SftConfig
from treering.train.loop.compute import ComputeOptions
from treering.train.loop.sft import LoopOptions

# Settings that change rounding at most.
_FREE_TO_CHANGE = frozenset(
    {"max_batch_tokens", "parents", "max_bytes", "sharing", "gradient_checkpointing", "layers", "ranks"}
)
_LENGTH = frozenset({"num_steps", "num_epochs"})


def loop_options(config: SftConfig, compute: ComputeOptions) -> LoopOptions:
    """The options of the loop."""
    return LoopOptions(
        trees_per_step=config.train.trees_per_step,
        compute=compute,
        layout=config.train.layout,
        normalizer=config.train.normalizer,
        shared=config.train.shared,
        divisor=config.train.divisor,
        router_losses=router_losses(config.router),
        distill=distill_options(config.teacher),
        seed=config.train.seed,
        ranks=config.train.ranks,
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
