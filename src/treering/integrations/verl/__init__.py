"""Treering inside verl: an engine that trains on trees, and settings for drafts from history in verl's vLLM rollouts.

    actor_rollout_ref.actor.strategy=fsdp2
    +ray_kwargs.ray_init.runtime_env.env_vars.VERL_ENGINE_VENDOR=treering

Append these lines to verl's command line. The last line is the opt-in: without it verl is unchanged, and only the small
file `plugin` is imported.
"""

from typing import TYPE_CHECKING

from treering.integrations.lazy import names_from

if TYPE_CHECKING:
    from treering.integrations.verl.verl_engine import TreeEngine as TreeEngine
    from treering.integrations.verl.verl_settings import prompt_key as prompt_key
    from treering.integrations.verl.verl_settings import record_batch as record_batch
    from treering.integrations.verl.verl_settings import with_history_drafts as with_history_drafts
else:
    _HOMES = {
        "TreeEngine": "verl_engine",
        "prompt_key": "verl_settings",
        "record_batch": "verl_settings",
        "with_history_drafts": "verl_settings",
    }
    __all__ = [*_HOMES]
    __getattr__ = names_from(__name__, _HOMES)
