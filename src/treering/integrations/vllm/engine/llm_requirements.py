"""What `VLLMEngine` needs of an LLM, and the refusals of what it would sample wrongly, each with the fix that works."""

from typing import Any, Literal, get_args

from torch import nn

from treering.errors import ConfigError, InputError, StateError, UnsupportedError
from treering.integrations.vllm.engine.sampling import Truncated
from treering.integrations.vllm.requirements import PROPOSER
from treering.model.wrappers import unwrap
from treering.types import is_count

EXTENSION = "treering.integrations.vllm.WorkerExtension"
_SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers")
Verification = Literal["rejection", "exact"]
"""rejection: vLLM's own; the distribution is right, and other drafts give other tokens. exact: a drafted position draws
from its row's generator, as a pass without drafts would, and drafts stay while they equal what is drawn; so tokens do
not depend on drafts. Only with vLLM's V1 runner on CPU, whose released builds
have no right rejection sampling above temperature 0."""


def check_llm(llm: Any, model: nn.Module) -> None:
    """Checks that an LLM can sample for a model, and that the engine can update it.

    Args:
        llm: a `vllm.LLM`.
        model: a Hugging Face causal language model.

    Raises:
        ConfigError: a setting that would give other log-probs, or none.
        InputError: the LLM was made for a model of another shape.
        StateError: the LLM runs requests of someone else.
        UnsupportedError: a setting that the engine is not made for.
    """
    config = llm.llm_engine.vllm_config
    _check_sampling(config)
    _check_extent(config)
    _check_shape(config.model_config.hf_text_config, model)
    if llm.llm_engine.has_unfinished_requests():
        raise StateError("an engine needs an LLM of its own, and this one runs requests; finish or abort them")


def has_extension(config: Any) -> bool:
    """Whether the LLM's workers answer the calls of `WorkerExtension`."""
    return bool(config.parallel_config.worker_extension_cls == EXTENSION)


def has_proposer(config: Any) -> bool:
    """Whether the LLM drafts from history."""
    speculative = config.speculative_config
    return speculative is not None and speculative.model == PROPOSER


def _check_sampling(config: Any) -> None:
    mode = config.model_config.logprobs_mode
    if mode != "processed_logprobs":
        raise ConfigError(
            f'log-probs are of the distribution that was sampled, and the LLM has logprobs_mode="{mode}"; make it with '
            'LLM(..., logprobs_mode="processed_logprobs")'
        )
    scheduler = config.scheduler_config
    if scheduler.async_scheduling:
        raise UnsupportedError(
            "VLLMEngine is not made for asynchronous scheduling; make the LLM with LLM(..., async_scheduling=False)"
        )
    if config.device_config.device_type == "cpu" and scheduler.enable_chunked_prefill:
        raise UnsupportedError(
            "vLLM's CPU runner fails when the prompt of a request with a seed is computed in parts; make the LLM with "
            "LLM(..., enable_chunked_prefill=False, max_num_batched_tokens=...) of at least max_model_len"
        )
    if has_proposer(config) and not has_extension(config):
        raise ConfigError(
            "updates refresh the history that vLLM drafts from, which its workers must answer; make the LLM with "
            f'LLM(..., worker_extension_cls="{EXTENSION}")'
        )


def _check_extent(config: Any) -> None:
    if config.parallel_config.world_size != 1:
        raise UnsupportedError(
            f"VLLMEngine is tested with one worker, and the LLM has {config.parallel_config.world_size}; make it "
            "without tensor and pipeline parallelism"
        )
    if config.model_config.quantization is not None:
        raise UnsupportedError(
            f'updates write plain weights, and the LLM has quantization="{config.model_config.quantization}"; make it '
            "without"
        )
    if config.load_config.load_format not in ("auto", "safetensors", "hf"):
        raise UnsupportedError(
            f'updates come as safetensors, and the LLM has load_format="{config.load_config.load_format}"; make it '
            'with load_format="auto"'
        )


def _check_shape(own: Any, model: nn.Module) -> None:
    trained: Any = unwrap(model).model
    for name in _SHAPE:
        here, there = getattr(own, name, None), getattr(trained.config.get_text_config(), name, None)
        if here != there:
            raise InputError(
                f"an LLM samples for the model that is trained, and its {name} is {here} where the model's is {there}; "
                "make both from the same folder"
            )
    if own.tie_word_embeddings and not trained.config.get_text_config().tie_word_embeddings:
        raise InputError(
            "a head that is trained by itself needs one in vLLM, and the LLM ties it to the embedding; make it from a "
            "folder with tie_word_embeddings = false"
        )


def check_engine_settings(config: Any, *, max_batch: object, truncated: object, version: object, seed: object) -> None:
    """Checks the settings of a `VLLMEngine`.

    Raises:
        ConfigError: an unknown `truncated`, a number that is none, or more rollouts at a time than the LLM runs.
    """
    if truncated not in get_args(Truncated):
        raise ConfigError(f"truncated is one of {', '.join(get_args(Truncated))}, got {truncated!r}; choose one")
    if not is_count(version, least=0):
        raise ConfigError(f"version of an engine is a whole number, at least 0, got {version!r}; correct it")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ConfigError(f"seed of an engine is a whole number, got {seed!r}; correct it")
    most = config.scheduler_config.max_num_seqs
    if max_batch is not None and not (is_count(max_batch, least=1) and max_batch <= most):
        raise ConfigError(
            f"max_batch is at least 1 and at most the LLM's max_num_seqs, {most}, got {max_batch!r}; correct it, or "
            "make the LLM with more"
        )


def set_verification(llm: Any, verification: str) -> None:
    """Makes the workers of an LLM verify drafts so; does nothing without drafts.

    Raises:
        ConfigError: an unknown verification, or "exact" for workers that do not answer.
        UnsupportedError: "exact" on another device or with another vLLM, or "rejection" where vLLM's own is wrong.
    """
    if verification not in get_args(Verification):
        raise ConfigError(f"verification is one of {', '.join(get_args(Verification))}, got {verification!r}")
    config = llm.llm_engine.vllm_config
    if config.speculative_config is None:
        return
    if has_extension(config):
        problems = [problem for problem in llm.collective_rpc("treering_verify", args=(verification,)) if problem]
        if problems:
            other = "exact" if verification == "rejection" else "rejection"
            raise UnsupportedError(f'verification="{verification}" is wrong here: {problems[0]}; set "{other}"')
    elif verification == "exact":
        raise ConfigError(
            'verification="exact" is installed by the LLM\'s workers; make the LLM with '
            f'LLM(..., worker_extension_cls="{EXTENSION}")'
        )
