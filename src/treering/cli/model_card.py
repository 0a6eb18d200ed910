"""Write the model card of a checkpoint: model, data, settings and measurements. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treering import metrics
from treering.cli.toml import pair, section
from treering.errors import TreeringError
from treering.extras import versions_of
from treering.report.run_data import Row, RunData, figures, held_out, number, read_run, section_of

_HERE = "path/to/this/folder"
_PACKAGES = ("treering", "torch", "transformers", "peft", "vllm")
_SECTIONS = ("rl", "train", "sampling", "optim", "lora", "teacher", "router")


def model_card(run_dir: Path, step: int, *, has_tokenizer: bool, takes_images: bool = False) -> str:
    """Return the card of a run's checkpoint, as Markdown with the hub's metadata.

    It has the settings and the figures up to this step; no rollouts, paths or environment variables. Files that cannot
    be read are skipped, so that the card never stops a run.

    Args:
        run_dir: folder of the run; `config.json` and `metrics.jsonl` are read.
        step: step of the checkpoint.
        has_tokenizer: whether the checkpoint has a tokenizer.
        takes_images: whether its model takes images.

    Example: for GRPO on Qwen/Qwen3-0.6B the first lines have "base_model: Qwen/Qwen3-0.6B" and "- grpo".
    """
    try:
        run = read_run(run_dir)
    except (OSError, TreeringError):
        run = RunData(name=run_dir.resolve().name, folder=run_dir, rows=(), config={}, notes=())
    rows = [row for row in run.rows if row["step"] <= step]
    versions = ", ".join(f"{name} {version}" for name, version in versions_of(_PACKAGES).items())
    parts = [
        _metadata(run.config, takes_images=takes_images),
        f"# {run.name}, step {step}",
        "Trained with Treering, which computes each shared token once and drafts rollouts from earlier ones.",
        _table(_facts(run.config) | {"steps": str(step)} | _measured(rows) | {"versions": versions}),
        f"## Load it\n\n{_loading(run.config, has_tokenizer=has_tokenizer, takes_images=takes_images)}",
        f"## Settings\n\n{_settings(run.config)}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _hub_base(config: Mapping[str, Any]) -> str | None:
    """Return the hub id of a run's base model; None for a folder or a random model.

    Only a hub id has a revision in a run's settings.
    """
    model = section_of(config, "model")
    return str(model["path"]) if model.get("path") and model.get("revision") else None


def _metadata(config: Mapping[str, Any], *, takes_images: bool) -> str:
    base = _hub_base(config)
    lines = [
        *([] if base is None else [f"base_model: {base}"]),
        f"library_name: {'peft' if _has_adapters(config) else 'transformers'}",
        f"pipeline_tag: {'image-text-to-text' if takes_images else 'text-generation'}",
        *["tags:", "- treering", f"- {_objective(config)}", *(["- lora"] if _has_adapters(config) else [])],
    ]
    return "\n".join(["---", *lines, "---"])


def _facts(config: Mapping[str, Any]) -> dict[str, str]:
    task, data, lora = (section_of(config, name) for name in ("task", "data", "lora"))
    facts = {"base model": _base_in_words(config)}
    if task:
        facts["task"] = (
            f"{_name(task['file'])}, reward {task.get('reward')}" if task.get("file") else str(task.get("kind"))
        )
    if data:
        facts["data"] = ", ".join(_name(file) for file in data.get("files", ())) or "generated"
    facts["objective"] = _objective(config)
    if _has_adapters(config):
        facts["adapters"] = f"LoRA of rank {lora['rank']}; the base weights are unchanged"
    return facts


def _measured(rows: list[Row]) -> dict[str, str]:
    measured = {}
    for words, name in (("mean reward", metrics.REWARD_MEAN), ("loss", metrics.LOSS)):
        values = [value for row in rows if (value := number(row.get(name))) is not None]
        if values:
            measured[words] = f"{values[0]:.4f} in the first step, {values[-1]:.4f} in the last"
    sharing = figures(rows)["sharing"]
    return measured | held_out(rows) | ({} if sharing is None else {"sharing": f"{sharing:.3f}"})


def _loading(config: Mapping[str, Any], *, has_tokenizer: bool, takes_images: bool) -> str:
    kind, package = ("AutoModelForCausalLM", "transformers")
    if takes_images:
        # It also loads adapters, for which peft has no class of this kind.
        kind = "AutoModelForImageTextToText"
    elif _has_adapters(config):
        kind, package = ("AutoPeftModelForCausalLM", "peft")
    lines = [f"from {package} import {kind}", "", f'model = {kind}.from_pretrained("{_HERE}")']
    if package == "peft":
        # Peft reads the base model's generation settings; the trained stop tokens are in this folder.
        lines.insert(1, "from transformers import GenerationConfig")
        lines.append(f'model.generation_config = GenerationConfig.from_pretrained("{_HERE}")')
    if has_tokenizer:
        lines.insert(1, "from transformers import AutoTokenizer")
        lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{_HERE}")')
    return "\n".join(["```python", *lines, "```"])


def _settings(config: Mapping[str, Any]) -> str:
    is_used = {"lora": _has_adapters(config), "teacher": bool(section_of(config, "teacher").get("path"))}
    lines: list[str] = []
    for name in _SECTIONS:
        values = {} if not is_used.get(name, True) else section_of(config, name)
        # Names of folders say more about a machine than about a model.
        shown = {key: value for key, value in values.items() if value is not None and key not in ("path", "revision")}
        own = [pair(key, value) for key, value in shown.items()]
        lines += [section(name, own)] if own else []
    return f"```toml{''.join(lines).rstrip()}\n```"


def _table(facts: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())])


def _base_in_words(config: Mapping[str, Any]) -> str:
    model, base = section_of(config, "model"), _hub_base(config)
    if base is not None:
        return f"{base} at {model['revision']}"
    return f"{_name(model['path'])}, a folder" if model.get("path") else "random weights"


def _objective(config: Mapping[str, Any]) -> str:
    teacher = section_of(config, "teacher")
    of_sft = "distill" if teacher.get("path") and teacher.get("weight") is None else "sft"
    return str(section_of(config, "rl").get("objective", of_sft if section_of(config, "train") else "unknown"))


def _has_adapters(config: Mapping[str, Any]) -> bool:
    return bool(section_of(config, "lora").get("rank"))


def _name(path: object) -> str:
    return Path(str(path)).name
