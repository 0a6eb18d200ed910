"""Check settings of verl that the tree engine cannot follow, and set up drafts from history for its rollouts.

verl 0.9.1 pins vLLM 0.24, which was not run here: drafts follow what verl's source says.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np

from treering.errors import ConfigError, InputError, UnsupportedError
from treering.integrations.vllm.vllm_settings import MAX_DRAFT, PROPOSER, speculative_config
from treering.types import PromptId, hash_of_prompt

if TYPE_CHECKING:
    from treering.history.store.store import HistoryStore

_MODEL = "actor_rollout_ref.model"
_ACTOR = "actor_rollout_ref.actor"
_LOSSES_OF_A_MICRO_BATCH = ("bypass_mode", "clip_cov", "geo_mean", "kl_cov")
"""Policy losses of verl 0.9.1 that average or select tokens within a micro-batch, so its rows change them."""

OPTIONS = {
    "calculate_sum_pi_squared": f"set {_ACTOR}.calculate_sum_pi_squared=False",
    "distillation_use_topk": "distil by log-probabilities, or unset VERL_ENGINE_VENDOR",
    "distillation_only": "distil by log-probabilities, or unset VERL_ENGINE_VENDOR",
    "force_group_size": "set actor_rollout_ref.actor.use_prefix_grouper=False, because trees share prompts already",
    "use_fused_kernels": f"set {_MODEL}.use_fused_kernels=False",
}
"""Requests of a verl batch beyond log-probabilities and entropies, by verl's name, and the setting that avoids each."""


GROUPS = "TREERING_VERL_GROUPS"
Grouping = Literal["as_dealt", "whole", "whole_mini_batches"]


def grouping(environment: Mapping[str, str] | None = None) -> Grouping:
    """Return where groups are made whole, from `TREERING_VERL_GROUPS`.

    Args:
        environment: variables by name; None: the process's own.

    Returns:
        "whole", the default: ranks swap rows within a pass. "whole_mini_batches": mini-batches also hold whole groups.
        "as_dealt": every row stays where verl has put it.

    Raises:
        ConfigError: another value.
    """
    value = (os.environ if environment is None else environment).get(GROUPS, "whole")
    if value not in get_args(Grouping):
        raise ConfigError(
            f"{GROUPS} must be whole, whole_mini_batches or as_dealt, got {value!r}; as_dealt leaves every row on "
            "its rank"
        )
    return cast(Grouping, value)


def check_settings(model_config: Any, engine_config: Any) -> None:
    """Refuse settings that trees would not follow exactly.

    Args:
        model_config: verl's `HFModelConfig`.
        engine_config: verl's `FSDPEngineConfig`.

    Raises:
        UnsupportedError: names the setting and the fix.

    Example: `strategy="fsdp"` is refused with `actor_rollout_ref.actor.strategy=fsdp2`.
    """
    strategy = _get(engine_config, "strategy")
    if strategy != "fsdp2":
        raise UnsupportedError(
            f"the tree engine calls parts of a model, which {_ACTOR}.strategy={strategy} does not allow: set "
            f"{_ACTOR}.strategy=fsdp2 (and the same for ref), or unset VERL_ENGINE_VENDOR"
        )
    size = _get(engine_config, "ulysses_sequence_parallel_size", 1)
    if size != 1:
        raise UnsupportedError(
            f"sequence parallelism ({_ACTOR}.ulysses_sequence_parallel_size={size}) cuts sequences across ranks, but a "
            "tree's tokens attend to tokens anywhere: set it to 1"
        )
    for section, config, name, why in _SWITCHES:
        if _is_on(_get(model_config if config == "model" else engine_config, name)):
            raise UnsupportedError(f"{section}.{name} is on: {why}; set it to False")
    hf_config = _get(model_config, "hf_config")
    if any(hasattr(hf_config, name) for name in ("vision_config", "audio_config", "thinker_config")):
        raise UnsupportedError(
            f"{type(hf_config).__name__} takes images or audio, which a forest of tokens cannot hold: train a text "
            "model, or unset VERL_ENGINE_VENDOR"
        )


_SWITCHES = (
    (_MODEL, "model", "use_fused_kernels", "Treering scores the head itself, in as little memory"),
    (_MODEL, "model", "use_liger", "its kernels replace layers and are not tested on trees"),
    (_MODEL, "model", "enable_activation_offload", "it is not tested on trees"),
    (_MODEL, "model", "tiled_mlp", "it is not tested on trees"),
    (_MODEL, "model", "mtp", "its layers predict more than the next token of a row"),
    (f"{_ACTOR}.fsdp_config", "engine", "pad_to_length", "forests are not padded"),
    (f"{_ACTOR}.fsdp_config", "engine", "qat", "quantised weights are not tested on trees"),
)


def check_batch(options: Mapping[str, Any], loss_function: Any) -> None:
    """Refuse a batch, or a loss, that trees would not follow exactly.

    Args:
        options: the batch's non-tensor values by name, including `global_batch_size`, None if verl sets none.
        loss_function: as verl passes it, a partial function with its `config`; None without one.

    Raises:
        UnsupportedError: names the setting and the fix.
    """
    for name, setting in OPTIONS.items():
        value = options.get(name)
        if value and not (name == "force_group_size" and value == 1):
            raise UnsupportedError(f"the tree engine does not support {name}={value}: {setting}")
    config = getattr(loss_function, "keywords", {}).get("config")
    if config is not None:
        _check_loss(config, has_batch_size=options.get("global_batch_size", 0) is not None)


def _check_loss(config: Any, *, has_batch_size: bool) -> None:
    mode = _get(_get(config, "policy_loss") or {}, "loss_mode", "vanilla")
    if mode in _LOSSES_OF_A_MICRO_BATCH:
        raise UnsupportedError(
            f"{_ACTOR}.policy_loss.loss_mode={mode} averages within a micro-batch, but trees regroup rows: "
            "use a loss that is normalised over the batch, such as vanilla, gspo, sapo or cispo"
        )
    aggregation = "seq-mean-token-mean" if mode == "sapo" else str(_get(config, "loss_agg_mode", ""))
    if aggregation.startswith("seq-mean") and not has_batch_size:
        raise UnsupportedError(
            f"{_ACTOR}.loss_agg_mode={aggregation} without global_batch_size divides by sequences of a micro-batch, "
            "which trees regroup: give the batch a global_batch_size, as verl's own trainers do"
        )
    is_by_horizon = aggregation == "seq-mean-token-sum-norm"
    if is_by_horizon and _get(config, "loss_scale_factor") is None:
        raise UnsupportedError(
            f"{_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm divides by the longest response of a micro-batch: set "
            f"{_ACTOR}.loss_scale_factor=N, such as the longest response allowed"
        )


def check_rows(position_ids: Any, multi_modal_inputs: Any) -> None:
    """Refuse rows with images, or with positions other than 0, 1, 2, ...

    Args:
        position_ids: verl's nested tensor, [B, tokens of the row].
        multi_modal_inputs: of the rows, if any.

    Raises:
        UnsupportedError: names the cause.
    """
    if any(multi_modal_inputs or ()):
        raise UnsupportedError("a row has images or audio, which a forest of tokens cannot hold: train on text")
    if position_ids.dim() != 2 or not _counts_from_zero(position_ids.values(), position_ids.offsets()):
        raise UnsupportedError(
            "position_ids must count the tokens before each one, but a row has others: leave them to verl's agent "
            "loops, and train a text model"
        )


def _counts_from_zero(positions: Any, offsets: Any) -> bool:
    """Return whether the positions of each row are 0, 1, 2, ..., by one comparison for all concatenated rows."""
    begins = offsets[:-1].repeat_interleave(offsets.diff())
    return bool(((positions + begins).diff() == 1).all()) and bool((positions[offsets[:-1]] == 0).all())


def _get(config: Any, name: str, default: Any = None) -> Any:
    value = config.get(name, default) if isinstance(config, Mapping) else getattr(config, name, default)
    return default if value is None else value


def _is_on(value: Any) -> bool:
    """Return whether a switch, or a group of settings with `enable` or `enabled`, is on."""
    if value is None or isinstance(value, bool):
        return bool(value)
    return bool(_get(value, "enable", False) or _get(value, "enabled", False))


def with_history_drafts(engine_kwargs: Mapping[str, Any] | None = None, *, max_draft: int = 16) -> dict[str, Any]:
    """Return verl's `rollout.engine_kwargs` with drafts from history for vLLM; everything else stays.

    Workers find the history in `TREERING_HISTORY` and need `VLLM_USE_V2_MODEL_RUNNER=0`.

    Args:
        engine_kwargs: by engine; vLLM's are under "vllm".
        max_draft: most tokens of a draft, 1 to 64.

    Raises:
        ConfigError: other speculative decoding or asynchronous scheduling is set, or a draft is too long.

    Example: `with_history_drafts()` is {"vllm": {"speculative_config": {"method": "custom_class", "model":
    "treering.integrations.vllm.HistoryProposer", "num_speculative_tokens": 16}, "async_scheduling": False}}.
    """
    if not 1 <= max_draft <= MAX_DRAFT:
        raise ConfigError(f"max_draft must be 1 to {MAX_DRAFT}, got {max_draft}; 16 is usual")
    given = dict(engine_kwargs or {})
    own = dict(given.get("vllm") or {})
    before = own.get("speculative_config")
    if before is not None and dict(before).get("model") != PROPOSER:
        raise ConfigError(
            f"vLLM has one source of drafts, but engine_kwargs.vllm.speculative_config is {before!r}: remove it"
        )
    if own.get("async_scheduling"):
        raise ConfigError(
            "drafts from history are made between steps, but engine_kwargs.vllm.async_scheduling=True begins a step "
            "earlier: remove it"
        )
    config = speculative_config(max_draft)
    return {**given, "vllm": {**own, "speculative_config": config, "async_scheduling": False}}


def prompt_key(row: Mapping[str, Any]) -> PromptId:
    """Return the id of a row's prompt, the same in every epoch: its source and its index in the dataset.

    verl's `uid` is new at every fetch, so it cannot identify a prompt.

    Args:
        row: of verl's dataset, with `extra_info.index`, and `data_source` if there are several.

    Raises:
        InputError: the row has no index.

    Example: `prompt_key({"data_source": "gsm8k", "extra_info": {"index": 7}})` is "gsm8k/7".
    """
    index = (row.get("extra_info") or {}).get("index")
    if index is None:
        raise InputError(
            "a row without extra_info.index has no stable prompt id: write the index into the dataset, as verl's "
            "preprocessing examples do, or let prompts be named by their tokens"
        )
    return f"{row.get('data_source', '')}/{index}"


def record_batch(
    store: "HistoryStore",
    prompts: Sequence[Any],
    responses: Sequence[Any],
    version: int,
    *,
    prompt_ids: Sequence[PromptId] | None = None,
) -> None:
    """Add the responses of a verl batch to a history, for its next `publish`.

    Args:
        store: store in the folder that `TREERING_HISTORY` names.
        prompts: token ids of each row without padding, such as `batch["prompts"].unbind()`.
        responses: of each row, likewise.
        version: policy version that sampled them, such as verl's `global_steps`.
        prompt_ids: id of each row, if requests name it; None: hashes of the prompts' tokens, by which the drafter finds
            prompts that no request names. verl's own agent loops name none.

    Raises:
        InputError: the lists have different lengths.

    Example: `record_batch(store, batch["prompts"].unbind(), batch["responses"].unbind(), version=3)`.
    """
    numbers = [len(given) for given in (prompts, responses, prompt_ids) if given is not None]
    if len(set(numbers)) > 1:
        raise InputError(f"prompts, responses and prompt_ids must have the same length, got {numbers}")
    for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        tokens = np.asarray(prompt, np.int32)
        prompt_id = hash_of_prompt(tokens.tolist()) if prompt_ids is None else prompt_ids[number]
        store.add(prompt_id, [np.asarray(response, np.int32)], version)
