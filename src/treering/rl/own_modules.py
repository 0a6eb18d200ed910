"""Imports code of the user's: a file or a module that the configuration names."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from types import ModuleType

from treering.errors import ConfigError
from treering.rl.user_code import contained, in_words


def load_own(what: str, name: str, folders: Sequence[Path] = (Path(),)) -> ModuleType:
    """The module of "file.py:name" or "package.module:name".

    Files are looked up in the folders in order. Modules are too, before the rest of Python's import path; the folders
    stay on the path of this process, because the code may import more when it is called.

    Args:
        what: is named, for errors: "reward" for one.
        name: see above.
        folders: see above.

    Raises:
        ConfigError: no such file or module, or code that cannot be imported (with its file and line).

    Example: `load_own("reward", "rewards.py:short", [Path("conf")])` is the module of `conf/rewards.py`.
    """
    module = name.rpartition(":")[0]
    file = _located(what, name, module, folders) if module.endswith(".py") else None
    own = [str(folder.absolute()) for folder in ([] if file is None else [file.parent]) + list(folders)]
    sys.path[:] = list(dict.fromkeys([*own, *sys.path]))
    try:
        with contained():
            importlib.invalidate_caches()
            return importlib.import_module(module) if file is None else _run_file(what, file)
    except Exception as error:
        raise ConfigError(
            f"the {what} {name!r} is imported, and that raises {in_words(error)}; correct it, or the spelling; it is "
            f"looked up in {', '.join(own)} and on Python's path"
        ) from error


def _located(what: str, name: str, file: str, folders: Sequence[Path]) -> Path:
    found = next((folder / file for folder in folders if (folder / file).is_file()), None)
    if found is None:
        listed = ", ".join(str(folder.absolute()) for folder in folders)
        raise ConfigError(f"the {what} {name!r} is in a file, and {file} is not in {listed}; check the path")
    return found.absolute()


def _run_file(what: str, file: Path) -> ModuleType:
    """Runs a file as a module of its own, whatever other modules its name has."""
    name = f"treering_{what}_{blake2b(str(file).encode(), digest_size=4).hexdigest()}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Data classes and pickles look their module up.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
