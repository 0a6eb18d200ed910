"""How far the engine's log-probs are from the trainer's, by length of the rollout: the train-inference mismatch.

Rollouts are stored with the engine's log-probs, and a checkpoint holds the weights that sampled those of the steps
after it, until the next update. So both sides are of the same weights, and what differs is arithmetic.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn

from treering.arrays import Float64Array, Int64Array
from treering.cli.models import load_checkpoint
from treering.data import Trajectory, read_trajectories
from treering.errors import InputError
from treering.files.json_object import read_object
from treering.model.forward import forward
from treering.report.rollouts import ROLLOUTS_FOLDER
from treering.report.run import CONFIG_FILE
from treering.train.loop.compute import Autocast, precision
from treering.train.loop.restore import STATE_FILE
from treering.tree.forest import Forest

MAX_ROLLOUTS = 256

_BOUNDS = (0, 32, 128, 512, 2048, 8192, 1 << 31)
"""Of the bins of positions within a rollout."""

_OFF = {"top_k": (None, 0), "top_p": (1.0,), "min_p": (0.0,), "repetition_penalty": (1.0,)}
"""Sampling parameters with the values that change no probability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchBin:
    """Sampled tokens at about the same distance from their prompt.

    Attributes:
        first: least number of sampled tokens before them.
        num_tokens: how many there are.
        mean: mean of |engine's log-prob - trainer's|, in nats.
        largest: the largest.
    """

    first: int
    num_tokens: int
    mean: float
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchReport:
    """What was compared.

    Attributes:
        checkpoint: the weights of both sides; None where nothing could be compared.
        num_rollouts: how many were compared.
        bins: by length; empty where nothing could be compared.
        words: what it means, or why there is none.
    """

    checkpoint: str | None
    num_rollouts: int
    bins: tuple[MismatchBin, ...]
    words: str


def measure_mismatch(folder: Path, checkpoints: tuple[Path, ...]) -> MismatchReport:
    """Compares the stored rollouts that the newest possible checkpoint has sampled, `MAX_ROLLOUTS` at most.

    Example: a run with `run.save_every` 10 that was stopped after step 14 has rollouts of step 11 from the weights of
    `step-000010`.
    """
    files = sorted((folder / ROLLOUTS_FOLDER).glob("epoch-*.jsonl"), reverse=True)
    if not files or not checkpoints:
        return _nothing("it needs rollouts and a whole checkpoint, and there are none")
    try:
        settings = read_object(folder / CONFIG_FILE)
        sampling, dtype = dict(settings["sampling"]), settings["model"]["dtype"]
        temperature = float(sampling["temperature"])
    except (InputError, ValueError, LookupError, TypeError) as error:
        return _nothing(f"{CONFIG_FILE} does not say how rollouts were sampled ({error!r})")
    changed = [name for name, neutral in _OFF.items() if sampling.get(name, neutral[0]) not in neutral]
    if changed:
        return _nothing(f"rollouts hold log-probs after {', '.join(changed)}, and a trainer computes them before")
    for checkpoint in checkpoints:
        rollouts = list(islice(_sampled_by(files, _version(checkpoint)), MAX_ROLLOUTS))
        if rollouts:
            return _compare(checkpoint, rollouts, temperature, "bfloat16" if dtype == "bfloat16" else "none")
    return _nothing("no stored rollout was sampled by the weights of a checkpoint that is left; set run.keep higher")


def bins_of(gaps: Float64Array, places: Int64Array) -> tuple[MismatchBin, ...]:
    """The bins that hold any token.

    Args:
        gaps: float64 [n], |engine's log-prob - trainer's|.
        places: int64 [n], sampled tokens before each in its rollout.

    Example: gaps [0.1, 0.3] at the places 0 and 40 are two bins, from 0 and from 32.
    """
    found = []
    for first, stop in pairwise(_BOUNDS):
        own = gaps[(first <= places) & (places < stop)]
        if own.size:
            found.append(
                MismatchBin(first=first, num_tokens=own.size, mean=float(own.mean()), largest=float(own.max()))
            )
    return tuple(found)


def _nothing(words: str) -> MismatchReport:
    return MismatchReport(checkpoint=None, num_rollouts=0, bins=(), words=words)


def _version(checkpoint: Path) -> int | None:
    state = torch.load(checkpoint / STATE_FILE, map_location="cpu", weights_only=True)
    version: int | None = state["loop"].get("version")
    return version


def _sampled_by(files: list[Path], version: int | None) -> Iterator[Trajectory]:
    for file in files if version is not None else ():
        try:
            yield from (
                row
                for row in read_trajectories(file, may_be_torn=True)
                if row.version == version and row.logprobs is not None
            )
        except InputError:
            # A damaged file is in the list of files; the others may serve.
            continue


def _compare(checkpoint: Path, rollouts: list[Trajectory], temperature: float, autocast: Autocast) -> MismatchReport:
    try:
        model = load_checkpoint(checkpoint).eval()
    except InputError as error:
        # Such as a model that takes pictures, which rollouts are stored without.
        return _nothing(f"the trainer computes stored rollouts as text, and {error}")
    # All prompts in one forest need not fit in memory.
    prompts = [list(group) for _, group in groupby(rollouts, key=lambda rollout: rollout.task_id)]
    gaps = [gap for group in prompts for gap in _gaps(model, group, temperature, autocast)]
    return MismatchReport(
        checkpoint=checkpoint.name,
        num_rollouts=len(rollouts),
        bins=bins_of(np.concatenate(gaps), np.concatenate([np.arange(gap.size) for gap in gaps])),
        words=f"|engine's log-prob - trainer's| of {len(rollouts)} rollouts under the weights of {checkpoint.name}",
    )


def _gaps(
    model: nn.Module, rollouts: Sequence[Trajectory], temperature: float, autocast: Autocast
) -> Iterator[Float64Array]:
    """Of each rollout |engine's log-prob - trainer's| of its sampled tokens, in order."""
    forest = Forest.from_sequences([_tokens(rollout) for rollout in rollouts])
    with torch.no_grad(), precision(model, autocast):
        logprobs = forward(model, forest, temperature=temperature).logprobs
    own = logprobs.double().numpy()
    for branch, rollout in enumerate(rollouts):
        assert rollout.logprobs is not None
        sampled = np.flatnonzero(np.asarray(rollout.loss_mask))
        yield np.abs(np.asarray(rollout.logprobs)[sampled] - own[forest.path(branch)][sampled])


def _tokens(rollout: Trajectory) -> np.ndarray:
    assert rollout.tokens is not None
    return rollout.tokens
