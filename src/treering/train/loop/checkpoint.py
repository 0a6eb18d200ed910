"""Checkpoints: folders that Hugging Face loads as a model, plus the state that makes a resumed run exact.

A checkpoint holds weights, optimizer state and torch's random state; `CheckpointStore` finds the newest complete one.
`treering.files.atomic` makes a folder appear whole or not at all. Reading one runs no code from it: weights are
safetensors, and torch unpickles the state with `weights_only=True`, which knows tensors and plain values alone.
"""

import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from treering.errors import StateError, UnsupportedError
from treering.files.atomic import clear_unfinished, draft_path, read_facts, remove, write_folder
from treering.files.writing import allocate, writing
from treering.ranks.group import RankGroup
from treering.ranks.state import split_state, whole_state_dict, write_shards
from treering.ranks.together import write_together
from treering.train.loop.adapters import adapter_tensors, has_adapter, save_adapter
from treering.train.loop.restore import SHARDS_FOLDER, STATE_FILE, random_state, restore
from treering.train.loop.resumable import ReportT, Resumable

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Of a tokenizer, and of the processor of pictures beside it."""
_PREFIX = "step-"
# Anything else in the folder belongs to the user, such as a copy named step-000123-best.
CHECKPOINT_NAME = re.compile(rf"{_PREFIX}\d{{6,}}")

Identity = Mapping[str, str | int | float | bool | None]
"""The settings that identify a run: name to value, in JSON types."""


class Gathered(NamedTuple):
    """The whole weights of a sharded model, and what the ranks do once the folder for them is there."""

    weights: Mapping[str, Tensor]
    begin: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStore:
    """The checkpoints of one run, `step-000123` and so on in one folder.

    Attributes:
        folder: created with the first checkpoint.
        identity: of the run; a checkpoint of another run is refused.
        keep: number of newest checkpoints to keep; at least 1.
        tokenizer: folder whose tokenizer files are copied into each checkpoint, or None.
        hints: folder with one file of hints (`Resumable`) per checkpoint, separate from the checkpoints so that damage
            to it does not affect them; None keeps no hints.
        group: the ranks of a sharded model, which save and restore together in a folder that all of them see.
        card: gives the text of README.md, the model card, for the step of a checkpoint; None writes none.

    Example: with keep=2, saving at steps 10, 20 and 30 leaves `step-000020` and `step-000030`.
    """

    folder: Path
    identity: Identity
    keep: int = 2
    tokenizer: Path | None = None
    hints: Path | None = None
    group: RankGroup = field(default_factory=RankGroup)
    card: Callable[[int], str] | None = None

    def save(self, loop: Resumable[ReportT]) -> Path:
        """Writes a checkpoint of the loop and removes those beyond `keep`; returns the checkpoint's folder.

        Raises:
            UnsupportedError: not a Hugging Face model, such as a PEFT model around one.
            StateError: the disk is full, or the folder cannot be written; earlier checkpoints are unchanged.
        """
        model = loop.model
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedError(
                f"checkpoints hold Hugging Face models, and this is {type(model).__name__}; merge adapters "
                "first, or add them with the model's own add_adapter"
            )
        if self.group.size > 1:
            return self._save_together(loop, model)
        self._write(loop, model, {"loop": loop.state(), "random": random_state()}, None)
        return checkpoint_path(self.folder, loop.num_steps_done)

    def _save_together(self, loop: Resumable[ReportT], model: PreTrainedModel) -> Path:
        """Rank 0 writes what one rank would, from gathered weights; each rank writes its part of the sharded state."""
        weights, shards = whole_state_dict(model, trained_only=has_adapter(model)), dict[str, Tensor]()
        state = split_state({"loop": loop.state(), "random": random_state()}, shards)
        target = checkpoint_path(self.folder, loop.num_steps_done)
        write_together(
            self.group,
            make=lambda begin: self._write(loop, model, state, Gathered(weights, begin)),
            write_own=lambda: write_shards(shards, draft_path(target) / SHARDS_FOLDER),
        )
        return target

    def _write(
        self, loop: Resumable[ReportT], model: PreTrainedModel, state: dict[str, Any], gathered: Gathered | None
    ) -> None:
        """Writes a checkpoint of the model, or of its gathered weights, and tidies up."""
        target = checkpoint_path(self.folder, loop.num_steps_done)
        weights = model.state_dict() if gathered is None else gathered.weights
        if has_adapter(model):
            weights = adapter_tensors(model, weights)
        num_bytes = num_tensor_bytes(weights) + num_tensor_bytes(state)

        def fill(draft: Path) -> None:
            with told_why(draft / STATE_FILE, num_bytes):
                if gathered is not None:
                    gathered.begin()
                if has_adapter(model):
                    save_adapter(model, weights, draft)
                else:
                    model.save_pretrained(draft, state_dict=None if gathered is None else gathered.weights)
                torch.save(state, draft / STATE_FILE)
            _copy_tokenizer(self.tokenizer, draft)
            if self.card is not None:
                (draft / "README.md").write_text(self.card(loop.num_steps_done), encoding="utf-8")

        # Hints come first, so that a complete checkpoint has its hints even if this process is killed.
        if self.hints is not None:
            with writing(self.hints):
                self.hints.mkdir(parents=True, exist_ok=True)
            loop.save_hints(self.hints / target.name)
        with writing(target, num_bytes):
            write_folder(target, fill, {"step": loop.num_steps_done, "identity": dict(self.identity)})
            # Later checkpoints are damaged: otherwise this run would have resumed from them.
            self._remove(path for path in self._newest_first() if _step_of(path) > loop.num_steps_done)
            self._remove_leftovers(loop.num_steps_done)

    def restore_newest(self, loop: Resumable[ReportT]) -> int | None:
        """Loads the newest complete checkpoint into the loop, bitwise; one warning names the damaged ones.

        It may be of another number of ranks.

        Returns:
            The step to resume from, or None if there is no checkpoint.

        Raises:
            StateError: all checkpoints are damaged, the newest complete one is of another run, or the folder cannot be
                written.
        """
        chosen = self._choose() if self.group.rank == 0 else None
        chosen = self.group.gather(chosen)[0]
        if chosen is None:
            return None
        restore(chosen, loop)
        if self.hints is not None:
            loop.load_hints(self.hints / chosen.name)
        if self.group.rank == 0:
            with writing(self.folder):
                self._remove_leftovers(loop.num_steps_done)
        return loop.num_steps_done

    def _choose(self) -> Path | None:
        """The newest complete checkpoint, of this run."""
        damaged: list[str] = []
        for checkpoint in self._newest_first():
            try:
                identity = _identity_of(checkpoint)
            except StateError as error:
                damaged.append(str(error))
                continue
            self._warn(damaged, checkpoint)
            check_identity(identity, self.identity, where=checkpoint)
            return checkpoint
        if damaged:
            raise StateError(
                f"resuming needs one whole checkpoint in {self.folder}, and all are damaged ({'; '.join(damaged)}); "
                "restore one from a copy, or remove the run folder to start again"
            )
        return None

    def _newest_first(self) -> list[Path]:
        return sorted((path for path in _named(self.folder) if path.is_dir()), key=_step_of, reverse=True)

    def _warn(self, damaged: list[str], used: Path) -> None:
        if damaged:
            warnings.warn(f"damaged checkpoints are left out: {'; '.join(damaged)}; using {used.name}", stacklevel=4)

    def _remove_leftovers(self, step: int) -> None:
        """Removes unfinished drafts, checkpoints up to `step` beyond `keep`, and hints without a checkpoint."""
        clear_unfinished(self.folder)
        kept = [path for path in self._newest_first() if _step_of(path) <= step]
        self._remove(kept[self.keep :])
        if self.hints is None:
            return
        left = {path.name for path in self._newest_first()}
        # A hidden file is the draft of a killed writer.
        for hint in [*_named(self.hints), *self.hints.glob(f".*{_PREFIX}*")]:
            if hint.name not in left:
                remove(hint)

    def _remove(self, checkpoints: Iterable[Path]) -> None:
        for path in list(checkpoints):
            remove(path)


def checkpoint_path(folder: Path, step: int) -> Path:
    """The folder of a step's checkpoint: `folder/step-000123`."""
    return folder / f"{_PREFIX}{step:06d}"


def check_identity(found: Identity, expected: Identity, *, where: Path) -> None:
    """Refuses the state of another run.

    Raises:
        StateError: names every setting that differs, with both values.
    """
    missing = "nothing"
    differing = [
        f"{key} is {found.get(key, missing)!r} there and {expected.get(key, missing)!r} here"
        for key in sorted({*found, *expected})
        if found.get(key, missing) != expected.get(key, missing)
    ]
    if any(one.startswith("lora.target_modules ") for one in differing):
        # Which weights are frozen, and so their checksum, follows from it.
        differing = [one for one in differing if not one.startswith("lora.base ")]
    if differing:
        raise StateError(
            f"a run resumes with the settings that it began with, and {where} is of another one: "
            f"{'; '.join(differing)}; set these back, or begin anew: in another folder with run.dir=..., "
            f"or here after `rm -r {where}`"
        )


def _named(folder: Path) -> list[Path]:
    return [path for path in folder.glob(f"{_PREFIX}*") if CHECKPOINT_NAME.fullmatch(path.name)]


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def _identity_of(checkpoint: Path) -> Identity:
    identity = read_facts(checkpoint).get("identity")
    if not isinstance(identity, dict):
        raise StateError(f"{checkpoint.name}: the manifest has no identity of a run")
    return identity


@contextmanager
def told_why(file: Path, num_bytes: int) -> Iterator[None]:
    """Raises the system's error where a library hides why the block could not write so many bytes of tensors.

    Raises:
        OSError: the disk is full, or a quota or limit is reached.

    Example: `with told_why(folder / "model.safetensors", num_bytes): model.save_pretrained(folder)`.
    """
    try:
        yield
    except (SafetensorError, RuntimeError):
        # What a file format adds to the tensors is less than this.
        allocate(file, num_bytes + (1 << 20))
        raise


def num_tensor_bytes(state: object) -> int:
    """Bytes of the tensors in a state of dicts and lists.

    Example: `num_tensor_bytes({"a": [torch.zeros(3)], "b": 7})` is 12.
    """
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, Mapping):
        return sum(map(num_tensor_bytes, state.values()))
    return sum(map(num_tensor_bytes, state)) if isinstance(state, list | tuple) else 0


def _copy_tokenizer(tokenizer: Path | None, draft: Path) -> None:
    for name in TOKENIZER_FILES if tokenizer is not None else ():
        source = Path(tokenizer or "", name)
        if source.is_file():
            shutil.copyfile(source, draft / name)
