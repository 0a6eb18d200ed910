"""Find a model or tokenizer: in the folder that a setting names, or by its hub id in the Hugging Face cache.

The hub is not asked for what is on disk. The cache, HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN are those of
huggingface_hub.
"""

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from treering.config.model import DistillOptions, ModelConfig
from treering.data import DATA_VARIABLE, data_folder
from treering.data.formats.containers import did_you_mean
from treering.errors import InputError
from treering.extras import require

Wanted = Literal["model", "tokenizer"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_FILES = {"model": (*_SMALL_FILES, "*.safetensors"), "tokenizer": _SMALL_FILES}
_PICKLES = ("*.bin", "*.bin.index.json")
# Other formats of the same weights, and weights in their authors' layout.
_IGNORED = ("*/*", "consolidated*")


def locate(path: Path, folders: Sequence[Path]) -> Path:
    """Return `path` in the first of `folders` that has it; an absolute path stays as it is.

    Raises:
        InputError: no folder has it.

    Example: `a.jsonl` with folders `conf` and `data` is `conf/a.jsonl` if that exists, else `data/a.jsonl`.
    """
    for folder in folders:
        if (folder / path).exists():
            return folder / path
    listed = ", ".join(str(folder) for folder in folders)
    near = did_you_mean(folder / path for folder in folders)
    raise InputError(f"{path} is not in {listed}; {near}correct the path, or set {DATA_VARIABLE}")


def search_folders(config_dir: Path) -> list[Path]:
    """Return where relative paths are looked up: the configuration's folder, the current one, the real-data folder."""
    folder = data_folder()
    return list(dict.fromkeys([config_dir, Path(), *([] if folder is None else [folder])]))


def is_hub_id(name: str, folders: Sequence[Path]) -> bool:
    """Return whether a name is a model's hub id: ORGANISATION/NAME, and not a folder in any of `folders`.

    Example: "Qwen/Qwen3-0.6B" is one; "./Qwen/Qwen3-0.6B", "/models/qwen3" and "qwen3" are not.
    """
    return _HUB_ID.fullmatch(name) is not None and not any((folder / name).exists() for folder in folders)


def find_folder(
    name: str, folders: Sequence[Path], *, setting: str, revision: str | None = None, wanted: Wanted = "model"
) -> Path:
    """Return the folder of a model or tokenizer; a hub model that is not in the cache is downloaded first.

    Args:
        name: a path, looked up in `folders`, or a hub id.
        folders: folders to search.
        setting: name of the setting, for errors.
        revision: commit, branch or tag of a hub id; None: the newest of its main branch.
        wanted: "tokenizer" skips the weights.

    Raises:
        InputError: the folder does not exist and the hub does not have it or cannot be reached; or a folder with a
            revision.

    Example: `find_folder("Qwen/Qwen3-0.6B", [], setting="model.path")` ends in "snapshots/" and the commit.
    """
    if not is_hub_id(name, folders):
        if revision is not None:
            raise InputError(f"{setting} = {name!r} is a folder, but only hub ids have revisions; remove the revision")
        try:
            return locate(Path(name), folders)
        except InputError as error:
            raise InputError(f"{error}, or give a hub id such as Qwen/Qwen3-0.6B") from None
    listed = ", ".join(str(folder) for folder in folders)
    what = f"{setting} = {name!r} is not a folder{' in ' if listed else ''}{listed}"
    folder = _snapshot(name, revision, _FILES[wanted], what)
    if wanted == "model" and not any(folder.glob("*.safetensors")):
        folder = _snapshot(name, revision, _PICKLES, what)
        if not any(folder.glob("*.bin")):
            raise InputError(
                f"{setting} = {name!r} has no weights (.safetensors or .bin) in {folder}; run `hf download {name}` "
                "where there is a network, or correct the id"
            )
    return folder


def tokenizer_folder(name: str) -> Path:
    """Return the folder that `--tokenizer` names: a path as it is, or that of a hub id."""
    if not is_hub_id(name, [Path()]):
        return Path(name)
    return find_folder(name, [Path()], setting="--tokenizer", wanted="tokenizer")


def find_model(section: ModelConfig | DistillOptions, config_dir: Path, *, setting: str = "model.path") -> Path | None:
    """Return the folder of a section's model, found by `find_folder`; None if it names none."""
    if section.path is None:
        return None
    return find_folder(section.path, search_folders(config_dir), setting=setting, revision=section.revision)


def _snapshot(name: str, revision: str | None, patterns: Sequence[str], what: str) -> Path:
    require(f"the hub id {name}", "huggingface_hub")
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined, unused-ignore]

    def fetch(*, only_from_cache: bool) -> Path:
        found: str = snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(_IGNORED),
            local_files_only=only_from_cache,
        )
        return Path(found)

    if revision is not None and re.fullmatch("[0-9a-f]{40}", revision):
        # A commit never changes, so a cached one needs no network.
        with suppress(errors.LocalEntryNotFoundError):
            return fetch(only_from_cache=True)
    try:
        if not sys.stderr.isatty():
            disable_progress_bars()
        return fetch(only_from_cache=False)
    except Exception as error:  # from the hub's client, its transport, or the disk
        raise InputError(_reason(error, name, revision, what)) from error


def _reason(error: Exception, name: str, revision: str | None, what: str) -> str:
    from huggingface_hub import constants, errors

    ways = f"run `hf download {name}` where there is a network, or name the folder of a model"
    if isinstance(error, errors.GatedRepoError):
        return f"{what}, and it is gated on the hub; accept its terms there and log in with `hf auth login`, or {ways}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{what}, and the hub has no such id that you may read; correct it, or log in with `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{what}, and the hub has no revision {revision!r}; correct the revision"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        of = "" if revision is None else f" at revision {revision!r}"
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        return (
            f"{what}, and the cache {constants.HF_HUB_CACHE} has no complete model of that id{of} while {why}; {ways}"
        )
    return f"{what}, and it cannot be fetched from the hub ({type(error).__name__}: {error}); try again, or {ways}"
