"""Optional packages: which extra of `treering` installs them, and the error that names it where one is missing.

Packages are looked up and not imported, so a check costs microseconds and loads no torch.
"""

from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from types import MappingProxyType

from treering.errors import MissingExtraError

CHAT = ("tokenizers", "jinja2")
"""Packages of `treering[chat]`, which reads chats without torch."""

TRAIN = ("torch", "transformers", "safetensors", *CHAT, "jaxtyping")
"""Packages of `treering[train]`."""

_EXTRAS = MappingProxyType(
    {
        **dict.fromkeys(CHAT, "chat"),
        **{
            "aiohttp": "serve",
            "PIL": "pictures",
            "liger_kernel": "liger",
            "math_verify": "math",
            "peft": "peft",
            "pyarrow": "datasets",
            "ray": "ray",
        },
        **{"trl": "trl", "verl": "verl", "vllm": "vllm"},
        **{"mlflow": "mlflow", "trackio": "trackio", "wandb": "wandb"},
    }
)
"""The extra of each package that needs less than `treering[train]`."""


def require(user: str, *packages: str) -> None:
    """Checks that the packages are installed.

    Args:
        user: what needs them; begins the message.
        packages: by import name, all of one extra and what it brings; none means all of `TRAIN`.

    Raises:
        MissingExtraError: some are missing.

    Example: without torch, `require("treering sft")` raises "treering sft needs torch: pip install 'treering[train]'".
    """
    missing = [package for package in packages or TRAIN if not is_installed(package)]
    if missing:
        # The small packages come with these two, and their names tell a reader little.
        names = [package for package in missing if package in ("torch", "transformers")] or missing
        extra = next((_EXTRAS[package] for package in packages if package in _EXTRAS), "train")
        raise MissingExtraError(f"{user} needs {' and '.join(names)}: pip install 'treering[{extra}]'")


def is_installed(package: str) -> bool:
    """Whether a package is installed; does not import it."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        # A finder that refuses the package, or an entry of sys.modules that is None.
        return False


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed, by the name that pip knows.

    Example: without vLLM, `versions_of(["numpy", "vllm"])` is `{"numpy": "2.3.5"}` or the like.
    """
    from importlib import metadata

    found = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
