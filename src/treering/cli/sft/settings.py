"""Translates the settings of `treering sft` to the records that training takes, and to the run's identity."""

from transformers import PreTrainedModel

from treering.cli.corpus import Corpus
from treering.cli.settings import Scalar, model_identity, router_identity, router_losses, section_identity
from treering.config import SftConfig
from treering.train.loop.compute import ComputeOptions
from treering.train.loop.sft import LoopOptions

# Settings that change rounding at most.
_FREE_TO_CHANGE = frozenset({"max_tokens", "parents", "max_bytes", "sharing", "gradient_checkpointing"})
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
        seed=config.train.seed,
    )


def identity(config: SftConfig, corpus: Corpus, model: PreTrainedModel) -> dict[str, Scalar]:
    """What a resumed run must share with the original one: model shape, data, optimization, layout.

    With a constant learning rate, length is left out: a finished run may go on with a larger num_steps.
    """
    free = _FREE_TO_CHANGE | (_LENGTH if config.train.schedule == "constant" else frozenset())
    train = section_identity("train", config.train, free=free)
    return {
        **model_identity(config.model, model),
        "data": corpus.digest,
        **train,
        **router_identity(config.router),
    }
