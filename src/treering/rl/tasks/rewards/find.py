"""Finds a reward: a ready one by name, or a function of your own in a file or a module."""

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path

from treering.errors import ConfigError
from treering.rl.own_modules import load_own
from treering.rl.tasks.rewards.named import NAMED_REWARDS


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
    found = getattr(load_own("reward", name, folders), function, None)
    if not callable(found):
        what = "has no such name" if found is None else f"has a {type(found).__name__} of that name"
        raise ConfigError(f"a reward is a function, and {module} of {name!r} {what}; check the spelling")
    return found  # type: ignore[no-any-return]
