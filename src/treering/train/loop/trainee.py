"""Models that several users train on one base model: adapters on its weights, or separate weights.

A trainee adds gradients of sequences with targets, updates by AdamW, and is saved and loaded whole. An error leaves its
gradients, weights and optimizer unchanged.
"""

import copy
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from treering.arrays import Int32Array, Int64Array
from treering.config.model import LoraOptions
from treering.errors import InputError, StateError
from treering.files.writing import writing
from treering.train.loop.checkpoint import load_weights, num_tensor_bytes, raising_disk_errors
from treering.train.loop.lora_adapters import adapter_tensors, add_lora, has_adapter, save_adapter, weights_checksum
from treering.train.target_losses import LossKind, Numbers
from treering.train.targets import TargetScores, score_targets

LORA_ALPHA = 32
"""Alpha of the adapters, which are scaled by alpha / rank at any rank."""
OPTIMIZER_FILE = "optimizer.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraineeOptions:
    """LoRA rank, and the kinds of layers with adapters; rank 0 trains all weights."""

    rank: int
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    seed: int = 0

    def facts(self) -> dict[str, Any]:
        """Return the entries about it in a checkpoint."""
        return asdict(self)


class SharedBase:
    """Frozen model whose copies share its weights.

    Example: two trainees of rank 8 on a model of 540 MB hold two sets of adapters, and the 540 MB once.
    """

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        """Wrap a model; `name` is its name for users."""
        self.model, self.name = model.eval().requires_grad_(False), name
        self.checksum = weights_checksum(model)
        self._lock = threading.Lock()

    def copy(self, options: TraineeOptions) -> PreTrainedModel:
        """Return a model with new adapters on the base weights, or with its own weights for rank 0.

        Raises:
            InputError: the model has no linear module of the requested kinds.
        """
        if options.rank == 0:
            own: PreTrainedModel = copy.deepcopy(self.model)
            return own.requires_grad_(True)
        names = self._targets(options)
        if not names and not options.train_unembed:
            raise InputError("adapters need at least one kind of layers to train, got none; add one")
        shared = [*self.model.parameters(), *self.model.buffers()]
        own = copy.deepcopy(self.model, {id(tensor): tensor for tensor in shared})
        lora = LoraOptions(rank=options.rank, alpha=LORA_ALPHA, target_modules=tuple(names))
        with self._lock, torch.random.fork_rng():
            torch.manual_seed(options.seed)
            add_lora(own, lora, base=self.name, with_head=options.train_unembed)
        return own.eval()

    def _targets(self, options: TraineeOptions) -> list[str]:
        head = self.model.get_output_embeddings()
        kinds = {"self_attn": options.train_attn, "mlp": options.train_mlp}
        modules = [(name, each) for name, each in self.model.named_modules() if isinstance(each, nn.Linear)]
        inside = (name for name, each in modules if each is not head and any(map(kinds.get, name.split("."))))
        return sorted({name.rpartition(".")[2] for name in inside})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetDatum:
    """Sequence with the target tokens scored at its states, and the inputs of its loss."""

    tokens: Int32Array
    """[T]"""
    targets: Int64Array
    """[T] or [T, K]"""
    inputs: Mapping[str, Tensor]
    """In the shape of the targets."""
    loss: LossKind
    settings: Numbers

    def value(self, logprobs: Tensor) -> Tensor:
        """Return the loss, a scalar."""
        inputs = {name: values.to(logprobs) for name, values in self.inputs.items()}
        return self.loss.value(logprobs, inputs, self.settings)


class Trainee:
    """Model with its own optimizer."""

    def __init__(
        self, base: SharedBase, options: TraineeOptions, *, max_tokens: int | None = None, shares: bool = True
    ) -> None:
        """Set `max_tokens`, the distinct tokens computed at once; `shares=False` computes every datum separately."""
        self.options, self._max_tokens, self._shares = options, max_tokens, shares
        self.model = base.copy(options)
        self.weights = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=0.0)
        self.num_changes = 0
        """Count of updates and loads so far; identifies the current weights."""

    def add_gradients(self, data: Sequence[TargetDatum]) -> TargetScores:
        """Score data as one forest, and add the gradients of their losses to earlier ones.

        Raises:
            StateError: a loss that is not finite; no gradient has been added.
        """
        with _whole_gradients(self.weights):
            return self._score(data, trains=True)

    def score(self, data: Sequence[TargetDatum]) -> TargetScores:
        """Score data as one forest, without gradients."""
        return self._score(data, trains=False)

    def _score(self, data: Sequence[TargetDatum], *, trains: bool) -> TargetScores:
        if not self._shares and len(data) > 1:
            alone = [self._score([datum], trains=trains) for datum in data]
            return TargetScores(
                logprobs=[each.logprobs[0] for each in alone],
                losses=[each.losses[0] for each in alone],
                num_flat_tokens=sum(each.num_flat_tokens for each in alone),
                num_computed_tokens=sum(each.num_computed_tokens for each in alone),
            )
        with nullcontext() if trains else torch.no_grad():
            return score_targets(
                self.model,
                [datum.tokens for datum in data],
                [datum.targets for datum in data],
                loss=lambda number, logprobs: data[number].value(logprobs),
                trains=trains,
                max_tokens=self._max_tokens,
            )

    def step(self, params: Mapping[str, float]) -> float:
        """Update the weights by AdamW with these numbers, drop the gradients, and return their norm.

        Raises:
            StateError: gradients that are not finite; they are dropped, and the weights are unchanged.
        """
        for group in self.optimizer.param_groups:
            group.update(lr=params["learning_rate"], betas=(params["beta1"], params["beta2"]))
            group.update(eps=params["eps"], weight_decay=params["weight_decay"])
        limit = params["grad_clip_norm"] if params["grad_clip_norm"] > 0 else float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self.weights.values(), limit))
        try:
            if not norm < float("inf"):
                raise StateError(f"gradients must be finite, and their norm is {norm}; lower the learning rate")
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        self.num_changes += 1
        return norm

    def snapshot(self) -> dict[str, Tensor]:
        """Return a copy of the trained weights by name."""
        return {name: weight.detach().clone() for name, weight in self.weights.items()}

    def save(self, folder: Path, *, with_optimizer: bool) -> None:
        """Write the files of a checkpoint into a folder, in the format of Hugging Face and PEFT.

        Raises:
            StateError: the disk is full, or the folder cannot be written.
        """
        state = self.optimizer.state_dict() if with_optimizer else {}
        tensors = dict(self.weights)
        num_bytes = num_tensor_bytes(tensors) + num_tensor_bytes(state)
        with writing(folder, num_bytes), raising_disk_errors(folder / OPTIMIZER_FILE, num_bytes):
            if has_adapter(self.model):
                save_adapter(self.model, adapter_tensors(self.model, tensors), folder)
            else:
                self.model.save_pretrained(folder)
            if with_optimizer:
                torch.save(state, folder / OPTIMIZER_FILE)

    def load(self, folder: Path, *, with_optimizer: bool) -> None:
        """Continue from a checkpoint and drop the gradients; bitwise with its optimizer, else with a new one.

        Raises:
            StateError: the checkpoint belongs to another model, or cannot be read.
        """
        try:
            state = torch.load(folder / OPTIMIZER_FILE, weights_only=True) if with_optimizer else None
            load_weights(self.model, folder)
        except (OSError, pickle.UnpicklingError, SafetensorError, RuntimeError, EOFError, LookupError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"{folder.name} cannot be read ({error}); save another checkpoint") from error
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=0.0)
        if state is not None:
            self.optimizer.load_state_dict(state)
        self.optimizer.zero_grad(set_to_none=True)
        self.num_changes += 1


@contextmanager
def _whole_gradients(weights: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Add the gradients of the block to earlier ones at its end, or none of them if it raises."""
    before = {name: weight.grad for name, weight in weights.items()}
    for weight in weights.values():
        weight.grad = None
    try:
        yield
    except BaseException:
        for name, weight in weights.items():
            weight.grad = before[name]
        raise
    for name, weight in weights.items():
        if (earlier := before[name]) is not None:
            weight.grad = earlier if weight.grad is None else earlier.add_(weight.grad)
