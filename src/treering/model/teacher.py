"""Score a forest with a teacher: its hidden states with its head, or its k likeliest next tokens, per state.

A state is a token with its path; its row is the distribution of the tokens that may follow it.

    N tokens   R rows   k tokens per row   C the teacher's hidden size   V vocabulary
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from treering.errors import ConfigError
from treering.model.checks import check_whole
from treering.model.context import is_active, tree_attention
from treering.model.divergence import Target
from treering.model.edges import EdgeTable, max_logit_rows
from treering.model.forward import check_forest, check_temperature, hidden_states
from treering.model.logits import scaled_logits
from treering.model.tree_model import TreeModel
from treering.tree.forest import Forest
from treering.types import is_count

MIN_REST = 1e-7
"""Least probability of the tokens outside the top k: log-probs from a server are rounded, and may sum to 1 or more.
TRL 1.16 uses the same bound (`_add_tail_bucket`)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeacherStates:
    """Teacher distributions over the whole vocabulary, as hidden states from which its head computes them.

    Attributes:
        hidden: [R, C], without gradients.
        head: the teacher's head, hidden state to logits.
        softcap: bound on its logits; None without one.
        logit_divisor: divisor of its logits.
        num_logits: V.
    """

    hidden: Float[Tensor, "R C"]
    head: nn.Module
    softcap: float | None
    logit_divisor: float
    num_logits: int

    def take(self, rows: Int[Tensor, " n"]) -> "TeacherStates":
        """Return the given rows."""
        return replace(self, hidden=self.hidden[rows.to(self.hidden.device)])

    def target(self, rows: slice, temperature: float, *, like: Tensor) -> Target:
        """Return log-probs [n, V] of some rows, in the dtype and on the device of `like`."""
        with torch.no_grad():
            logits = self._logits(self.hidden[rows], temperature)
            return Target(logits.to(like).log_softmax(-1))

    def top(self, k: int, temperature: float = 1.0) -> "TeacherTopK":
        """Return the k likeliest tokens of each row, computed in chunks."""
        ids, logprobs = [], []
        with torch.no_grad():
            for hidden in torch.split(self.hidden, max_logit_rows(self.hidden.device, self.num_logits)):
                logits = self._logits(hidden, temperature)
                top = logits.topk(k, -1)
                ids.append(top.indices)
                logprobs.append(top.values - logits.logsumexp(-1, keepdim=True))
        return TeacherTopK(ids=torch.cat(ids), logprobs=torch.cat(logprobs))

    def logprobs(self, rows: Int[Tensor, " n"], tokens: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return the log-prob of a token in each of some rows, in any order; a row's logits are computed once."""
        found = torch.empty(rows.numel(), dtype=torch.float64, device=self.hidden.device)
        size = max_logit_rows(self.hidden.device, self.num_logits)
        with torch.no_grad():
            for first, hidden in enumerate(torch.split(self.hidden, size)):
                logits = self._logits(hidden, 1.0)
                at = (rows // size == first).nonzero()[:, 0]
                own = rows[at] - first * size
                found[at] = (logits[own, tokens[at]] - logits.logsumexp(-1)[own]).double()
        return found

    def _logits(self, hidden: Float[Tensor, "n C"], temperature: float) -> Float[Tensor, "n V"]:
        return scaled_logits(self.head, hidden, softcap=self.softcap, temperature=temperature * self.logit_divisor)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeacherTopK:
    """The teacher's k likeliest tokens of each row, and their log-probs over the whole vocabulary.

    Attributes:
        ids: int64 [R, k].
        logprobs: [R, k], without gradients, float32 or wider.
    """

    ids: Int[Tensor, "R k"]
    logprobs: Float[Tensor, "R k"]

    def take(self, rows: Int[Tensor, " n"]) -> "TeacherTopK":
        """Return the given rows."""
        rows = rows.to(self.ids.device)
        return TeacherTopK(ids=self.ids[rows], logprobs=self.logprobs[rows])

    def target(self, rows: slice, temperature: float, *, like: Tensor) -> Target:
        """Return log-probs [n, k + 1] of some rows, with all other tokens last; `temperature` is ignored."""
        logprobs = self.logprobs[rows].to(like)
        total = logprobs.exp().sum(-1, keepdim=True)
        return Target(torch.cat([logprobs, (1 - total).clamp_min(MIN_REST).log()], -1), self.ids[rows].to(like.device))

    def of_branches(self, forest: Forest) -> list[tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """Return (ids, log-probs) [T, k] for each branch: entry t is the distribution that token t was drawn from.

        Trajectories can store them, and `treering.objectives.distill` takes them. Nothing precedes a
        first token, so its row is never read.
        """
        ids, logprobs = self.ids.cpu().numpy(), self.logprobs.double().cpu().numpy()
        paths = [forest.path(branch) for branch in range(forest.num_branches)]
        return [(ids[np.roll(path, 1)], logprobs[np.roll(path, 1)]) for path in paths]


TeacherRows = TeacherStates | TeacherTopK
"""Teacher distributions of R rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetRows:
    """Teacher distributions of some states of a forest.

    Attributes:
        states: int64 [R], packed indices, ascending.
        rows: distributions of these states.
    """

    states: NDArray[np.int64]
    rows: TeacherRows

    def of(self, forest: Forest, table: EdgeTable) -> TeacherRows:
        """Return the distributions of a table's rows, in their order; its edges are packed indices of `forest`."""
        first = np.searchsorted(table.edge_row, np.arange(table.rows.size))
        return self.rows.take(torch.from_numpy(np.searchsorted(self.states, forest.parent[table.edges[first]])))


def score(
    teacher: nn.Module | TreeModel,
    forest: Forest,
    *,
    top_k: int | None = None,
    temperature: float = 1.0,
    backend: str = "auto",
) -> TeacherStates | TeacherTopK:
    """Score every state of a forest once, without gradients; no [N, V] array is ever held.

    Args:
        teacher: a supported Hugging Face causal language model, or a PEFT model of one.
        forest: N tokens.
        top_k: number of tokens per state, below the vocabulary's size; None keeps the hidden states instead.
        temperature: divides the logits; only with `top_k`, because hidden states have no logits yet.
        backend: attention backend; ignored inside `tree_attention`.

    Returns:
        N rows, in packed order: row t is the distribution of the token after t.

    Raises:
        InputError: a token outside the teacher's vocabulary, or a temperature that is not positive.
        ConfigError: `top_k` that is not a count below the vocabulary, or a temperature without it.
        UnsupportedError: a model whose scores would not be exact.

    Example:
        >>> forest = Forest.from_sequences([[5, 6, 7], [5, 6, 8]])
        >>> scores = score(teacher, forest, top_k=2)                              # doctest: +SKIP
        >>> scores.ids[1], scores.logprobs[1]   # what may follow [5, 6]          # doctest: +SKIP
        (tensor([7, 8]), tensor([-0.69, -0.71]))
    """
    bound = TreeModel.of(teacher)
    check_whole(bound, "a teacher")
    check_forest(forest.without_routes(), bound)
    check_temperature(temperature)
    check_top_k(top_k, bound)
    if top_k is None and temperature != 1.0:
        raise ConfigError(
            f"score divides logits by a temperature only with top_k, got {temperature} for hidden states; give it to "
            "objectives.distill"
        )
    with torch.no_grad():
        with nullcontext() if is_active(bound) else tree_attention(bound, backend):
            hidden = hidden_states(bound, forest.without_routes())
        states = states_of(bound, hidden)
        return states if top_k is None else states.top(top_k, temperature)


def states_of(model: TreeModel, hidden: Float[Tensor, "R C"]) -> TeacherStates:
    """Return the distributions of a teacher's hidden states."""
    return TeacherStates(
        hidden=hidden,
        head=model.head,
        softcap=model.softcap,
        logit_divisor=model.logit_divisor,
        num_logits=model.num_logits,
    )


def check_top_k(top_k: int | None, model: TreeModel) -> None:
    """Check that `top_k` is None or a count below the vocabulary.

    Raises:
        ConfigError: `top_k` is neither.
    """
    if top_k is not None and not (is_count(top_k, least=1) and top_k < model.num_logits):
        raise ConfigError(
            f"top_k must be at least 1 and below the vocabulary of {model.num_logits}, got {top_k!r}; None takes all "
            "of it"
        )
