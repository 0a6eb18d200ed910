"""Find data files that commands name, also by patterns, and show the progress of reading them."""

from collections.abc import Callable, Sequence
from glob import glob, has_magic
from pathlib import Path

from treering.cli.display import WorkProgress
from treering.cli.hub import locate
from treering.data import Renderer
from treering.data.cache.build_dataset import BuildProgress, OnBuild, ReadOptions, num_workers_here
from treering.data.cache.dataset import TokenDataset
from treering.data.cache.folder import cache_folder
from treering.data.cache.open import open_dataset
from treering.errors import InputError
from treering.metrics import METRICS_FILE
from treering.report.rollout_views import ROLLOUTS_FOLDER

OnFile = Callable[[str, BuildProgress], None]
"""Called with a file's name and the progress of reading it."""


def expanded(paths: Sequence[Path]) -> list[Path]:
    """Return the paths with patterns expanded, files by name; a pattern without a match stays as it is.

    Example: `part-*.jsonl` in a folder with `part-1.jsonl` and `part-0.jsonl` becomes `part-0.jsonl`, `part-1.jsonl`.
    """
    return [each for path in paths for each in _matches(path) or [path]]


def located(path: Path, folders: Sequence[Path]) -> list[Path]:
    """Locate a path, or the files that a pattern matches in the first of `folders` with a match.

    Raises:
        InputError: no folder has it.
    """
    found = next((found for folder in folders if (found := _matches(folder / path))), None)
    return found or [locate(path, folders)]


def read_file(
    path: Path,
    renderer: Renderer,
    options: ReadOptions,
    *,
    keeps_cache: bool = True,
    on_progress: OnBuild | None = None,
) -> TokenDataset:
    """Open a dataset with the machine's cache and processors.

    Raises:
        InputError: a bad file, or the folder of a run.
    """
    if (path / METRICS_FILE).is_file():
        raise InputError(
            f"{path} is the folder of a run; name the trajectories that `treering train` keeps in it, "
            f"{path / ROLLOUTS_FOLDER}, or other files"
        )
    return open_dataset(
        path,
        renderer,
        options,
        folder=cache_folder() if keeps_cache else None,
        on_progress=on_progress,
        num_workers=num_workers_here(),
    )


def show_build(progress: WorkProgress, name: str, build: BuildProgress) -> None:
    """Show how far the reading of a file is."""
    share = min(build.num_read / max(build.num_bytes, 1), 1.0)
    progress.show(f"{name}: {build.num_records:,} records read and tokenized", share)


def _matches(path: Path) -> list[Path]:
    if path.exists() or not has_magic(str(path)):
        return []
    return [Path(name) for name in sorted(glob(str(path)))]
