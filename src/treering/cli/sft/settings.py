"""The settings of `treering sft` as the records that training takes, and as what makes a run the same run.

Knows both spellings of every setting. Reads no file and builds no model.
"""

from transformers import PreTrainedModel

from treering.cli.corpus import Corpus
from treering.cli.settings import Scalar, model_identity, router_identity, router_losses, section_identity
from treering.config import SftConfig
from treering.train.loop.compute import ComputeOptions
from treering.train.loop.sft import LoopOptions

# Settings that change rounding at most, or only how long a run is.
_FREE_TO_CHANGE = frozenset({"max_tokens", "parents", "max_bytes", "sharing", "gradient_checkpointing"})
_LENGTH = frozenset({"num_steps", "num_epochs"})


def loop_options(config: SftConfig, compute: ComputeOptions) -> LoopOptions:
    """The loop's record."""
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
    """What a resumed run must have in common with the one that began: model shape, data, optimisation, layout.

    Length, with a constant rate, is no part of it: a finished run may be trained on with a larger num_steps.
    """
    free = _FREE_TO_CHANGE | (_LENGTH if config.train.schedule == "constant" else frozenset())
    train = section_identity("train", config.train, free=free)
    return {
        **model_identity(config.model, model),
        "data": corpus.digest,
        **train,
        **router_identity(config.router),
    }
