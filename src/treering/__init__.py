"""Treering: every shared token is trained once, every rollout is drafted from earlier ones.

Public names are imported on first use, so a bare `import treering` loads no torch, no transformers and no numba.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from treering.extras import require

if TYPE_CHECKING:
    from treering import errors as errors
    from treering import families as families
    from treering import objectives as objectives
    from treering import ranks as ranks
    from treering import schedule as schedule
    from treering.config.engine import Sampling as Sampling
    from treering.config.steps import RouterLosses as RouterLosses
    from treering.engine.protocol import Request as Request
    from treering.engine.protocol import Rollout as Rollout
    from treering.engine.torch_engine import TorchEngine as TorchEngine
    from treering.history.draft.drafter import Drafter as Drafter
    from treering.history.draft.request_drafter import RequestDrafter as RequestDrafter
    from treering.history.draft_types import DraftRows as DraftRows
    from treering.history.store.history_reader import HistoryReader as HistoryReader
    from treering.history.store.store import HistoryStore as HistoryStore
    from treering.model.context import tree_attention as tree_attention
    from treering.model.forward import forward as forward
    from treering.model.forward import per_token_logps as per_token_logps
    from treering.model.patch import patch as patch
    from treering.model.teacher import score as score
    from treering.model.tree_model import TreeModel as TreeModel
    from treering.rl.advantages import tree_advantages as tree_advantages
    from treering.train.step import backward as backward
    from treering.tree.forest import Forest as Forest

    __version__: str

_HOMES = {
    "DraftRows": "treering.history.draft_types",
    "Drafter": "treering.history.draft.drafter",
    "Forest": "treering.tree.forest",
    "HistoryReader": "treering.history.store.history_reader",
    "HistoryStore": "treering.history.store.store",
    "Request": "treering.engine.protocol",
    "RequestDrafter": "treering.history.draft.request_drafter",
    "Rollout": "treering.engine.protocol",
    "RouterLosses": "treering.config.steps",
    "Sampling": "treering.config.engine",
    "TorchEngine": "treering.engine.torch_engine",
    "TreeModel": "treering.model.tree_model",
    "backward": "treering.train.step",
    "forward": "treering.model.forward",
    "patch": "treering.model.patch",
    "per_token_logps": "treering.model.forward",
    "score": "treering.model.teacher",
    "tree_advantages": "treering.rl.advantages",
    "tree_attention": "treering.model.context",
}
_MODULES = frozenset({"errors", "families", "objectives", "ranks", "schedule"})
_NEED_TRAIN = frozenset(
    {
        "RouterLosses",
        "TorchEngine",
        "TreeModel",
        "backward",
        "forward",
        "patch",
        "per_token_logps",
        "ranks",
        "score",
        "tree_attention",
    }
)
"""Names that need the packages of `treering[train]`."""

__all__ = [
    "DraftRows",
    "Drafter",
    "Forest",
    "HistoryReader",
    "HistoryStore",
    "Request",
    "RequestDrafter",
    "Rollout",
    "RouterLosses",
    "Sampling",
    "TorchEngine",
    "TreeModel",
    "__version__",
    "backward",
    "errors",
    "families",
    "forward",
    "objectives",
    "patch",
    "per_token_logps",
    "ranks",
    "schedule",
    "score",
    "tree_advantages",
    "tree_attention",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        if name in _NEED_TRAIN:
            require(f"treering.{name}")
        return import_module(f"treering.{name}")
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module 'treering' has no attribute {name!r}; public names: {', '.join(__all__)}")
    if name in _NEED_TRAIN:
        require(f"treering.{name}")
    value = getattr(import_module(_HOMES[name]), name)
    # Stored, so that later look-ups skip this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    try:
        return metadata.version("treering")
    except metadata.PackageNotFoundError:
        # A checkout on PYTHONPATH has no metadata; the local suffix shows that this is not a release.
        return "0.0.0+source"
