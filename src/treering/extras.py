"""Optional packages: the extra of `treering` that needs them, and the error that says how to install them.

Packages are looked up without an import, so a check takes microseconds and does not load torch.
"""

from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from types import MappingProxyType
from typing import NamedTuple

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
            "gguf": "fetch",
            "PIL": "images",
            "liger_kernel": "liger",
            "math_verify": "math",
            "peft": "peft",
            "pyarrow": "datasets",
            "ray": "ray",
        },
        **{"tinker": "tinker", "trl": "trl", "verl": "verl", "vllm": "vllm"},
        **{name: name for name in ("clearml", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")},
        **{"comet_ml": "comet-ml"},
    }
)
"""Extra by package, for packages that are not in `treering[train]`."""


def require(user: str, *packages: str) -> None:
    """Check that the packages are installed.

    Args:
        user: what needs the packages; the message begins with it.
        packages: import names of one extra and its dependencies; none means all of `TRAIN`.

    Raises:
        MissingExtraError: a package is missing.

    Example: without torch, `require("treering sft")` raises "treering sft needs torch: pip install 'torch>=2.10'".
    """
    missing = [package for package in packages or TRAIN if not is_installed(package)]
    if missing:
        # The small packages are installed with these two, and readers seldom know their names.
        names = [package for package in missing if package in ("torch", "transformers")] or missing
        extra = next((_EXTRAS[package] for package in packages if package in _EXTRAS), "train")
        raise MissingExtraError(f"{user} needs {' and '.join(names)}: {install_hint(extra)}")


def install_hint(extra: str) -> str:
    """Return the pip command that installs the missing packages of an extra.

    The command does not name `treering`, so it works for a checkout, a wheel and an index.

    Example: without aiohttp, `install_hint("serve")` is "pip install 'aiohttp<4,>=3.10'".
    """
    needed = [each for each in requirements() if each.extra == extra]
    found = versions_of(each.name for each in needed)
    missing = [each for each in needed if each.name not in found or satisfies(found[each.name], each.range) is False]
    # Without metadata the source is on the path, and the packages' version ranges are unknown.
    texts = [f"'{each.text}'" for each in missing or needed] or [f"-e '.[{extra}]' in the checkout of Treering"]
    return f"pip install {' '.join(texts)}"


class Requirement(NamedTuple):
    """A package that Treering requires.

    Attributes:
        name: name on the package index.
        text: name and version range, an argument of `pip install`.
        range: version range, such as ">=2.11"; "" for any release.
        extra: extra that requires the package; None for the core.
    """

    name: str
    text: str
    range: str
    extra: str | None


def requirements() -> list[Requirement]:
    """Return the requirements of this installation, extras included; empty if `treering` is not installed."""
    from importlib import metadata

    try:
        lines = metadata.requires("treering") or []
    except metadata.PackageNotFoundError:
        return []
    return [_requirement(line) for line in lines]


def _requirement(line: str) -> Requirement:
    text, _, marker = (part.strip() for part in line.partition(";"))
    name = text
    for end in "[<>=!~ (":
        name = name.partition(end)[0]
    extra = marker.partition("extra == ")[2][1:].partition(marker[-1:])[0] if "extra == " in marker else None
    return Requirement(name, text, text[len(name) :].partition("]")[2 if "[" in text else 0].strip(" ()"), extra)


def satisfies(version: str, range_: str) -> bool | None:
    """Return whether a release is in a version range; None without the package that compares versions."""
    try:
        # Installed with transformers.
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return None
    return SpecifierSet(range_).contains(version, prereleases=True)


def is_installed(package: str) -> bool:
    """Return whether a package is installed, without an import."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        # An import hook refuses the package, or its entry in sys.modules is None.
        return False


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed, by their name on the package index.

    Example: without vLLM, `versions_of(["numpy", "vllm"])` is, for instance, `{"numpy": "2.3.5"}`.
    """
    from importlib import metadata

    found = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
