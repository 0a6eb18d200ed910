"""Create, check and update the LLM that a run samples with, in processes that end with this one."""

import copy
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from treering.engine.decoder.decoder_weights import WeightSource, bias_of, check_adapter, is_lora, plain_of, source_of
from treering.errors import ConfigError, InputError, StateError, UnsupportedError
from treering.extras import require
from treering.integrations.vllm.llm_requests import Truncated, VLLMLayers
from treering.integrations.vllm.vllm_settings import (
    CONFIG_VARIABLE,
    HISTORY_VARIABLE,
    PROPOSER,
    environment_with,
    speculative_config,
)
from treering.model.routers import layers_with_experts
from treering.model.tree_model import TreeModel, unwrap
from treering.types import is_count

EXTENSION = "treering.integrations.vllm.WorkerExtension"
_NO_EXPERTS_ON_CPU = (
    "vLLM's CPU build computes updated experts wrongly, because it packs their weights only when it starts; sample a "
    "mixture of experts with vLLM on a GPU, or train a dense model"
)
_SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers")
Verification = Literal["rejection", "exact"]
"""rejection: vLLM's own; the distribution is right, but tokens depend on the drafts. exact: a drafted position draws
from its row's generator, as a pass without drafts would, and a draft is kept while it equals the drawn token, so tokens
do not depend on drafts. Only for vLLM's V1 runner on CPU, whose released builds sample wrongly by rejection above
temperature 0."""


def check_llm(llm: Any, model: nn.Module) -> None:
    """Check that an LLM can sample for a model, and that the engine can update it.

    Args:
        llm: a `vllm.LLM`.
        model: a Hugging Face causal language model.

    Raises:
        ConfigError: a setting that would change or omit log-probs.
        InputError: the LLM was created for a model of another shape.
        StateError: the LLM runs other requests.
        UnsupportedError: a setting that the engine does not support.
    """
    config = llm.llm_engine.vllm_config
    _check_sampling(config)
    _check_extent(config)
    _check_shape(config.model_config.hf_text_config, model)
    if llm.llm_engine.has_unfinished_requests():
        raise StateError("an engine needs an idle LLM, but this one runs requests; finish or abort them")


def has_extension(config: Any) -> bool:
    """Return whether the LLM's workers answer the calls of `WorkerExtension`."""
    return bool(config.parallel_config.worker_extension_cls == EXTENSION)


def has_proposer(config: Any) -> bool:
    """Return whether the LLM drafts from history."""
    speculative = config.speculative_config
    return speculative is not None and speculative.model == PROPOSER


def routed_layers(config: Any, model: nn.Module) -> VLLMLayers | None:
    """Return the layers of a model whose routes the LLM returns; None for an LLM that returns none.

    Args:
        config: vLLM's configuration.
        model: a Hugging Face causal language model.

    Example: (4, [1, 2, 3]) for a Qwen3-MoE whose first layer is dense.
    """
    if not config.aux_output_config.enable_return_routed_experts:
        return None
    parts = TreeModel.of(model)
    return VLLMLayers(len(parts.layers), layers_with_experts(parts))


def _check_sampling(config: Any) -> None:
    mode = config.model_config.logprobs_mode
    if mode != "processed_logprobs":
        raise ConfigError(
            f'log-probs must be of the sampled distribution, but the LLM has logprobs_mode="{mode}"; make it with '
            'LLM(..., logprobs_mode="processed_logprobs")'
        )
    scheduler = config.scheduler_config
    if scheduler.async_scheduling:
        raise UnsupportedError(
            "VLLMEngine does not support asynchronous scheduling; create the LLM with LLM(..., async_scheduling=False)"
        )
    if config.device_config.device_type == "cpu" and scheduler.enable_chunked_prefill:
        raise UnsupportedError(
            "vLLM's CPU runner cannot compute a seeded request's prompt in parts; create the LLM with "
            "LLM(..., enable_chunked_prefill=False, max_num_batched_tokens=...) of at least max_model_len"
        )
    if has_proposer(config) and not has_extension(config):
        raise ConfigError(
            "weight updates refresh vLLM's history through its workers; create the LLM with "
            f'LLM(..., worker_extension_cls="{EXTENSION}")'
        )


def _check_extent(config: Any) -> None:
    if config.parallel_config.world_size != 1:
        raise UnsupportedError(
            f"VLLMEngine is tested with one worker, but the LLM has {config.parallel_config.world_size}; create it "
            "without tensor and pipeline parallelism"
        )
    if config.device_config.device_type == "cpu" and config.model_config.is_moe:
        raise UnsupportedError(_NO_EXPERTS_ON_CPU)
    if config.model_config.quantization is not None:
        raise UnsupportedError(
            f'updates write plain weights, but the LLM has quantization="{config.model_config.quantization}"; create '
            "it without quantization"
        )
    if config.load_config.load_format not in ("auto", "safetensors", "hf"):
        raise UnsupportedError(
            f'updates come as safetensors, but the LLM has load_format="{config.load_config.load_format}"; create '
            'with load_format="auto"'
        )


def _check_shape(own: Any, model: nn.Module) -> None:
    trained: Any = unwrap(model).model
    for name in _SHAPE:
        here, there = getattr(own, name, None), getattr(trained.config.get_text_config(), name, None)
        if here != there:
            raise InputError(
                f"the LLM must have the trained model's shape, but its {name} is {here} and the model's is {there}; "
                "create both from the same folder"
            )
    if own.tie_word_embeddings and not trained.config.get_text_config().tie_word_embeddings:
        raise InputError(
            "the model's head is trained separately, but the LLM ties it to the embedding; create it from a folder "
            "with tie_word_embeddings = false"
        )


def check_engine_settings(config: Any, *, max_batch: object, truncated: object, version: object, seed: object) -> None:
    """Check the settings of a `VLLMEngine`.

    Raises:
        ConfigError: an unknown `truncated`, a value that is not a number, or a batch above the LLM's limit.
    """
    if truncated not in get_args(Truncated):
        raise ConfigError(f"truncated must be one of {', '.join(get_args(Truncated))}, got {truncated!r}")
    if not is_count(version, least=0):
        raise ConfigError(f"version of an engine must be a whole number >= 0, got {version!r}")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ConfigError(f"seed of an engine must be a whole number, got {seed!r}")
    most = config.scheduler_config.max_num_seqs
    if max_batch is not None and not (is_count(max_batch, least=1) and max_batch <= most):
        raise ConfigError(
            f"max_batch must be 1 to the LLM's max_num_seqs, {most}, got {max_batch!r}; lower it, or "
            "create the LLM with more"
        )


def set_verification(llm: Any, verification: str) -> None:
    """Set how the workers of an LLM verify drafts; do nothing without drafts.

    Raises:
        ConfigError: an unknown verification, or "exact" without `WorkerExtension`.
        UnsupportedError: "exact" on another device or vLLM version, or "rejection" where vLLM's own is wrong.
    """
    if verification not in get_args(Verification):
        raise ConfigError(f"verification must be one of {', '.join(get_args(Verification))}, got {verification!r}")
    config = llm.llm_engine.vllm_config
    if config.speculative_config is None:
        return
    if has_extension(config):
        problems = [problem for problem in llm.collective_rpc("treering_verify", args=(verification,)) if problem]
        if problems:
            other = "exact" if verification == "rejection" else "rejection"
            raise UnsupportedError(f'verification="{verification}" does not work here: {problems[0]}; set "{other}"')
    elif verification == "exact":
        raise ConfigError(
            'verification="exact" is installed by the LLM\'s workers; create the LLM with '
            f'LLM(..., worker_extension_cls="{EXTENSION}")'
        )


Fingerprint: TypeAlias = tuple[tuple[int, int], ...]
"""Two sums of each weight's bits: equal for equal weights, and almost certainly different for others."""

_MEMORY = Path("/dev/shm")
_MAX_FILE_BYTES = 1 << 30
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def named_weights(model: nn.Module) -> Iterator[tuple[str, WeightSource]]:
    """Yield each weight by its checkpoint name, with LoRA to be merged; tied weights under each of their names.

    Experts that Hugging Face holds in one tensor come one by one.

    Raises:
        UnsupportedError: an adapter other than plain LoRA, adapters of experts, or experts that do not come apart.

    Example: a model with tied embeddings yields "model.embed_tokens.weight" and "lm_head.weight".
    """
    own = unwrap(model).model
    has_experts = _has_experts(own)
    for name, source in _weights_of(own, ""):
        if has_experts:
            yield from _as_saved(own, name, source)
        else:
            yield name, source


def _has_experts(model: nn.Module) -> bool:
    return any(weight.ndim > 2 for weight in model.parameters())


def _as_saved(model: nn.Module, name: str, source: WeightSource) -> Iterator[tuple[str, WeightSource]]:
    """Yield the parts of a weight, by the names that `save_pretrained` gives them."""
    from transformers.core_model_loading import revert_weight_conversion

    for part, weight in revert_weight_conversion(model, {name: source.weight.detach()}).items():
        if weight.ndim > 2:
            raise UnsupportedError(
                f"vLLM loads the weights of experts one by one, but {part} stays one tensor of shape "
                f"{list(weight.shape)}; train Mixtral, Qwen3-MoE or a dense model"
            )
        yield part, WeightSource(weight, source.lora)


def _weights_of(module: nn.Module, prefix: str) -> Iterator[tuple[str, WeightSource]]:
    if is_lora(module) and not hasattr(plain_of(module), "weight"):
        raise UnsupportedError(
            f"{prefix.rstrip('.')} has LoRA of experts (target_parameters), which is not merged for vLLM; target "
            "projections instead"
        )
    if is_lora(module) or hasattr(module, "modules_to_save"):
        check_adapter(module, prefix.rstrip("."))
        yield prefix + "weight", source_of(module)
        bias = bias_of(module) if hasattr(module, "bias") else None
        if bias is not None:
            yield prefix + "bias", WeightSource(bias)
        return
    for name, weight in module.named_parameters(recurse=False):
        yield prefix + name, WeightSource(weight)
    for name, child in module.named_children():
        yield from _weights_of(child, f"{prefix}{name}.")


def fingerprint(model: nn.Module) -> Fingerprint:
    """Return a fingerprint of the current weights; needs twice the memory of the largest matrix.

    Example: it changes when a single weight does, and when two weights are swapped.
    """
    with torch.no_grad():
        return tuple(_sums(_filled(source)) for _, source in named_weights(model))


@contextmanager
def checkpoint_of(model: nn.Module, *, has_tied_head: bool = True) -> Iterator[Path]:
    """Yield a folder with the model's current weights as safetensors, in shared memory if it fits; delete it on exit.

    A head tied to the embedding is written for updates, which would otherwise leave the old one in place. It is
    dropped for a start (`has_tied_head=False`): vLLM would untie a head that it finds, and hold it twice.

    Example: `with checkpoint_of(model) as folder: llm.collective_rpc("reload_weights", kwargs={"weights_path":
    str(folder)})`.
    """
    with tempfile.TemporaryDirectory(prefix="treering-weights-", dir=_temporary_root(model)) as name:
        left_out = None if has_tied_head else _tied_head(model)
        _write(((name, source) for name, source in named_weights(model) if name != left_out), Path(name))
        yield Path(name)


def _tied_head(model: nn.Module) -> str | None:
    """Return the name of the head if it is the embedding's weight."""
    config: Any = unwrap(model).model.config
    return "lm_head.weight" if config.get_text_config().tie_word_embeddings else None


def _write(weights: Iterable[tuple[str, WeightSource]], folder: Path) -> None:
    """Write files of about a gigabyte, so that the copy needs little memory."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    num_files = 0
    with torch.no_grad():
        for name, source in weights:
            tensors[name] = _filled(source).cpu()
            if sum(tensor.nbytes for tensor in tensors.values()) >= _MAX_FILE_BYTES:
                save_file(tensors, folder / f"model-{num_files:05}.safetensors")
                tensors, num_files = {}, num_files + 1
    if tensors:
        save_file(tensors, folder / f"model-{num_files:05}.safetensors")


def _filled(source: WeightSource) -> Tensor:
    target = torch.empty_like(source.weight, memory_format=torch.contiguous_format)
    source.fill(target)
    return target


def _temporary_root(model: nn.Module) -> Path | None:
    """Return shared memory if it has room; None: the system's temporary folder."""
    num_bytes = sum(source.weight.nbytes for _, source in _weights_of(unwrap(model).model, ""))
    has_room = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 2 * num_bytes
    return _MEMORY if has_room else None


def _sums(weight: Tensor) -> tuple[int, int]:
    # Integer sums wrap around, so they lose nothing to rounding in any order.
    bits = weight.reshape(-1).view(_INTEGERS[weight.itemsize])
    factors = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)
    return int(bits.sum(dtype=torch.int64)), int((bits * factors).sum())


_WATCH = """
import os, signal, sys
sys.stdin.buffer.read()
for pid, start in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        with open(f"/proc/{pid}/stat") as file:
            found = file.read().rsplit(")", 1)[1].split()[19]
        if found == start:
            os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass
"""
"""Wait until the pipe's other end closes, then kill each process whose start time still matches."""


def end_with_this_process(pids: Iterable[int]) -> subprocess.Popen[bytes] | None:
    """Start a small process that kills the given ones once this process has ended, however it ended; keep the result.

    Does nothing where /proc does not exist, and for processes that have ended.

    Example: after SIGKILL of this process, a child that would have lived on is gone too.
    """
    identities = [(str(pid), start) for pid in pids if (start := _start_of(pid)) is not None]
    if not identities:
        return None
    arguments = [part for identity in identities for part in identity]
    return subprocess.Popen(
        [sys.executable, "-S", "-c", _WATCH, *arguments], stdin=subprocess.PIPE, start_new_session=True
    )


def _start_of(pid: int) -> str | None:
    """Return when a process started, in kernel ticks; with its id this identifies it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return None


_BLOCK_SIZE = 32
"""Tokens of keys and values that are allocated at a time; prompts share only whole blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsInVLLM:
    """Settings of the drafter inside vLLM."""

    history: Path
    """Folder of a `HistoryStore`."""
    max_draft: int
    """Most tokens per draft."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Lines of the file that `TREERING_VLLM_CONFIG` names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMSettings:
    """Settings of an LLM; the rest follows from the model.

    Example: `LLMSettings(max_batch=16, max_model_len=512, num_slots=8192, dtype="float32")` holds 16 such rollouts.
    """

    max_batch: int
    """Rollouts that run at a time."""
    max_model_len: int
    """Most tokens of prompt and rollout together."""
    num_slots: int
    """Tokens whose keys and values fit."""
    dtype: str
    """Number format that vLLM computes in: "float32" or "bfloat16"."""
    max_prefill: int = 512
    """Most prompt tokens per pass; on CPU a prompt is never split, so a longer one raises it."""
    num_threads: int | None = None
    """Threads on CPU; None: vLLM's default, every core."""
    drafts: DraftsInVLLM | None = None
    """Drafts from history; None: no drafts."""


def make_llm(model: nn.Module, settings: LLMSettings) -> Any:
    """Return a `vllm.LLM` for `VLLMEngine` with the model's current weights; it ends with this process.

    Without drafts, the LLM of a mixture of experts returns routes, in vLLM's Model Runner V2.

    vLLM runs in spawned processes: its CPU worker fails if numba is already imported. They read this process's
    environment; variables set for them are restored.

    Args:
        model: a Hugging Face causal language model.
        settings: of the LLM.

    Raises:
        MissingExtraError: vLLM is not installed.
        UnsupportedError: a mixture of experts on CPU, or a model of which `named_weights` refuses a weight.
    """
    require("an engine of kind vllm", "vllm")
    own: Any = unwrap(model).model
    has_experts = _has_experts(own)
    has_routes = has_experts and settings.drafts is None
    with (
        checkpoint_of(model, has_tied_head=False) as folder,
        environment_with(_variables(settings, folder, has_routes=has_routes)),
    ):
        config = copy.deepcopy(own.config)
        # A model that was never saved does not name its class, and vLLM would fall back to a generic one.
        config.architectures = [type(own).__name__]
        config.save_pretrained(folder)
        import vllm
        from vllm.platforms import current_platform

        if has_experts and current_platform.is_cpu():
            raise UnsupportedError(_NO_EXPERTS_ON_CPU)
        others = {process.pid for process in multiprocessing.active_children()}
        llm = vllm.LLM(
            str(folder), **_arguments(own.config, settings, is_cpu=current_platform.is_cpu(), has_routes=has_routes)
        )
    started = {process.pid for process in multiprocessing.active_children()} - others
    # Keep the guard alive as long as the LLM.
    llm.treering_guard = end_with_this_process(pid for pid in started if pid is not None)
    return llm


def _arguments(config: Any, settings: LLMSettings, *, is_cpu: bool, has_routes: bool) -> dict[str, Any]:
    drafts = settings.drafts
    num_drafted = 0 if drafts is None else drafts.max_draft
    per_pass = settings.max_prefill + settings.max_batch * (1 + num_drafted)
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_batch,
        "max_num_batched_tokens": max(per_pass, settings.max_model_len) if is_cpu else per_pass,
        "enable_chunked_prefill": not is_cpu,
        # Compiling takes minutes on CPUs.
        "enforce_eager": is_cpu,
        "block_size": _BLOCK_SIZE,
        "kv_cache_memory_bytes": _num_blocks(settings, num_drafted)
        * _BLOCK_SIZE
        * _token_bytes(config, settings.dtype),
        "logprobs_mode": "processed_logprobs",
        "async_scheduling": False,
        "use_tqdm_on_load": False,
    }
    if drafts is not None:
        arguments["speculative_config"] = speculative_config(drafts.max_draft)
        arguments |= {"worker_extension_cls": EXTENSION, "per_request_spec_decode_metrics": "summary"}
    if has_routes:
        # vLLM keeps the routes of a cached prefix next to its keys and values.
        arguments |= {"enable_return_routed_experts": True, "enable_prefix_caching": True}
    return arguments


def _num_blocks(settings: LLMSettings, num_drafted: int) -> int:
    """Return the blocks for the tokens, for each rollout's partial block and drafts, and for one that vLLM reserves."""
    most = max(settings.num_slots, settings.max_model_len)
    return most // _BLOCK_SIZE + settings.max_batch * (2 + num_drafted // _BLOCK_SIZE) + 2


def _token_bytes(config: Any, dtype: str) -> int:
    """Return the bytes of one token's keys and values."""
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * num_heads * head_size * (4 if dtype == "float32" else 2))


def _variables(settings: LLMSettings, folder: Path, *, has_routes: bool) -> dict[str, str]:
    """Return the environment of vLLM's processes; write the file that they read at their start into the folder."""
    found = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Only V2 returns routes, and only V1 takes a drafter of ours.
        "VLLM_USE_V2_MODEL_RUNNER": "1" if has_routes else "0",
        # Standard output is reserved for the run's result.
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }
    if settings.num_threads is not None:
        found |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(settings.num_threads)}
    if settings.drafts is not None:
        file = folder / "drafts.toml"
        file.write_text("".join(f"{name} = {_toml(value)}\n" for name, value in settings.drafts.settings.items()))
        found |= {HISTORY_VARIABLE: str(settings.drafts.history.resolve()), CONFIG_VARIABLE: str(file)}
    return found


def _toml(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)
