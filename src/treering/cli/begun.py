"""What a run keeps from its first start where nothing is set: commits of hub ids, the form of chats, the step size."""

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import date as Date
from pathlib import Path
from typing import Any, TypeVar

from treering.cli.hub import find_model, is_hub_id, search_places
from treering.config import RlConfig, SftConfig
from treering.config.model import ModelConfig
from treering.config.rl_task import TaskConfig
from treering.config.sft import DataConfig
from treering.config.teacher import TeacherConfig
from treering.report.run import CONFIG_FILE

ConfigT = TypeVar("ConfigT", SftConfig, RlConfig)
SectionT = TypeVar("SectionT", ModelConfig, TeacherConfig)
ChatsT = TypeVar("ChatsT", DataConfig, TaskConfig)


def as_begun(config: ConfigT, config_dir: Path) -> ConfigT:
    """The configuration with what it leaves open as the run in its folder began, else as a run begins now.

    Hub ids get their commits as revisions, and chats a form and a date, so that a resumed run has the same model and
    the same prompts.

    Raises:
        InputError: see `find_folder`.

    Example: `path = "Qwen/Qwen3-0.6B"` gets `revision = "c1899de289a04d12100db370d81485cdf75e47ca"`.
    """
    first = _first_settings(config.run.dir)
    update: dict[str, Any] = {
        "model": _with_commit(config.model, "model", first, config_dir),
        "teacher": _with_commit(config.teacher, "teacher", first, config_dir),
    }
    if isinstance(config, SftConfig):
        update["data"] = with_chats(config.data, first.get("data", {}))
        if config.train.trees_per_step == "auto":
            size = first.get("train", {}).get("trees_per_step", "auto")
            update["train"] = config.train.model_copy(update={"trees_per_step": size})
    elif config.task.kind != "sums":
        update["task"] = with_chats(config.task, first.get("task", {}))
    return config.model_copy(update=update)


def with_chats(section: ChatsT, first: Mapping[str, Any]) -> ChatsT:
    """A section with the form of chats and the date that they write: as set, else as the run began, else today's.

    Args:
        section: with `template` and `date`.
        first: the settings of the section with which the run began; empty for a new run.

    Example: a run that began on 2026-01-31 with `template = "hf"` goes on with both.
    """
    template = first.get("template", "auto") if section.template == "auto" else section.template
    date = section.date
    if template not in ("plain", "raw"):
        with suppress(LookupError, ValueError, TypeError):
            date = date or Date.fromisoformat(first["date"])
        date = date or Date.today()
    return section.model_copy(update={"template": template, "date": date})


def _first_settings(run_dir: Path) -> dict[str, Any]:
    """The settings with which the run in a folder began, by section; empty for a new run."""
    try:
        found = dict(json.loads((run_dir / CONFIG_FILE).read_text(encoding="utf-8")))
        return {name: section for name, section in found.items() if isinstance(section, dict)}
    except (OSError, ValueError, TypeError):
        # A new run, or one whose settings are lost: then its identity says whether its data is still the same.
        return {}


def _with_commit(section: SectionT, name: str, first: Mapping[str, Any], config_dir: Path) -> SectionT:
    if section.path is None or not is_hub_id(section.path, search_places(config_dir)):
        return section
    before = first.get(name, {})
    if section.revision is None and before.get("path") == section.path:
        section = section.model_copy(update={"revision": before.get("revision")})
    folder = find_model(section, config_dir, setting=f"{name}.path")
    assert folder is not None, "the section names a model"
    return section.model_copy(update={"revision": folder.name})
