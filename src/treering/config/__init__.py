"""Typed TOML configurations: `load` reads any of them; each subcommand has a file in this folder."""

from treering.config.load import Config as Config
from treering.config.load import load as load
from treering.config.rl import RlConfig as RlConfig
from treering.config.sft import SftConfig as SftConfig
