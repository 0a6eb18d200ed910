"""Which trainers of TRL `share_prefixes` takes, what it refuses and the fix that works, and how it replaces methods."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from treering.errors import StateError, UnsupportedError
from treering.families import FAMILIES
from treering.model.checks import dropout_of
from treering.ranks.setup import is_of_deepspeed

ROLLOUT_TRAINERS = ("GRPOTrainer", "RLOOTrainer")
"""Those that sample what they train on."""

TRAINERS = (*ROLLOUT_TRAINERS, "SFTTrainer", "DPOTrainer", "KTOTrainer", "DistillationTrainer")
"""Trainers of TRL whose padded batches run on trees; their subclasses too."""

PICTURE_TRAINERS = (*ROLLOUT_TRAINERS, "SFTTrainer", "DPOTrainer", "KTOTrainer")
"""Those of `TRAINERS` that are exact with models that take pictures."""

_LIGER_FAMILIES = (*(family.model_type for family in FAMILIES.values() if family.liger_activation), "gpt_oss")
"""The families whose layers by Liger compute a token alone, in forests as in batches. Its experts run on a device only,
so those of Mixtral and Qwen3 are not known to."""


def kind_of(trainer: Any) -> str:
    """Which of `TRAINERS` the trainer is.

    Raises:
        UnsupportedError: none of them.

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
    """Refuses a trainer that would not be exact, or is not known to be.

    Raises:
        UnsupportedError: names the setting, and the one that works.
        StateError: training has begun, or the trainer shares already.
    """
    name = type(trainer).__name__
    if hasattr(trainer, "_treering_shared_prefixes"):
        raise StateError(f"this {name} shares prefixes already; undo its handle before sharing again")
    if not isinstance(trainer.model, nn.Module) or _is_wrapped(trainer.model):
        raise StateError(
            f"{name} holds a model wrapped by {type(trainer.model).__name__}; call share_prefixes before "
            "trainer.train(), which wraps the patched model, and never pass the module inside a wrapper by hand"
        )
    _check_liger(trainer)
    if getattr(trainer.args, "neftune_noise_alpha", None):
        raise UnsupportedError(
            f"{name} has neftune_noise_alpha={trainer.args.neftune_noise_alpha}, which draws other noise for a shared "
            "token in each of its rows, where it is computed once; leave neftune_noise_alpha out"
        )
    fp8 = "mixed_precision='fp8'" if trainer.accelerator.mixed_precision == "fp8" else ""
    coarse = fp8 or ("load_in_8bit=True" if getattr(trainer.model, "is_loaded_in_8bit", False) else "")
    if coarse:
        raise UnsupportedError(
            f"{name} has {coarse}, which scales or splits values by the largest of a whole batch, so a token depends "
            "on the rows beside it: use bf16, or load_in_4bit, which quantises weights only"
        )
    _check_fsdp(trainer)
    _check_deepspeed(trainer)
    if getattr(trainer.accelerator, "parallelism_config", None) is not None:
        raise UnsupportedError(f"{name} splits sequences or layers by a parallelism_config; leave it out, or use DDP")
    if getattr(trainer, "_is_vlm", False):
        _check_pictures(trainer)


def _check_pictures(trainer: Any) -> None:
    name, kind = type(trainer).__name__, kind_of(trainer)
    if kind not in PICTURE_TRAINERS:
        raise UnsupportedError(
            f"{name} takes pictures, which are tested on trees in {', '.join(PICTURE_TRAINERS)}; give it the tokenizer "
            "of a model of text as processing_class, or train without share_prefixes"
        )
    if _zero_stage(trainer):
        raise UnsupportedError(
            f"{name} takes pictures under DeepSpeed, which are not tested together on trees; use DDP or FSDP2"
        )
    for setting in ("torch_compile", "activation_offloading"):
        if getattr(trainer.args, setting, False):
            raise UnsupportedError(
                f"{name} has {setting}=True, which is not tested with pictures on trees; set it to False"
            )


def _check_liger(trainer: Any) -> None:
    family = trainer.model.config.model_type
    if trainer.args.use_liger_kernel and family not in _LIGER_FAMILIES:
        raise UnsupportedError(
            f"{type(trainer).__name__} has use_liger_kernel=True, whose layers are tested on trees for "
            f"{', '.join(_LIGER_FAMILIES)}, and model type {family!r} is none of them; set use_liger_kernel=False"
        )


def _check_fsdp(trainer: Any) -> None:
    if not getattr(trainer, "is_fsdp_enabled", False):
        return
    version = trainer.accelerator.state.fsdp_plugin.fsdp_version
    if version != 2:
        raise UnsupportedError(
            f"{type(trainer).__name__} runs under FSDP{version}, which flattens weights of several layers, so parts "
            "cannot be called alone; use FSDP2: fsdp_version: 2 in Accelerate's configuration, or "
            "fsdp_config={'version': 2}"
        )


def _check_deepspeed(trainer: Any) -> None:
    if _zero_stage(trainer) < 3:
        return
    name = type(trainer).__name__
    if trainer.args.torch_compile:
        raise UnsupportedError(
            f"{name} has torch_compile=True under DeepSpeed ZeRO-3, whose hooks gather weights between layers, and the "
            "two are not tested together; set torch_compile=False, or use stage 2"
        )
    if kind_of(trainer) == "DistillationTrainer":
        raise UnsupportedError(
            f"{name} calls its teacher's decoder alone, whose weights DeepSpeed ZeRO-3 gathers in the order of "
            "the first calls, and comparing the first micro-batch changes that; use stage 2"
        )


def check_comparable(trainer: Any) -> None:
    """Refuses `verify_first` where gradients cannot be taken beside those that a step in backward takes.

    Raises:
        UnsupportedError: names the setting, and the ones that work.
    """
    name, stage = type(trainer).__name__, _zero_stage(trainer)
    kwargs = trainer.args.gradient_checkpointing_kwargs or {}
    is_reentrant = trainer.args.gradient_checkpointing and kwargs.get("use_reentrant", False)
    if is_reentrant and (stage or steps_in_backward(trainer.model)):
        host = "DeepSpeed" if stage else "an optimizer in backward"
        raise UnsupportedError(
            f"{name} recomputes by reentrant checkpointing under {host}, where torch takes no gradients but for a "
            "step; set gradient_checkpointing_kwargs={'use_reentrant': False}, or, with LoRA under ZeRO-3, where TRL "
            "sets it to True, verify_first=False"
        )
    config: Any = trainer.model.config
    if stage == 3 and (getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)):
        raise UnsupportedError(
            f"{name} trains experts, whose gradients DeepSpeed ZeRO-3 takes together, in a step only; set "
            "verify_first=False"
        )


def steps_in_backward(model: nn.Module) -> bool:
    """Whether torch's `_apply_optimizer_in_backward` updates a weight once its gradient is accumulated."""
    return any(hasattr(weight, "_in_backward_optimizers") for weight in model.parameters())


def _zero_stage(trainer: Any) -> int:
    """0 without DeepSpeed."""
    plugin = trainer.accelerator.state.deepspeed_plugin if getattr(trainer, "is_deepspeed_enabled", False) else None
    return 0 if plugin is None else int(plugin.zero_stage)


def models_of(trainer: Any) -> dict[str, nn.Module]:
    """The models that a trainer calls, by what they are: policy, and reference or teacher where it has one."""
    found: dict[str, nn.Module] = {"policy": trainer.model}
    for role, attribute in (("reference", "ref_model"), ("teacher", "teacher_model")):
        model = getattr(trainer, attribute, None)
        if model is not None and all(model is not other for other in found.values()):
            found[role] = model
    return found


def without_host(model: nn.Module) -> nn.Module:
    """The model inside the wrapper of `torch.compile` or DeepSpeed, which a reference has before training begins."""
    if is_of_deepspeed(type(model)):
        model = model._modules["module"]  # type: ignore[assignment]
    inner: nn.Module = model._modules.get("_orig_mod") or model
    return inner


def compiler_options(trainer: Any) -> dict[str, Any]:
    """What `torch_compile_backend`, `torch_compile_mode` and Accelerate's configuration say of the compiler."""
    given = trainer.accelerator.state.dynamo_plugin.to_kwargs()
    return {name: given[name] for name in ("backend", "mode", "options") if given.get(name) is not None}


def check_no_dropout(model: nn.Module, role: str) -> None:
    """Refuses dropout that training would make active: a shared token gets one mask where its rows get several.

    Raises:
        UnsupportedError: names the module, and the setting that works.
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
            f"apart, get several: set {fix}"
        )


def _is_wrapped(model: nn.Module) -> bool:
    """Whether the model is inside DDP or one of its kind, which hold it as `module`."""
    return "module" in model._modules and not hasattr(model, "config")


class Overrides:
    """What is replaced of one owner; the class of an object is not touched."""

    def __init__(self, owner: Any) -> None:
        """Replaces nothing yet."""
        self._owner = owner
        self._undo: list[Callable[[], None]] = []

    def replace(self, name: str, run: Callable[..., Any]) -> None:
        """Replaces what `name` calls; `run` gets the original, then the arguments of each call."""
        owner = self._owner
        original, own = getattr(owner, name), vars(owner).get(name)

        # Only what a function has: of a class, its attributes would follow.
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
        """Restores everything, the last first; a second call does nothing."""
        while self._undo:
            self._undo.pop()()
