"""Run a TRL training script with its trainer replaced by the one that shares prefixes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

from treering.errors import ConfigError
from treering.extras import require

_TRAINERS = {"dpo": "DPOTrainer", "grpo": "GRPOTrainer", "sft": "SFTTrainer"}
"""TRL's scripts and the trainer that each creates."""


@dataclass
class TreeArguments:
    """Options in addition to TRL's; a plain dataclass like TRL's own, because its parser makes flags of the fields."""

    tree_backend: str = field(default="auto", metadata={"help": "Attention backend of trees; auto picks the fastest."})
    group_batches: bool | None = field(
        default=None,
        metadata={
            "help": "Keep rollouts of a prompt, or rows of a task, together in micro-batches. Default: yes, unless "
            "gradients of rollouts would change."
        },
    )
    verify_first: bool = field(
        default=True, metadata={"help": "Compare the first micro-batch's gradients with the stock path's."}
    )


def run(arguments: list[str]) -> None:
    """Train as TRL's script does.

    Args:
        arguments: name of the script, then its own arguments and those of `TreeArguments`.

    Raises:
        ConfigError: an unknown script.
        UnsupportedError: a setting that would not be exact; names the flag.

    Example: `run(["sft", "--model_name_or_path", "model", "--dataset_name", "data", "--output_dir", "out"])`.
    """
    name = arguments[0]
    if name not in _TRAINERS:
        raise ConfigError(f"treering trl runs {', '.join(sorted(_TRAINERS))}, got {name!r}; name one of them")
    require(f"treering trl {name}", "torch", "transformers", "trl")
    import trl

    script = import_module(f"trl.scripts.{name}")
    prog = f"treering trl {name}"
    types = script.make_parser(prog=prog).dataclass_types
    *given, tree = trl.TrlParser([*types, TreeArguments], prog=prog).parse_args_and_config(arguments[1:])
    with _sharing(trl, _TRAINERS[name], tree):
        script.main(*given)


@contextmanager
def _sharing(trl: Any, trainer: str, tree: Any) -> Iterator[None]:
    """Replace `trl.SFTTrainer` or the like by the one that shares prefixes: TRL's scripts look it up when they run."""
    from treering.integrations.trl import trainers

    stock = getattr(trl, trainer)
    ours = partial(
        getattr(trainers, f"Tree{trainer}"),
        backend=tree.tree_backend,
        group_batches=tree.group_batches,
        verify_first=tree.verify_first,
    )
    setattr(trl, trainer, ours)
    try:
        yield
    finally:
        setattr(trl, trainer, stock)
