"""Check which TRL trainers `share_prefixes` can patch, name the fix for each refusal, and replace their methods."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from treering.errors import StateError, UnsupportedError
from treering.families import FAMILIES
from treering.model.checks import dropout_of
from treering.ranks.setup import is_of_deepspeed

ROLLOUT_TRAINERS = ("GRPOTrainer", "RLOOTrainer")
"""Trainers that sample their own training data."""

TRAINERS = (*ROLLOUT_TRAINERS, "SFTTrainer", "DPOTrainer", "KTOTrainer", "DistillationTrainer")
"""TRL trainers, including subclasses, whose padded batches run on trees."""

IMAGE_TRAINERS = (*ROLLOUT_TRAINERS, "SFTTrainer", "DPOTrainer", "KTOTrainer")
"""The `TRAINERS` that are exact with image models."""

_LIGER_FAMILIES = (*(family.model_type for family in FAMILIES.values() if family.liger_activation), "gpt_oss")
"""Families whose Liger layers compute each token independently, in forests as in batches. Liger's experts need a GPU,
so Mixtral's and Qwen3's are untested."""


def kind_of(trainer: Any) -> str:
    """Return the entry of `TRAINERS` that the trainer is.

    Raises:
        UnsupportedError: it is none of them.

    Example: a subclass of TRL's GRPOTrainer is a "GRPOTrainer".
    """
    for base in type(trainer).__mro__:
        if base.__name__ in TRAINERS and base.__module__.startswith("trl."):
            return base.__name__
    raise UnsupportedError(
        f"share_prefixes takes {', '.join(TRAINERS)} of TRL and their subclasses, got {type(trainer).__name__}; for "
        "another trainer with padded batches call treering.patch(model) before it wraps the model"
    )


def check_trainer(trainer: Any) -> None:
    """Refuse a trainer that would not be exact, or is not known to be.

    Raises:
        UnsupportedError: names the setting and the one that works.
        StateError: training has begun, or the trainer already shares.
    """
    name = type(trainer).__name__
    if hasattr(trainer, "_treering_shared_prefixes"):
        raise StateError(f"this {name} already shares prefixes; undo its handle before sharing again")
    if not isinstance(trainer.model, nn.Module) or _is_wrapped(trainer.model):
        raise StateError(
            f"{name} holds a model wrapped by {type(trainer.model).__name__}; call share_prefixes before "
            "trainer.train(), which wraps the patched model, and never pass the module inside a wrapper by hand"
        )
    _check_liger(trainer)
    if getattr(trainer.args, "neftune_noise_alpha", None):
        raise UnsupportedError(
            f"{name} has neftune_noise_alpha={trainer.args.neftune_noise_alpha}, which draws different noise in each "
            "row of a shared token, but a shared token is computed once; remove neftune_noise_alpha"
        )
    fp8 = "mixed_precision='fp8'" if trainer.accelerator.mixed_precision == "fp8" else ""
    coarse = fp8 or ("load_in_8bit=True" if getattr(trainer.model, "is_loaded_in_8bit", False) else "")
    if coarse:
        raise UnsupportedError(
            f"{name} has {coarse}, which scales or splits values by the largest of a whole batch, so a token depends "
            "on the other rows; use bf16, or load_in_4bit, which quantises only weights"
        )
    _check_fsdp(trainer)
    _check_deepspeed(trainer)
    if getattr(trainer.accelerator, "parallelism_config", None) is not None:
        raise UnsupportedError(f"{name} splits sequences or layers by a parallelism_config; remove it, or use DDP")
    if getattr(trainer, "_is_vlm", False):
        _check_images(trainer)


def _check_images(trainer: Any) -> None:
    name, kind = type(trainer).__name__, kind_of(trainer)
    if kind not in IMAGE_TRAINERS:
        raise UnsupportedError(
            f"{name} takes images, which are tested on trees in {', '.join(IMAGE_TRAINERS)}; pass a text model's "
            "tokenizer as processing_class, or train without share_prefixes"
        )
    if _zero_stage(trainer):
        raise UnsupportedError(
            f"{name} takes images under DeepSpeed, a combination that is not tested on trees; use DDP or FSDP2"
        )
    for setting in ("torch_compile", "activation_offloading"):
        if getattr(trainer.args, setting, False):
            raise UnsupportedError(
                f"{name} has {setting}=True, which is not tested with images on trees; set it to False"
            )


def _check_liger(trainer: Any) -> None:
    family = trainer.model.config.model_type
    if trainer.args.use_liger_kernel and family not in _LIGER_FAMILIES:
        raise UnsupportedError(
            f"{type(trainer).__name__} has use_liger_kernel=True, whose layers are tested on trees for "
            f"{', '.join(_LIGER_FAMILIES)}, but not for model type {family!r}; set use_liger_kernel=False"
        )


def _check_fsdp(trainer: Any) -> None:
    if not getattr(trainer, "is_fsdp_enabled", False):
        return
    version = trainer.accelerator.state.fsdp_plugin.fsdp_version
    if version != 2:
        raise UnsupportedError(
            f"{type(trainer).__name__} runs under FSDP{version}, which flattens weights of several layers, so layers "
            "cannot be called one by one; use FSDP2: fsdp_version: 2 in Accelerate's configuration, or "
            "fsdp_config={'version': 2}"
        )


def _check_deepspeed(trainer: Any) -> None:
    if _zero_stage(trainer) < 3:
        return
    name = type(trainer).__name__
    if trainer.args.torch_compile:
        raise UnsupportedError(
            f"{name} has torch_compile=True under DeepSpeed ZeRO-3, whose hooks gather weights between layers; the "
            "combination is not tested, so set torch_compile=False, or use stage 2"
        )
    if kind_of(trainer) == "DistillationTrainer":
        raise UnsupportedError(
            f"{name} calls only its teacher's decoder, whose weights DeepSpeed ZeRO-3 gathers in the order of the "
            "first calls, but comparing the first micro-batch changes that order; use stage 2"
        )


def check_comparable(trainer: Any) -> None:
    """Refuse `verify_first` where backward steps the optimizer, so gradients cannot be taken separately.

    Raises:
        UnsupportedError: names the setting and those that work.
    """
    name, stage = type(trainer).__name__, _zero_stage(trainer)
    kwargs = trainer.args.gradient_checkpointing_kwargs or {}
    is_reentrant = trainer.args.gradient_checkpointing and kwargs.get("use_reentrant", False)
    if is_reentrant and (stage or steps_in_backward(trainer.model)):
        host = "DeepSpeed" if stage else "an optimizer in backward"
        raise UnsupportedError(
            f"{name} uses reentrant checkpointing under {host}, where torch computes gradients only for a step; set "
            "gradient_checkpointing_kwargs={'use_reentrant': False}, or verify_first=False (with LoRA under ZeRO-3 TRL "
            "sets it to True)"
        )
    config: Any = trainer.model.config
    if stage == 3 and (getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)):
        raise UnsupportedError(
            f"{name} trains experts, whose gradients DeepSpeed ZeRO-3 computes together, only in a step; set "
            "verify_first=False"
        )


def steps_in_backward(model: nn.Module) -> bool:
    """Return whether torch's `_apply_optimizer_in_backward` updates a weight once its gradient is accumulated."""
    return any(hasattr(weight, "_in_backward_optimizers") for weight in model.parameters())


def _zero_stage(trainer: Any) -> int:
    """Return the ZeRO stage; 0 without DeepSpeed."""
    plugin = trainer.accelerator.state.deepspeed_plugin if getattr(trainer, "is_deepspeed_enabled", False) else None
    return 0 if plugin is None else int(plugin.zero_stage)


def models_of(trainer: Any) -> dict[str, nn.Module]:
    """Return the models that a trainer calls by role: policy, and reference or teacher if it has one."""
    found: dict[str, nn.Module] = {"policy": trainer.model}
    for role, attribute in (("reference", "ref_model"), ("teacher", "teacher_model")):
        model = getattr(trainer, attribute, None)
        if model is not None and all(model is not other for other in found.values()):
            found[role] = model
    return found


def without_host(model: nn.Module) -> nn.Module:
    """Return the model inside the wrapper of `torch.compile` or DeepSpeed, which a reference has before training."""
    if is_of_deepspeed(type(model)):
        model = model._modules["module"]  # type: ignore[assignment]
    inner: nn.Module = model._modules.get("_orig_mod") or model
    return inner


def compiler_options(trainer: Any) -> dict[str, Any]:
    """Return the compiler options of `torch_compile_backend`, `torch_compile_mode` and Accelerate's configuration."""
    given = trainer.accelerator.state.dynamo_plugin.to_kwargs()
    return {name: given[name] for name in ("backend", "mode", "options") if given.get(name) is not None}


def check_no_dropout(model: nn.Module, role: str) -> None:
    """Refuse dropout that training would activate: a shared token would get one mask where its rows get several.

    Raises:
        UnsupportedError: names the module and the setting that works.
    """
    for name, module in model.named_modules():
        setting, rate = dropout_of(module)
        if rate <= 0:
            continue
        fix = "the dropout settings of the model and its adapter to 0"
        if "lora_dropout" in name:
            fix = "lora_dropout=0 in LoraConfig (--lora_dropout 0 on the command line)"
        elif setting == "attention_dropout":
            fix = "model_init_kwargs={'attention_dropout': 0.0}, or load the model with attention_dropout=0.0"
        raise UnsupportedError(
            f"the {role} has dropout {rate} at {name!r}, which gives a shared token one mask where its rows, trained "
            f"separately, get several; set {fix}"
        )


def _is_wrapped(model: nn.Module) -> bool:
    """Return whether the model is inside DDP or a similar wrapper that holds it as `module`."""
    return "module" in model._modules and not hasattr(model, "config")


class Overrides:
    """Replaced methods of one object; its class is left unchanged."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._undo: list[Callable[[], None]] = []

    def replace(self, name: str, run: Callable[..., Any]) -> None:
        """Replace the method `name`; `run` gets the original, then the arguments of each call."""
        owner = self._owner
        original, own = getattr(owner, name), vars(owner).get(name)

        # Copy only a function's attributes: copying those of a class would shadow its methods.
        @wraps(original, updated=())
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return run(original, *args, **kwargs)

        def restore() -> None:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        setattr(owner, name, replaced)
        self._undo.append(restore)

    def undo(self) -> None:
        """Restore everything, last replacement first; a second call does nothing."""
        while self._undo:
            self._undo.pop()()
