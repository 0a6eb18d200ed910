"""Run `treering eval`: measure a checkpoint or a model on held-out data, as a run does, and print the metrics."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from treering.cli.corpus import Corpus, load_corpus
from treering.cli.display import PlainConsole, WorkProgress, facts_table, warnings_as_lines
from treering.cli.hub import find_folder, find_model
from treering.cli.models import choose_device, load_checkpoint
from treering.cli.options import EvalArguments
from treering.cli.sft_command import read_files, split_corpus
from treering.cli.train_engine import load_held_out, measure_rewards
from treering.cli.user_messages import only_results_on_stdout
from treering.config import RlConfig, SftConfig, load
from treering.config.record import load_written
from treering.errors import ConfigError, InputError, StateError
from treering.files.writing import CHECKPOINTS_FOLDER, read_facts, read_object
from treering.report.run_data import CONFIG_FILE
from treering.train.loop.checkpoint import saved_steps
from treering.train.loop.held_out import HeldOutLoss, Measure


def find_target(options: EvalArguments) -> tuple[Path, SftConfig | RlConfig]:
    """Return the folder of the weights that a command line names, and a configuration with its [eval] set.

    Raises:
        ConfigError, InputError: the run or model does not exist, or has no held-out data.
    """
    name, files, reward, overrides = options.name, options.file or [], options.reward, options.overrides or []
    weights, is_run = find_weights(name, options.step), is_a_run(name)
    written = _written(Path(name)) if is_run else {}
    is_prompts = reward is not None or "rl" in written
    if is_prompts and len(files) > 1:
        raise ConfigError(f"prompts are read from one file, but --file names {len(files)}; join them")
    names = [str(file.resolve()) if file.exists() else str(file) for file in files]
    data = [f"eval.file={json.dumps(names[0])}" if is_prompts else f"eval.files={json.dumps(names)}"] if names else []
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
        raise ConfigError(f"{name} is a model, which has no held-out data; name some with --file")
    if not config.eval.is_set:
        raise ConfigError(f"the run in {name} has no held-out data in [eval]; name some with --file")
    return weights, config


def is_a_run(name: str) -> bool:
    """Return whether a name is the folder of a run."""
    return (Path(name) / CHECKPOINTS_FOLDER).is_dir()


def find_weights(name: str, step: int | None) -> Path:
    """Return the folder of a run's checkpoint, or of a model.

    Args:
        name: folder of a run, or folder or hub id of a model.
        step: step of the run's checkpoint; None: the newest.

    Raises:
        InputError: the checkpoint or model does not exist, or a step was given for a model.
    """
    if is_a_run(name):
        return find_checkpoint(Path(name), step).resolve()
    if step is not None:
        raise InputError(f"--step names a checkpoint of a run, but {name} is a model; remove it")
    return find_folder(name, [Path()], setting="RUN_OR_MODEL").resolve()


def find_checkpoint(folder: Path, step: int | None) -> Path:
    """Find the newest checkpoint of a run, or that of a step, and check that it is whole.

    Raises:
        InputError: the run has none, or none of that step.
        StateError: it is damaged.
    """
    checkpoints = saved_steps(folder / CHECKPOINTS_FOLDER)
    if not checkpoints:
        raise InputError(f"{folder} has no checkpoints/step-...; name the run.dir of a run that has saved one")
    chosen = max(checkpoints) if step is None else step
    if chosen not in checkpoints:
        steps = ", ".join(map(str, checkpoints))
        raise InputError(f"{folder} has no checkpoint of step {step}; choose one of {steps}")
    try:
        read_facts(checkpoints[chosen])
    except StateError as error:
        raise StateError(f"{checkpoints[chosen]} is damaged ({error}); choose another with --step") from error
    return checkpoints[chosen]


def _written(folder: Path) -> Mapping[str, Any]:
    instead = f"name a checkpoint in {folder / CHECKPOINTS_FOLDER} instead, with --file"
    written = read_object(folder / CONFIG_FILE, fix=instead)
    # `report` needs num_steps, which is not a section.
    return {name: value for name, value in written.items() if name != "num_steps"}


def _of_model(
    weights: Path, data: Sequence[str], overrides: Sequence[str], *, is_prompts: bool
) -> SftConfig | RlConfig:
    """Return a configuration with only held-out data; nothing is trained."""
    path = f"model.path={json.dumps(str(weights))}"
    if is_prompts:
        task = data[0].replace("eval.file", "task.file", 1)
        return load(RlConfig, None, ["rl.num_steps=1", path, "task.kind=prompts", task, *data, *overrides])
    return load(
        SftConfig, None, ["train.num_steps=1", path, data[0].replace("eval.files", "data.files", 1), *data, *overrides]
    )


def _at(weights: Path, config: SftConfig | RlConfig) -> SftConfig | RlConfig:
    """Return the configuration with the tokenizer and stop tokens of the checkpoint.

    Checkpoints of adapters have no model configuration, so their base model is looked up again.
    """
    update: dict[str, Any] = {}
    has_tokenizer = (weights / "tokenizer.json").is_file()
    if has_tokenizer and (weights / CONFIG_FILE).is_file():
        update["model"] = config.model.model_copy(update={"path": str(weights), "revision": None})
    section = "data" if isinstance(config, SftConfig) else "task"
    if has_tokenizer:
        update[section] = getattr(config, section).model_copy(update={"tokenizer": str(weights)})
    return config.model_copy(update=update)


def run(options: EvalArguments) -> None:
    """Evaluate, and print the metrics as JSON or as a table.

    Raises:
        ConfigError, InputError, StateError, UnsupportedError: bad settings, data or weights.
    """
    # Transformers' progress bars would disturb ours.
    transformers_logging.disable_progress_bar()
    with only_results_on_stdout() as results:
        weights, config = find_target(options)
        console = PlainConsole(stderr=True)
        with warnings_as_lines(console), WorkProgress(console) as progress, ExitStack() as stack:
            measure = _measure(weights, config, stack)
            values = dict(measure(lambda phase, done, planned: progress.show(f"{phase} {done:,} of {planned:,}")))
        if options.json_output:
            print(json.dumps({"weights": str(weights), **values}, indent=2), file=results, flush=True)
            return
        cells = {name: f"{value:,}" if isinstance(value, int) else f"{value:.4f}" for name, value in values.items()}
        PlainConsole(file=results).print(facts_table("treering eval", {"weights": str(weights), **cells}))


def _measure(weights: Path, config: SftConfig | RlConfig, stack: ExitStack) -> Measure:
    device = choose_device(config.model.device)
    if isinstance(config, RlConfig):
        prompts = load_held_out(config, Path())
        assert prompts is not None, "find_target checks it"
        stack.callback(prompts.close)
        policy = load_checkpoint(weights, takes_images=prompts.has_images).to(device)
        return measure_rewards(config, prompts, lambda: policy)
    corpus = _held_out(config)
    model = load_checkpoint(weights, takes_images=corpus.has_images).to(device)
    return HeldOutLoss(model, corpus.tasks, compute=config.options, layout=config.train.layout)


def _held_out(config: SftConfig) -> Corpus:
    folder = find_model(config.model, Path())
    if config.eval.files:
        return read_files(config, config_dir=Path(), model=folder)
    corpus = load_corpus(config.data, config_dir=Path(), model=folder)
    _, held = split_corpus(config, corpus, config_dir=Path(), model=folder)
    assert held is not None, "find_target checks it"
    return held
