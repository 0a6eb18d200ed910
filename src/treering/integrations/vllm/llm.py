"""The LLM that a run samples with: made in processes that end with this one, checked, and given new weights."""

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

from treering.engine.decoder.weights import WeightSource, bias_of, check_adapter, is_lora, source_of
from treering.errors import ConfigError, InputError, StateError, UnsupportedError
from treering.extras import require
from treering.integrations.vllm.llm_requests import Truncated
from treering.integrations.vllm.vllm_settings import (
    CONFIG_VARIABLE,
    HISTORY_VARIABLE,
    PROPOSER,
    environment_with,
    speculative_config,
)
from treering.model.tree_model import unwrap
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


Fingerprint: TypeAlias = tuple[tuple[int, int], ...]
"""Two sums of each weight's bits: equal for equal weights, and different with all but certainty for others."""

_MEMORY = Path("/dev/shm")
_MAX_FILE_BYTES = 1 << 30
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def named_weights(model: nn.Module) -> Iterator[tuple[str, WeightSource]]:
    """Each weight by its name in a checkpoint, LoRA to be added; tied weights under each of their names.

    Raises:
        UnsupportedError: an adapter that is no plain LoRA, or experts that Hugging Face holds in one tensor.

    Example: a model with tied embeddings yields "model.embed_tokens.weight" and "lm_head.weight".
    """
    yield from _weights_of(unwrap(model).model, "")


def _weights_of(module: nn.Module, prefix: str) -> Iterator[tuple[str, WeightSource]]:
    if is_lora(module) or hasattr(module, "modules_to_save"):
        check_adapter(module, prefix.rstrip("."))
        yield prefix + "weight", source_of(module)
        bias = bias_of(module) if hasattr(module, "bias") else None
        if bias is not None:
            yield prefix + "bias", WeightSource(bias)
        return
    for name, weight in module.named_parameters(recurse=False):
        if weight.ndim > 2:
            raise UnsupportedError(
                f"vLLM loads the weights of experts one by one, and {prefix}{name} holds many in one tensor; train a "
                "dense model, or sample with TorchEngine"
            )
        yield prefix + name, WeightSource(weight)
    for name, child in module.named_children():
        yield from _weights_of(child, f"{prefix}{name}.")


def fingerprint(model: nn.Module) -> Fingerprint:
    """Identifies the present weights; takes twice the memory of the largest matrix.

    Example: it changes when a single weight does, and when two weights are swapped.
    """
    with torch.no_grad():
        return tuple(_sums(_filled(source)) for _, source in named_weights(model))


@contextmanager
def checkpoint_of(model: nn.Module, *, has_tied_head: bool = True) -> Iterator[Path]:
    """A folder with the model's present weights as safetensors, in memory where there is room; deleted at the end.

    A head that is tied to the embedding is written for an update, which would leave the old one otherwise. It is left
    out for a start: vLLM unties a head that it finds, and holds it twice from then on.

    Example: `with checkpoint_of(model) as folder: llm.collective_rpc("reload_weights", kwargs={"weights_path":
    str(folder)})`.
    """
    with tempfile.TemporaryDirectory(prefix="treering-weights-", dir=_place(model)) as name:
        left_out = None if has_tied_head else _tied_head(model)
        _write(((name, source) for name, source in named_weights(model) if name != left_out), Path(name))
        yield Path(name)


def _tied_head(model: nn.Module) -> str | None:
    """The name of the head if it is the embedding's weight."""
    config: Any = unwrap(model).model.config
    return "lm_head.weight" if config.get_text_config().tie_word_embeddings else None


def _write(weights: Iterable[tuple[str, WeightSource]], folder: Path) -> None:
    """Writes files of about a gigabyte, so that the copy needs little memory of its own."""
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


def _place(model: nn.Module) -> Path | None:
    """Shared memory if it has room; None is the system's folder for temporary files."""
    num_bytes = sum(source.weight.nbytes for _, source in named_weights(model))
    has_room = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 2 * num_bytes
    return _MEMORY if has_room else None


def _sums(weight: Tensor) -> tuple[int, int]:
    # Sums of integers wrap around: they lose nothing to rounding, whatever the order.
    bits = weight.reshape(-1).view(_INTEGERS[weight.itemsize])
    places = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)
    return int(bits.sum(dtype=torch.int64)), int((bits * places).sum())


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
"""Reads until the pipe's other end is gone, then kills each process that is still the one that it was."""


def end_with_this_process(pids: Iterable[int]) -> subprocess.Popen[bytes] | None:
    """Starts a small process that kills these when this process has ended, however it did; keep the result.

    Does nothing where there is no /proc, and for processes that have ended.

    Example: after SIGKILL to this process, a child that would have lived on is gone too.
    """
    identities = [(str(pid), start) for pid in pids if (start := _start_of(pid)) is not None]
    if not identities:
        return None
    arguments = [part for identity in identities for part in identity]
    return subprocess.Popen(
        [sys.executable, "-S", "-c", _WATCH, *arguments], stdin=subprocess.PIPE, start_new_session=True
    )


def _start_of(pid: int) -> str | None:
    """When a process started, in the kernel's ticks: with its number this identifies it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return None


_BLOCK_SIZE = 32
"""Tokens of keys and values that are allocated at a time; a prompt shares whole blocks only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsInVLLM:
    """What the drafter inside vLLM is made with."""

    history: Path
    """Folder of a `HistoryStore`."""
    max_draft: int
    """Tokens per draft, at most."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The lines of the file that `TREERING_VLLM_CONFIG` names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMSettings:
    """The settings of an LLM; the rest follows from the model.

    Example: `LLMSettings(max_batch=16, max_model_len=512, num_slots=8192, dtype="float32")` holds 16 such rollouts.
    """

    max_batch: int
    """Rollouts that run at one time."""
    max_model_len: int
    """Longest prompt and rollout together, in tokens."""
    num_slots: int
    """Tokens whose keys and values fit."""
    dtype: str
    """What vLLM computes in: "float32" or "bfloat16"."""
    max_prefill: int = 512
    """Prompt tokens per pass, at most; on CPU a prompt is never split, so that a longer one counts."""
    num_threads: int | None = None
    """Threads on CPU; None leaves them to vLLM, which takes every core."""
    drafts: DraftsInVLLM | None = None
    """None drafts nothing."""


def make_llm(model: nn.Module, settings: LLMSettings) -> Any:
    """A `vllm.LLM` for `VLLMEngine`, started with the model's present weights; it ends with this process.

    vLLM runs in processes that this one spawns: its CPU worker fails where numba is imported already. They read this
    process's environment; the variables that are set for them are set back.

    Args:
        model: a Hugging Face causal language model.
        settings: see `LLMSettings`.

    Raises:
        MissingExtraError: vLLM is not installed.
    """
    require("an engine of kind vllm", "vllm")
    own: Any = unwrap(model).model
    with checkpoint_of(model, has_tied_head=False) as folder, environment_with(_variables(settings, folder)):
        config = copy.deepcopy(own.config)
        # A model that was never saved has no name of its class, and vLLM would take a general one.
        config.architectures = [type(own).__name__]
        config.save_pretrained(folder)
        import vllm
        from vllm.platforms import current_platform

        others = {process.pid for process in multiprocessing.active_children()}
        llm = vllm.LLM(str(folder), **_arguments(own.config, settings, is_cpu=current_platform.is_cpu()))
    started = {process.pid for process in multiprocessing.active_children()} - others
    # An attribute of the LLM, so that it lives as long.
    llm.treering_guard = end_with_this_process(pid for pid in started if pid is not None)
    return llm


def _arguments(config: Any, settings: LLMSettings, *, is_cpu: bool) -> dict[str, Any]:
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
    return arguments


def _num_blocks(settings: LLMSettings, num_drafted: int) -> int:
    """Blocks for the tokens, for the begun block of each rollout with its drafts, and for one that vLLM keeps."""
    most = max(settings.num_slots, settings.max_model_len)
    return most // _BLOCK_SIZE + settings.max_batch * (2 + num_drafted // _BLOCK_SIZE) + 2


def _token_bytes(config: Any, dtype: str) -> int:
    """Bytes of the keys and values of one token."""
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * num_heads * head_size * (4 if dtype == "float32" else 2))


def _variables(settings: LLMSettings, folder: Path) -> dict[str, str]:
    """The environment of vLLM's processes; a file that they read at their start goes into the folder."""
    found = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        # Standard output is the run's result.
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
