"""Checkpoints: folders that Hugging Face loads as a model, plus the state that makes a resumed run exact.

A checkpoint holds weights, optimizer state and torch's random state; `CheckpointStore` finds the newest complete one.
`treering.files.writing` makes a folder appear whole or not at all. Reading a checkpoint runs no code from it: weights
are safetensors, and torch unpickles the state with `weights_only=True`, which accepts only tensors and plain values.
"""

import copy
import pickle
import re
import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from treering import metrics
from treering.config.problems import holds_still
from treering.data.rendering.template import TEMPLATE_FILE, TEMPLATE_FILES
from treering.errors import StateError, UnsupportedError
from treering.files.writing import allocate, clear_unfinished, draft_path, read_facts, remove, write_folder, writing
from treering.ranks.group import RankGroup, write_together
from treering.ranks.sharded_state import (
    first_sharded,
    join_state,
    own_part,
    shard_like,
    split_state,
    whole_state_dict,
    write_shards,
)
from treering.train.loop.lora_adapters import adapter_tensors, has_adapter, save_adapter
from treering.train.loop.update import Update
from treering.train.progress import OnProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Report of one training step.

    Attributes:
        step: step number, from 1.
        epoch: completed passes over the tasks.
        seconds: wall time of the step.
        update: the optimizer update.
    """

    step: int
    epoch: int
    seconds: float
    update: Update

    def values(self) -> dict[str, float]:
        """Return the values under the names of `treering.metrics`."""
        return self.update.values() | {
            metrics.EPOCH: self.epoch,
            metrics.STEP_S: self.seconds,
            metrics.TOKENS_PER_S: self.update.num_branch_tokens / self.seconds,
        }


@runtime_checkable
class Report(Protocol):
    """Report of one step: its number, from 1, and values under the names of `treering.metrics`."""

    @property
    def step(self) -> int:
        """Step number, from 1."""

    def values(self) -> dict[str, float]:
        """Return the values by metric name."""


ReportT = TypeVar("ReportT", bound=Report)


class Resumable(ABC, Generic[ReportT]):
    """Loop that can be stopped after any step and continued by another process.

    Weights, `state` and torch's random state determine all later steps bitwise. Hints only affect speed: a run also
    resumes without them.
    """

    model: nn.Module
    """The trained model."""

    on_progress: OnProgress | None = None
    """Progress callback for this process's part of the running step; the caller may set it at any time."""

    @property
    @abstractmethod
    def num_steps_done(self) -> int:
        """Number of steps since the start of the run, including those before a resume."""

    @abstractmethod
    def step(self) -> ReportT:
        """Run the next step."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs besides the weights: dicts, lists, numbers, strings and tensors."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`; the weights must already be those of its step."""

    def save_hints(self, file: Path) -> None:
        """Write the loop's hints to a new file; a loop without hints writes nothing."""

    def load_hints(self, file: Path) -> None:
        """Load the hints of the step that `load_state` restored; a missing or damaged file causes at most a warning."""


STATE_FILE = "training_state.pt"
SHARDS_FOLDER = "sharded_state"
"""Parts of the state that ranks wrote separately; absent in a checkpoint of one rank."""


def restore(checkpoint: Path, loop: Resumable[ReportT]) -> None:
    """Load a complete checkpoint into a loop, bitwise; all ranks of a sharded model must call it.

    Raises:
        StateError: the checkpoint belongs to another model, or cannot be read.
    """
    # Checksums match, so the writer of the manifest wrote the unreadable content.
    try:
        state = torch.load(checkpoint / STATE_FILE, map_location="cpu", weights_only=True)
        state = join_state(state, checkpoint / SHARDS_FOLDER, first_sharded(loop.model))
        load_weights(loop.model, checkpoint)
        parts = state["loop"], state["random"]
    except (OSError, pickle.UnpicklingError, SafetensorError, RuntimeError, EOFError, LookupError, TypeError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(
            f"a checkpoint may hold only tensors and plain values, and {checkpoint} holds something else "
            f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0]}); none of it was run; remove it and "
            "start again"
        ) from error
    loop.load_state(parts[0])
    set_random_state(parts[1])


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Copy a checkpoint's tensors into the model's, in the same dtypes; tied tensors are stored once.

    Raises:
        StateError: the tensors do not match the model's.
    """
    own = model.state_dict()
    if has_adapter(model):
        own = adapter_tensors(model, own)
    by_name = _by_stored_name(model, own)
    loaded: set[int] = set()
    for name, tensor in (item for file in sorted(checkpoint.glob("*.safetensors")) for item in load_file(file).items()):
        target = by_name.get(name)
        if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
            expected = "nothing" if target is None else f"{target.dtype} {tuple(target.shape)}"
            raise StateError(
                f"{checkpoint} holds {name!r} as {tensor.dtype} {tuple(tensor.shape)}, and the model has {expected} "
                "there; resume with the model that was saved"
            )
        target.copy_(shard_like(tensor, target))
        loaded.add(_address(target))
    missing = [name for name, target in own.items() if _address(target) not in loaded]
    if missing:
        raise StateError(
            f"{checkpoint} lacks {missing[0]!r}, which the model has; resume with the model that was saved"
        )


def _by_stored_name(model: Any, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's tensors by the names under which transformers stores them; image models rename theirs."""
    if has_adapter(model) or getattr(getattr(model, "config", None), "vision_config", None) is None:
        return own
    from transformers.core_model_loading import revert_weight_conversion

    # The same tensors under other names. If a conversion made new ones, the model's own would not be loaded.
    stored: dict[str, Tensor] = revert_weight_conversion(model, own)
    return stored


def _address(tensor: Tensor) -> int:
    """Return an address that tied tensors share; for a sharded tensor, that of its own part."""
    return own_part(tensor).data_ptr()


def random_state() -> dict[str, Any]:
    """Return torch's random state on every device, as tensors."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore a `random_state`; with another number of CUDA devices, only on those that both machines have."""
    torch.set_rng_state(state["cpu"])
    for device, of_device in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(of_device, device)


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    *TEMPLATE_FILES,
)
"""File name patterns of a tokenizer, and of an image processor next to it."""
_PREFIX = "step-"
BEST = "best"
"""Link to the checkpoint of the best evaluation."""

Identity = Mapping[str, str | int | float | bool | None]
"""Settings that identify a run: name to value, in JSON types."""
NAME = ".name"
"""Suffix of a key with a file's name, which may change; the file's digest is under the key without it."""
_DIGEST = re.compile("[0-9a-f]{64}")


class Gathered(NamedTuple):
    """Whole weights of a sharded model, and a function that each rank calls once the checkpoint folder exists."""

    weights: Mapping[str, Tensor]
    begin: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStore:
    """Store of the checkpoints of one run: `step-000123` and so on in one folder.

    Attributes:
        folder: folder of the checkpoints, created with the first one.
        identity: identity of the run; a checkpoint of another run is refused.
        keep: number of newest checkpoints to keep; at least 1.
        tokenizer: folder whose tokenizer files are copied into each checkpoint, or None.
        hints: folder with one file of hints (`Resumable`) per checkpoint, separate from the checkpoints so that damage
            to it does not affect them; None keeps no hints.
        rank_group: ranks of a sharded model, which save and restore together in a folder that all of them can access.
        stop_tokens: ids that end trained turns; they are added to the eos ids in generation_config.json, which adapters
            have too.
        template: chat template that replaces the tokenizer's; None keeps the tokenizer's.
        best: returns the best step up to a given step, whose checkpoint is kept and linked as `best`; None links none.
        card: returns the text of README.md, the model card, for the step of a checkpoint; None writes none.

    Example: with keep=2, saving at steps 10, 20 and 30 leaves `step-000020` and `step-000030`.
    """

    folder: Path
    identity: Identity
    keep: int = 2
    tokenizer: Path | None = None
    hints: Path | None = None
    rank_group: RankGroup = field(default_factory=RankGroup)
    stop_tokens: tuple[int, ...] = ()
    template: str | None = None
    best: Callable[[int], int | None] | None = None
    card: Callable[[int], str] | None = None

    def is_best(self, step: int) -> bool:
        """Return whether a step is the best so far; all ranks get the answer of the first rank."""
        return self.best is not None and bool(self.rank_group.gather(self.best(step) == step)[0])

    def save(self, loop: Resumable[ReportT]) -> Path:
        """Write a checkpoint of the loop, remove those beyond `keep`, and return the checkpoint's folder.

        Raises:
            UnsupportedError: the model is not a Hugging Face model, such as a PEFT model around one.
            StateError: the disk is full, or the folder cannot be written; earlier checkpoints are unchanged.
        """
        model = loop.model
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedError(
                f"a checkpoint needs a Hugging Face model, and this is {type(model).__name__}; merge adapters "
                "first, or add them with the model's own add_adapter"
            )
        if self.rank_group.size > 1:
            return self._save_together(loop, model)
        self._write(loop, model, {"loop": loop.state(), "random": random_state()}, None)
        return checkpoint_path(self.folder, loop.num_steps_done)

    def check_space(self, model: PreTrainedModel) -> str | None:
        """Check that the disk has room for a checkpoint; return a warning if it has no room for `keep` of them.

        A checkpoint has at least the weights (only the adapters with LoRA), two moments of each trained weight, and the
        tokenizer.

        Raises:
            StateError: there is no room for one checkpoint.
        """
        trained = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
        weights = trained if has_adapter(model) else sum(weight.nbytes for weight in model.parameters())
        size = weights + 2 * trained + sum(file.stat().st_size for file in _tokenizer_files(self.tokenizer))
        there = next(folder for folder in (self.folder, *self.folder.absolute().parents) if folder.is_dir())
        free = shutil.disk_usage(there).free
        # A new checkpoint is written before the oldest is removed.
        num_left = max(self.keep - len(self._newest_first()), 0) + 1
        what = (
            f"a checkpoint takes {size / 1e9:.2f} GB (weights {weights / 1e9:.2f}, optimizer {2 * trained / 1e9:.2f})"
        )
        if free < size:
            raise StateError(
                f"{what}, and {free / 1e9:.2f} GB are free in {there}; free space, or set run.dir elsewhere"
            )
        if free >= num_left * size:
            return None
        return (
            f"warning: {what}, up to {num_left} more will be written (run.keep = {self.keep}), and {free / 1e9:.2f} GB "
            f"are free in {there}; free space, lower run.keep, or set run.dir elsewhere"
        )

    def _save_together(self, loop: Resumable[ReportT], model: PreTrainedModel) -> Path:
        """Let rank 0 write a checkpoint from gathered weights, and each rank its part of the sharded state."""
        weights, shards = whole_state_dict(model, trained_only=has_adapter(model)), dict[str, Tensor]()
        state = split_state({"loop": loop.state(), "random": random_state()}, shards)
        target = checkpoint_path(self.folder, loop.num_steps_done)
        write_together(
            self.rank_group,
            make=lambda begin: self._write(loop, model, state, Gathered(weights, begin)),
            write_own=lambda: write_shards(shards, draft_path(target) / SHARDS_FOLDER),
        )
        return target

    def _write(
        self, loop: Resumable[ReportT], model: PreTrainedModel, state: dict[str, Any], gathered: Gathered | None
    ) -> None:
        """Write a checkpoint of the model, or of its gathered weights, and remove old ones."""
        target = checkpoint_path(self.folder, loop.num_steps_done)
        weights = model.state_dict() if gathered is None else gathered.weights
        if has_adapter(model):
            weights = adapter_tensors(model, weights)
        num_bytes = num_tensor_bytes(weights) + num_tensor_bytes(state)

        def fill(draft: Path) -> None:
            with raising_disk_errors(draft / STATE_FILE, num_bytes):
                if gathered is not None:
                    gathered.begin()
                if has_adapter(model):
                    save_adapter(model, weights, draft)
                else:
                    model.save_pretrained(draft, state_dict=None if gathered is None else gathered.weights)
                torch.save(state, draft / STATE_FILE)
            _save_ends(model, self.stop_tokens, draft)
            _copy_tokenizer(self.tokenizer, self.template, draft)
            if self.card is not None:
                (draft / "README.md").write_text(self.card(loop.num_steps_done), encoding="utf-8")

        # Hints come first, so that a complete checkpoint has its hints even if this process is killed.
        if self.hints is not None:
            with writing(self.hints):
                self.hints.mkdir(parents=True, exist_ok=True)
            loop.save_hints(self.hints / target.name)
        with writing(target, num_bytes):
            write_folder(target, fill, {"step": loop.num_steps_done, "identity": dict(self.identity)})
            # Later checkpoints are damaged; otherwise this run would have resumed from them.
            self._remove(path for path in self._newest_first() if _step_of(path) > loop.num_steps_done)
            self._remove_leftovers(loop.num_steps_done)

    def restore_newest(self, loop: Resumable[ReportT]) -> int | None:
        """Load the newest complete checkpoint into the loop, bitwise, and warn once with the names of damaged ones.

        A run with another number of ranks may have written it.

        Returns:
            The step to resume from, or None if there is no checkpoint.

        Raises:
            StateError: all checkpoints are damaged, the newest complete one belongs to another run, or the folder
                cannot be written.
        """
        chosen = self._choose() if self.rank_group.rank == 0 else None
        chosen = self.rank_group.gather(chosen)[0]
        if chosen is None:
            return None
        restore(chosen, loop)
        if self.hints is not None:
            loop.load_hints(self.hints / chosen.name)
        if self.rank_group.rank == 0:
            with writing(self.folder):
                self._remove_leftovers(loop.num_steps_done)
        return loop.num_steps_done

    def _choose(self) -> Path | None:
        """Return the newest complete checkpoint of this run."""
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
        return [path for path in reversed(saved_steps(self.folder).values()) if path.is_dir()]

    def _warn(self, damaged: list[str], used: Path) -> None:
        if damaged:
            warnings.warn(f"skipped damaged checkpoints: {'; '.join(damaged)}; using {used.name}", stacklevel=4)

    def _remove_leftovers(self, step: int) -> None:
        """Remove unfinished drafts, checkpoints up to `step` beyond `keep`, and hints without a checkpoint."""
        clear_unfinished(self.folder)
        kept = [path for path in self._newest_first() if _step_of(path) <= step]
        best = None if self.best is None else self.best(step)
        self._remove(path for path in kept[self.keep :] if _step_of(path) != best)
        if best is not None and checkpoint_path(self.folder, best).is_dir():
            _link(self.folder / BEST, checkpoint_path(self.folder, best).name)
        if self.hints is None:
            return
        left = {path.name for path in self._newest_first()}
        # A hidden file is the draft of a killed writer.
        for hint in [*saved_steps(self.hints).values(), *self.hints.glob(f".*{_PREFIX}*")]:
            if hint.name not in left:
                remove(hint)

    def _remove(self, checkpoints: Iterable[Path]) -> None:
        for path in list(checkpoints):
            remove(path)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint: `folder/step-000123`."""
    return folder / f"{_PREFIX}{step:06d}"


def check_identity(found: Identity, expected: Identity, *, where: Path) -> None:
    """Refuse the state of another run.

    Raises:
        StateError: names every setting that differs, with both values.
    """
    keys = sorted(key for key in {*found, *expected} if not key.endswith(NAME))
    differing = [
        _difference(key, found, expected)
        for key in keys
        if found.get(key) != expected.get(key) and not (key not in expected and holds_still(key, found[key]))
    ]
    # The checksum of frozen weights follows from their modules, and the seed of the noise from the run's.
    for cause, effect in (("lora.target_modules ", "lora.base "), ("rl.seed ", "engine.seed ")):
        if any(one.startswith(cause) for one in differing):
            differing = [one for one in differing if not one.startswith(effect)]
    if differing:
        raise StateError(
            f"a run must resume with its first settings, and {where} belongs to another run: {'; '.join(differing)}; "
            f"set these back, or start again: in another folder with run.dir=..., or here after `rm -r {where}`"
        )


def _difference(key: str, found: Identity, expected: Identity) -> str:
    """Describe the difference in a setting; for data, which has a digest, name its file."""
    values = found.get(key, "nothing"), expected.get(key, "nothing")
    if not all(isinstance(value, str) and _DIGEST.fullmatch(value) for value in values if value != "nothing"):
        return f"{key} is {values[0]!r} there and {values[1]!r} here"
    name = expected.get(f"{key}{NAME}", found.get(f"{key}{NAME}"))
    what = "is only there" if values[1] == "nothing" else "is only here" if values[0] == "nothing" else "has changed"
    return f"{key} {what}" if name is None else f"{key} ({name}) {what}"


def _link(link: Path, target: str) -> None:
    """Point a link at a checkpoint next to it; at any moment the link leads to a whole one."""
    draft = link.with_name(f".{link.name}.unfinished")
    draft.unlink(missing_ok=True)
    draft.symlink_to(target, target_is_directory=True)
    draft.replace(link)


def saved_steps(folder: Path) -> dict[int, Path]:
    """Return the checkpoints, or the hints, in a folder by step, ascending.

    Example: `{10: Path("runs/a/checkpoints/step-000010")}` for a run with one checkpoint.
    """
    # Anything else in the folder belongs to the user, such as a copy named step-000123-best.
    found = [path for path in folder.glob(f"{_PREFIX}*") if re.fullmatch(rf"{_PREFIX}\d{{6,}}", path.name)]
    return {_step_of(path): path for path in sorted(found, key=_step_of)}


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def _identity_of(checkpoint: Path) -> Identity:
    identity = read_facts(checkpoint).get("identity")
    if not isinstance(identity, dict):
        raise StateError(f"{checkpoint.name}: its manifest lacks the identity of a run")
    return identity


@contextmanager
def raising_disk_errors(file: Path, num_bytes: int) -> Iterator[None]:
    """Raise the system's error if a library hides why the block could not write `num_bytes` of tensors.

    Raises:
        OSError: the disk is full, or a quota or limit is reached.

    Example: `with raising_disk_errors(folder / "model.safetensors", num_bytes): model.save_pretrained(folder)`.
    """
    try:
        yield
    except (SafetensorError, RuntimeError):
        # A file format adds less than this to the tensors.
        allocate(file, num_bytes + (1 << 20))
        raise


def num_tensor_bytes(state: object) -> int:
    """Count the bytes of the tensors in a state of dicts and lists.

    Example: `num_tensor_bytes({"a": [torch.zeros(3)], "b": 7})` is 12.
    """
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, Mapping):
        return sum(map(num_tensor_bytes, state.values()))
    return sum(map(num_tensor_bytes, state)) if isinstance(state, list | tuple) else 0


def _save_ends(model: PreTrainedModel, stop_tokens: Iterable[int], draft: Path) -> None:
    """Add stop tokens to the eos ids in the generation settings of a checkpoint, which adapters lack otherwise."""
    saved = copy.deepcopy(model.generation_config) or GenerationConfig()
    old = saved.eos_token_id
    known = old if isinstance(old, list) else [] if old is None else [old]
    ids = list(dict.fromkeys([*known, *stop_tokens]))
    if len(ids) > len(known):
        saved.eos_token_id = ids
    if len(ids) > len(known) or has_adapter(model):
        # Not `save_pretrained`, which refuses settings that many published models have.
        saved.to_json_file(draft / "generation_config.json")


def _tokenizer_files(tokenizer: Path | None, patterns: Iterable[str] = TOKENIZER_FILES) -> list[Path]:
    if tokenizer is None:
        return []
    return [file for pattern in patterns for file in tokenizer.glob(pattern) if file.is_file()]


def _copy_tokenizer(tokenizer: Path | None, template: str | None, draft: Path) -> None:
    if tokenizer is None:
        return
    kept = TOKENIZER_FILES if template is None else [name for name in TOKENIZER_FILES if name not in TEMPLATE_FILES]
    for source in _tokenizer_files(tokenizer, kept):
        target = draft / source.relative_to(tokenizer)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, target)
    if template is not None:
        (draft / TEMPLATE_FILE).write_text(template, encoding="utf-8")
