"""Settings and checks shared by the training sections: loss, layout, layers and memory of large trees."""

from typing import Annotated, Literal

from pydantic import Field

from treering.errors import ConfigError

Parents = Annotated[
    Literal["auto", "keep", "recompute", "offload"],
    Field(
        description="Activations of a partition while those below it run. keep: nothing is computed twice. recompute, "
        "offload (to the host): less memory. auto: the first of keep, offload, recompute that fits."
    ),
]
Sharing = Annotated[
    Literal["always", "measured"],
    Field(
        description="measured: step times are fitted at the start and kept in the run folder (costs.json), and a tree "
        "that sharing would slow down is trained branch by branch, to the same gradient. always: never."
    ),
]

Ranks = Annotated[
    Literal["gathered", "sharded"],
    Field(
        description="Under torchrun. gathered: weights stay gathered during a step, and gradients are reduced once. "
        "sharded: they are gathered in every pass, and all ranks run the same passes, so no tree may be cut."
    ),
]
Layers = Annotated[
    Literal["auto", "stock", "compiled", "liger"],
    Field(
        description="How the model's layers run. stock: as transformers runs them. compiled: by torch.compile. liger: "
        "by the kernels of treering[liger], on CUDA. auto: on CUDA the one that ends the run first, as measured in the "
        "first step, compile time counted; stock elsewhere, on several ranks and in torch's deterministic mode."
    ),
]


def check_kl(*, kl: float, kl_in: str, kl_estimator: str | None, objective: str, old_logprobs: str) -> None:
    """Refuses a KL that would not pull the policy towards its reference, or that the loop cannot measure."""
    if kl_estimator is not None and (kl_in == "reward") != (kl_estimator == "k1"):
        raise ConfigError(
            "in the loss k1 has a mean gradient of 0, and in the reward k1 alone has the gradient of the KL, and here "
            f'kl_in = "{kl_in}" with kl_estimator = "{kl_estimator}"; take k2 or k3 in the loss, or k1 in the reward'
        )
    if kl == 0:
        return
    if objective == "distill":
        raise ConfigError(f'objective = "distill" has a teacher instead of a reference, and kl is {kl}; set kl = 0')
    if kl_in == "reward" and old_logprobs == "recomputed":
        raise ConfigError(
            'a KL in the reward reads the engine\'s log-probs, which old_logprobs = "recomputed" does without; set '
            'kl_in = "loss"'
        )


def check_divisor(*, normalizer: str | None, divisor: float | None) -> None:
    """Refuses a divisor without its normaliser, and vice versa."""
    if (normalizer == "constant") != (divisor is not None):
        raise ConfigError(
            f'divisor belongs to normalizer = "constant", and here normalizer = "{normalizer}" with divisor = '
            f"{divisor}; set both, or neither"
        )


def check_packed(*, layout: str, normalizer: str | None) -> None:
    """Refuses a mean over trees with the packed layout."""
    if layout == "packed" and normalizer == "tree_mean":
        raise ConfigError(
            'layout = "packed" has no trees, and normalizer = "tree_mean" averages over them; set another '
            'normalizer, or layout = "tree"'
        )


def check_importance(*, max_importance: float | None, min_importance: float | None, importance: str | None) -> None:
    """Refuses incomplete or contradictory bounds of importance weights."""
    if max_importance is None and not (min_importance is None and importance is None):
        raise ConfigError(
            f'importance weights need max_importance, and here it is unset with importance = "{importance}" and '
            f"min_importance = {min_importance}; set it, or leave all three out"
        )
    if min_importance is None or max_importance is None:
        return
    if min_importance > max_importance or not (importance or "").endswith("_mask"):
        raise ConfigError(
            f"min_importance is at most max_importance and belongs to masks, and here min_importance = "
            f'{min_importance} with max_importance = {max_importance} and importance = "{importance}"; lower it, or '
            "choose token_mask or sequence_mask"
        )
