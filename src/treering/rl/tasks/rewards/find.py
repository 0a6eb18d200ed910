"""Finds a reward: a ready one by name, or a function of your own in a file or a module."""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from types import ModuleType

from treering.errors import ConfigError
from treering.rl.tasks.rewards.named import NAMED_REWARDS
from treering.rl.user_code import contained, in_words


def find_reward(name: str, folders: Sequence[Path] = (Path(),)) -> Callable[..., object]:
    """The ready reward of that name, or the function of "file.py:function" or "package.module:function".

    Files are looked up in the folders in order. Modules are too, before the rest of Python's import path; the folders
    stay on the path of this process, because the code may import more when it is called.

    Raises:
        ConfigError: an unknown name (with the nearest ones), file, module or function, or code that cannot be imported
            (with its file and line).

    Example: `find_reward("exact_answer")` is `named.exact_answer`; `find_reward("rewards.py:short", [Path("conf")])` is
    `short` of `conf/rewards.py`.
    """
    if name in NAMED_REWARDS:
        return NAMED_REWARDS[name]
    module, _, function = name.rpartition(":")
    if not (module and function):
        near = difflib.get_close_matches(name, NAMED_REWARDS, n=3, cutoff=0.4) or list(NAMED_REWARDS)
        raise ConfigError(
            f"a reward is a known name, file.py:function or package.module:function, got {name!r}; nearest names: "
            f"{', '.join(near)}"
        )
    found = getattr(_load(name, module, folders), function, None)
    if not callable(found):
        what = "has no such name" if found is None else f"has a {type(found).__name__} of that name"
        raise ConfigError(f"a reward is a function, and {module} of {name!r} {what}; check the spelling")
    return found  # type: ignore[no-any-return]


def _load(name: str, module: str, folders: Sequence[Path]) -> ModuleType:
    file = _located(name, module, folders) if module.endswith(".py") else None
    own = [str(folder.absolute()) for folder in ([] if file is None else [file.parent]) + list(folders)]
    sys.path[:] = list(dict.fromkeys([*own, *sys.path]))
    try:
        with contained():
            importlib.invalidate_caches()
            return importlib.import_module(module) if file is None else _run_file(file)
    except Exception as error:
        raise ConfigError(
            f"the reward {name!r} is imported, and that raises {in_words(error)}; correct it, or the spelling; it is "
            f"looked up in {', '.join(own)} and on Python's path"
        ) from error


def _located(name: str, file: str, folders: Sequence[Path]) -> Path:
    found = next((folder / file for folder in folders if (folder / file).is_file()), None)
    if found is None:
        listed = ", ".join(str(folder.absolute()) for folder in folders)
        raise ConfigError(f"the reward {name!r} is a function of a file, and {file} is not in {listed}; check the path")
    return found.absolute()


def _run_file(file: Path) -> ModuleType:
    """Runs a file as a module of its own, whatever other modules its name has."""
    name = f"treering_reward_{blake2b(str(file).encode(), digest_size=4).hexdigest()}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Data classes and pickles look their module up.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
