"""`treering train`: a configuration in; a policy trained on its own rollouts, its checkpoints and metrics out.

Knows the arguments and what goes to stdout. A configuration is read before anything heavy is imported, so that a
mistake in it is told at once.
"""

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from treering.config import RlConfig, load


def run(config_path: Path, overrides: list[str], json_output: bool) -> None:
    """Trains as the configuration says and prints a summary to stdout, as JSON or as a table; the rest to stderr.

    Raises:
        ConfigError, InputError, StateError, UnsupportedError: see the parts that raise them.
    """
    config = load(RlConfig, config_path, overrides)
    from treering.cli.train.run import train
    from treering.cli.train.summary import as_table

    summary = train(config, beside=config_path.parent, console=Console(stderr=True, highlight=False))
    if json_output:
        print(json.dumps(asdict(summary), indent=2))
        return
    Console().print(as_table(summary))
