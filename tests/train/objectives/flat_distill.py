"""Flat loss of distillation: each sequence through both stock forwards, and divergences written out in torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.train.objectives.flat_objectives import Data, over_tokens
from treering.objectives import Objective, distill

KINDS = ("forward_kl", "reverse_kl", "jsd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Options of one flat loss."""

    kind: str = "forward_kl"
    beta: float | None = None
    top_k: int | None = None
    temperature: float | None = None
    normalizer: str = "token_mean"
    shared: str = "sum"

    def objective(self, teacher: nn.Module | Sequence[object], data: Data) -> Objective:
        return distill(
            teacher,
            self.kind,  # type: ignore[arg-type]
            beta=self.beta,
            top_k=self.top_k,
            temperature=self.temperature,
            loss_masks=data.masks,
            normalizer=self.normalizer,  # type: ignore[arg-type]
            shared=self.shared,  # type: ignore[arg-type]
        )


def flat_divergences(student: nn.Module, teacher: nn.Module, data: Data, setting: Setting) -> list[Tensor]:
    """Return one tensor per sequence with an entry per token except the first."""
    rows = []
    for sequence in data.sequences:
        q = _probabilities(student, sequence, setting.temperature)
        with torch.no_grad():
            p = _probabilities(teacher, sequence, setting.temperature)
        if setting.top_k is not None:
            ids = p.argsort(-1, descending=True)[:, : setting.top_k]
            p, q = (torch.cat([x.gather(1, ids), 1 - x.gather(1, ids).sum(1, keepdim=True)], 1) for x in (p, q))
        rows.append(divergence(p, q, setting))
    return rows


def divergence(p: Tensor, q: Tensor, setting: Setting) -> Tensor:
    if setting.kind == "forward_kl":
        return (p * (p / q).log()).sum(-1)
    if setting.kind == "reverse_kl":
        return (q * (q / p).log()).sum(-1)
    beta = 0.5 if setting.beta is None else setting.beta
    m = beta * p + (1 - beta) * q
    return beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)


def flat_loss(student: nn.Module, teacher: nn.Module, data: Data, setting: Setting) -> Tensor:
    rows = flat_divergences(student, teacher, data, setting)
    term: Callable[[int, int], Tensor] = lambda i, t: rows[i][t - 1]  # noqa: E731
    return over_tokens(data, term, normalizer=setting.normalizer, shared=setting.shared)


def _probabilities(model: nn.Module, sequence: list[int], temperature: float | None) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0, :-1]
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / (temperature or 1.0)).softmax(-1)
