"""The settings of `treering sft` as the records that training takes, and as what makes a run the same run.

Knows both spellings of every setting. Reads no file and builds no model.
"""

from transformers import PreTrainedModel

from treering.cli.corpus import Corpus
from treering.config import SftConfig
from treering.config.sft import TrainConfig
from treering.train.batches import StepPlan
from treering.train.loop import LoopOptions
from treering.train.optim import OptimOptions

# Settings that change rounding at most, or only how long a run is.
_FREE_TO_CHANGE = frozenset({"max_tokens", "gradient_checkpointing"})
_LENGTH = frozenset({"num_steps", "num_epochs"})
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


def count_steps(config: TrainConfig, *, num_tasks: int) -> int:
    """Steps of the whole run: `num_steps` or `num_epochs` passes, whichever ends earlier.

    Example: 5 tasks, 2 trees per step and 2 epochs are 6 steps.
    """
    plan = StepPlan(num_tasks=num_tasks, trees_per_step=config.trees_per_step, seed=config.seed)
    limits = [config.num_steps, None if config.num_epochs is None else config.num_epochs * plan.steps_per_epoch]
    return min(limit for limit in limits if limit is not None)


def optim_options(config: TrainConfig, num_steps: int) -> OptimOptions:
    """The optimiser's record for a run of `num_steps` steps."""
    return OptimOptions(
        learning_rate=config.learning_rate,
        schedule=config.schedule,
        warmup_steps=config.warmup_steps,
        num_steps=num_steps if config.schedule == "cosine" else None,
        min_learning_rate=config.min_learning_rate,
        weight_decay=config.weight_decay,
        betas=config.betas,
        eps=config.eps,
        max_grad_norm=config.max_grad_norm,
    )


def loop_options(config: SftConfig) -> LoopOptions:
    """The loop's record."""
    return LoopOptions(
        trees_per_step=config.train.trees_per_step,
        max_tokens=config.train.max_tokens,
        layout=config.train.layout,
        normalizer=config.train.normalizer,
        shared=config.train.shared,
        divisor=config.train.divisor,
        autocast="bfloat16" if config.model.dtype == "bfloat16" else "none",
        gradient_checkpointing=config.train.gradient_checkpointing,
        seed=config.train.seed,
    )


def identity(config: SftConfig, corpus: Corpus, model: PreTrainedModel) -> dict[str, str | int | float | bool | None]:
    """What a resumed run must have in common with the one that began: model shape, data, optimisation, layout.

    Length, with a constant rate, is no part of it: a finished run may be trained on with a larger num_steps.
    """
    free = _FREE_TO_CHANGE | (_LENGTH if config.train.schedule == "constant" else frozenset())
    train = config.train.model_dump(mode="json", exclude=set(free))
    shape = {f"model.{key}": getattr(model.config, key, None) for key in _SHAPE}
    path = None if config.model.path is None else str(config.model.path)
    settings = {f"train.{key}": str(value) if isinstance(value, list) else value for key, value in train.items()}
    return {**shape, "model.path": path, "model.dtype": config.model.dtype, "data": corpus.digest, **settings}
