"""Typed TOML configurations: `load` reads any of them; each subcommand has a file in this folder.

Names are imported on first use, so that the tree step can read this room without pydantic.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treering.config.record import Config as Config
    from treering.config.record import load as load
    from treering.config.rl import RlConfig as RlConfig
    from treering.config.sft_config import SftConfig as SftConfig

_HOMES = {"Config": "record", "load": "record", "RlConfig": "rl", "SftConfig": "sft_config"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are {', '.join(_HOMES)}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
