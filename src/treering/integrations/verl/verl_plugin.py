"""The `verl.plugins` entry point: verl imports this file in every process, and without the opt-in it does nothing.

verl picks an engine by device and vendor; `VERL_ENGINE_VENDOR` overrides the vendor. The tree engine is registered for
its own vendor, so it replaces none of verl's engines, and runs that do not name it never load it.
"""

import os
from collections.abc import Mapping
from importlib import import_module

VARIABLE, VENDOR = "VERL_ENGINE_VENDOR", "treering"

BACKENDS = ("fsdp", "fsdp2", "fsdp_turbo", "megatron", "veomni", "torchtitan", "automodel", "mindspeed")
"""Strategies of verl 0.9.1. The engine trains with fsdp2 and refuses the others, where verl would use its own."""

DEVICES = ("cuda", "npu", "cpu")


def is_chosen(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether the run asks for the tree engine.

    Args:
        environment: variables by name; None: the process's own.

    Example: `is_chosen({"VERL_ENGINE_VENDOR": "treering"})` is true, and `is_chosen({})` is not.
    """
    variables = os.environ if environment is None else environment
    return variables.get(VARIABLE, "") == VENDOR


def register() -> None:
    """Register the tree engine as verl's language-model engine for the vendor `treering`.

    If `TREERING_VERL_GROUPS=whole_mini_batches`, verl's actors use `GroupedWorker`.

    Raises:
        SystemExit: the engine cannot be imported. verl hides a plugin's exceptions and would train with its own engine,
            so the process exits instead.
    """
    try:
        registry = import_module("verl.workers.engine").EngineRegistry
        engine = import_module("treering.integrations.verl.verl_engine").TreeEngine
        # The engine refuses other values, because verl would hide an error raised here.
        if os.environ.get("TREERING_VERL_GROUPS") == "whole_mini_batches":
            worker = import_module("treering.integrations.verl.mini_batches").GroupedWorker
            import_module("verl.workers.engine_workers").ActorRolloutRefWorker.actor_worker_cls = worker
    except Exception as error:
        from treering.extras import install_hint

        raise SystemExit(
            f"{VARIABLE}={VENDOR} asks for Treering's engine, which cannot be imported ({error!r}): "
            f"{install_hint('verl')} on every node, or unset the variable"
        ) from error
    registry.register(model_type="language_model", backend=list(BACKENDS), device=list(DEVICES), vendor=VENDOR)(engine)


if is_chosen():
    register()
