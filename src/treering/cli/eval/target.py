"""What `treering eval` is asked for: a checkpoint of a run or a model, and the settings of its evaluation."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treering.cli.hub import find_folder
from treering.cli.push.staging import find_checkpoint
from treering.config import RlConfig, SftConfig, load
from treering.config.load import load_written
from treering.errors import ConfigError, InputError
from treering.report.run import CONFIG_FILE
from treering.train.loop.run import CHECKPOINTS_FOLDER


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is evaluated.

    Attributes:
        weights: folder of the checkpoint or model.
        config: with its [eval] set.
    """

    weights: Path
    config: SftConfig | RlConfig


def find_target(
    name: str, *, step: int | None, files: Sequence[Path], reward: str | None, overrides: Sequence[str]
) -> Target:
    """The target of a command line; arguments as for `command.run`.

    Raises:
        ConfigError, InputError: there is no such run or model, or nothing to evaluate it on.
    """
    weights, is_run = find_weights(name, step), is_a_run(name)
    written = _written(Path(name)) if is_run else {}
    data = _data_settings(files, is_prompts=reward is not None or "rl" in written)
    if reward is not None:
        data.append(f"task.reward={json.dumps(reward)}")
    config: SftConfig | RlConfig
    if is_run and (reward is None or "rl" in written):
        source = str(Path(name) / CONFIG_FILE)
        config_type: type[SftConfig | RlConfig] = RlConfig if "rl" in written else SftConfig
        written = {**written, "eval": {**written.get("eval", {}), **({"share": None} if files else {})}}
        config = _at(weights, load_written(config_type, written, [*data, *overrides], source=source))
    elif files:
        config = _of_model(weights, data, overrides, is_prompts=reward is not None)
    else:
        raise ConfigError(f"{name} is a model, which says nothing of held-out data; name some with --file")
    if not config.eval.is_set:
        raise ConfigError(f"the run in {name} has no [eval] that names held-out data; name some with --file")
    return Target(weights=weights, config=config)


def is_a_run(name: str) -> bool:
    """Whether a name is that of a run's folder."""
    return (Path(name) / CHECKPOINTS_FOLDER).is_dir()


def find_weights(name: str, step: int | None) -> Path:
    """The folder of a run's checkpoint, or of a model.

    Args:
        name: folder of a run, or folder or hub id of a model.
        step: of the run's checkpoint; None is the newest.

    Raises:
        InputError: there is no such checkpoint or model, or a step of a model.
    """
    if is_a_run(name):
        return find_checkpoint(Path(name), step).resolve()
    if step is not None:
        raise InputError(f"--step names a checkpoint of a run, and {name} is a model; leave it out")
    return find_folder(name, [Path()], setting="RUN_OR_MODEL").resolve()


def _written(folder: Path) -> Mapping[str, Any]:
    try:
        written = dict(json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"{folder / CONFIG_FILE} holds the settings of a run, and it cannot be read ({error}); name a checkpoint "
            f"in {folder / CHECKPOINTS_FOLDER} instead, with --file"
        ) from error
    # It stands beside the sections, for `watch`.
    return {name: value for name, value in written.items() if name != "num_steps"}


def _data_settings(files: Sequence[Path], *, is_prompts: bool) -> list[str]:
    if is_prompts and len(files) > 1:
        raise ConfigError(f"prompts are read from one file, and --file names {len(files)}; join them")
    names = [str(file.resolve()) if file.exists() else str(file) for file in files]
    if not names:
        return []
    return [f"eval.file={json.dumps(names[0])}" if is_prompts else f"eval.files={json.dumps(names)}"]


def _of_model(
    weights: Path, data: Sequence[str], overrides: Sequence[str], *, is_prompts: bool
) -> SftConfig | RlConfig:
    """A configuration whose only data are held out; nothing is trained."""
    path = f"model.path={json.dumps(str(weights))}"
    if is_prompts:
        task = data[0].replace("eval.file", "task.file", 1)
        return load(RlConfig, None, ["rl.num_steps=1", path, "task.kind=prompts", task, *data, *overrides])
    return load(
        SftConfig, None, ["train.num_steps=1", path, data[0].replace("eval.files", "data.files", 1), *data, *overrides]
    )


def _at(weights: Path, config: SftConfig | RlConfig) -> SftConfig | RlConfig:
    """The configuration with the tokenizer and the stop tokens that lie in the checkpoint.

    Checkpoints of adapters have no configuration of a model: then its base model is looked up again.
    """
    update: dict[str, Any] = {}
    has_tokenizer = (weights / "tokenizer.json").is_file()
    if has_tokenizer and (weights / CONFIG_FILE).is_file():
        update["model"] = config.model.model_copy(update={"path": str(weights), "revision": None})
    section = "data" if isinstance(config, SftConfig) else "task"
    if has_tokenizer:
        update[section] = getattr(config, section).model_copy(update={"tokenizer": str(weights)})
    return config.model_copy(update=update)
