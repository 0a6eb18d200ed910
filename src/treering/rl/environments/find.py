"""Finds an environment of your own: a class in a file or a module."""

import inspect
from collections.abc import Sequence
from pathlib import Path

from treering.errors import ConfigError
from treering.rl.environments.environment import Environment
from treering.rl.own_modules import load_own
from treering.rl.user_code import contained, in_words


def find_environment(name: str, folders: Sequence[Path] = (Path(),)) -> Environment:
    """The environment of "file.py:Name" or "package.module:Name".

    Name is a class of an `Environment`, or anything else that is called without arguments and returns one. Files and
    modules are looked up as those of rewards are.

    Raises:
        ConfigError: no such file, module or name, or code that raises, with its file and line.

    Example: `find_environment("calculator.py:Calculator", [Path("examples/environments")])`.
    """
    module, _, attribute = name.rpartition(":")
    if not (module and attribute):
        raise ConfigError(f"task.class reads file.py:Name or package.module:Name, got {name!r}; add the part it lacks")
    make = getattr(load_own("environment", name, folders), attribute, None)
    if not callable(make):
        raise ConfigError(f"task.class names a class, and {module} has none named {attribute!r}; check the spelling")
    try:
        with contained():
            found = make()
    except Exception as error:
        raise ConfigError(
            f"the environment {name!r} is made without arguments, and that raises {in_words(error)}; correct it"
        ) from error
    if not isinstance(found, Environment) and not inspect.iscoroutinefunction(getattr(found, "run", None)):
        raise ConfigError(
            f"an environment has tasks and a coroutine run(task, policy), and {name!r} is a {type(found).__qualname__} "
            "without; derive it from treering.rl.environments.Environment, or wrap it in ToolEnvironment or "
            "StepEnvironment"
        )
    return found  # type: ignore[no-any-return]
