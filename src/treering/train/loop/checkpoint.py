"""Checkpoints: folders that Hugging Face loads as a model, plus the state that makes a resumed run exact.

A checkpoint holds weights, optimizer state and torch's random state; `CheckpointStore` finds the newest complete one.
`treering.atomic` makes a folder appear whole or not at all. Reading one runs no code from it: weights are
safetensors, and torch unpickles the state with `weights_only=True`, which knows tensors and plain values alone.
"""

import pickle
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from treering.atomic import clear_unfinished, read_facts, remove, write_folder
from treering.errors import StateError, UnsupportedError
from treering.train.loop.resumable import ReportT, Resumable
from treering.writing import allocate, writing

STATE_FILE = "training_state.pt"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
_PREFIX = "step-"
# Anything else in the folder belongs to the user, such as a copy named step-000123-best.
CHECKPOINT_NAME = re.compile(rf"{_PREFIX}\d{{6,}}")

Identity = Mapping[str, str | int | float | bool | None]
"""The settings that identify a run: name to value, in JSON types."""


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

    Example: with keep=2, saving at steps 10, 20 and 30 leaves `step-000020` and `step-000030`.
    """

    folder: Path
    identity: Identity
    keep: int = 2
    tokenizer: Path | None = None
    hints: Path | None = None

    def save(self, loop: Resumable[ReportT]) -> Path:
        """Writes a checkpoint of the loop and removes those beyond `keep`; returns the checkpoint's folder.

        Raises:
            UnsupportedError: not a plain Hugging Face model, such as a PEFT adapter.
            StateError: the disk is full, or the folder cannot be written; earlier checkpoints are unchanged.
        """
        model = loop.model
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedError(
                f"checkpoints hold Hugging Face models, and this is {type(model).__name__}; merge adapters first, or "
                "save them yourself"
            )
        target = checkpoint_path(self.folder, loop.num_steps_done)
        state = {"loop": loop.state(), "random": random_state()}
        num_bytes = num_tensor_bytes(model.state_dict()) + num_tensor_bytes(state)

        def fill(draft: Path) -> None:
            with told_why(draft / STATE_FILE, num_bytes):
                model.save_pretrained(draft)
                torch.save(state, draft / STATE_FILE)
            _copy_tokenizer(self.tokenizer, draft)

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
        return target

    def restore_newest(self, loop: Resumable[ReportT]) -> int | None:
        """Loads the newest complete checkpoint into the loop, bitwise; one warning names the damaged ones.

        Returns:
            The step to resume from, or None if there is no checkpoint.

        Raises:
            StateError: all checkpoints are damaged, the newest complete one is of another run, or the folder cannot be
                written.
        """
        damaged: list[str] = []
        for checkpoint in self._newest_first():
            try:
                identity = _identity_of(checkpoint)
            except StateError as error:
                damaged.append(str(error))
                continue
            self._warn(damaged, checkpoint)
            check_identity(identity, self.identity, where=checkpoint)
            _restore(checkpoint, loop)
            if self.hints is not None:
                loop.load_hints(self.hints / checkpoint.name)
            with writing(self.folder):
                self._remove_leftovers(loop.num_steps_done)
            return loop.num_steps_done
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
            warnings.warn(f"damaged checkpoints are left out: {'; '.join(damaged)}; using {used.name}", stacklevel=3)

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


def _restore(checkpoint: Path, loop: Resumable[ReportT]) -> None:
    # Its checksums are right, so whoever wrote the manifest wrote what cannot be read.
    try:
        state = torch.load(checkpoint / STATE_FILE, map_location="cpu", weights_only=True)
        _load_weights(loop.model, checkpoint)
        parts = state["loop"], state["random"]
    except (OSError, pickle.UnpicklingError, SafetensorError, RuntimeError, EOFError, LookupError, TypeError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(
            f"a checkpoint holds tensors and plain values, and {checkpoint} holds something else "
            f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0]}); nothing of it was run; remove it, "
            "and start again"
        ) from error
    loop.load_state(parts[0])
    set_random_state(parts[1])


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


def _load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Copies the stored tensors into the model's, in the same dtypes; tied tensors are stored once."""
    own = model.state_dict()
    loaded: set[int] = set()
    for name, tensor in _stored_tensors(checkpoint):
        target = own.get(name)
        if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
            expected = "nothing" if target is None else f"{target.dtype} {tuple(target.shape)}"
            raise StateError(
                f"{checkpoint} holds {name!r} as {tensor.dtype} {tuple(tensor.shape)}, and the model has {expected} "
                "there; resume with the model that was saved"
            )
        target.copy_(tensor)
        loaded.add(target.data_ptr())
    missing = [name for name, target in own.items() if target.data_ptr() not in loaded]
    if missing:
        raise StateError(
            f"{checkpoint} has no {missing[0]!r}, which the model has; resume with the model that was saved"
        )


def _stored_tensors(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(checkpoint.glob("*.safetensors")):
        yield from load_file(file).items()


def _copy_tokenizer(tokenizer: Path | None, draft: Path) -> None:
    for name in TOKENIZER_FILES if tokenizer is not None else ():
        source = Path(tokenizer or "", name)
        if source.is_file():
            shutil.copyfile(source, draft / name)


def random_state() -> dict[str, Any]:
    """Torch's random state on every device, as tensors."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restores a `random_state`."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
