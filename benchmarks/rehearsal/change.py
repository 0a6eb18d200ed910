"""How many tokens an update of a pretrained model changes, if they are drawn again with their own noise."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks.real.exact import requests_of
from treering.cli.demo import sums_in_words
from treering.engine.protocol import Request, Rollout
from treering.engine.torch_engine import TorchEngine
from treering.objectives import grpo
from treering.train.step import backward
from treering.tree.forest import Forest
from treering.types import TokenIds

NUM_PROMPTS, GROUP_SIZE, MAX_TOKENS = 4, 8, 64
NUM_UPDATES = 8
APART = (1, 2, 4, 8)
TEMPERATURES = (0.7, 1.0)
RATES = (("all", 1e-6), ("lora", 1e-5), ("all", 1e-7), ("all", 1e-5), ("lora", 1e-6))
"""Trained weights, all of them or LoRA of rank 16, and learning rates."""
_NEXT, _FIRST = 0, 1_000
"""Draws of the rollouts that are trained next, and of those that are compared with the first weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Tokens that were drawn again."""

    num_kept: int
    num_changed: int
    num_tokens: int
    """All tokens, those after a change too."""

    @property
    def change(self) -> float:
        """Chance that a token changes, given that those before it stayed."""
        return self.num_changed / max(1, self.num_kept + self.num_changed)

    @property
    def kept_share(self) -> float:
        """Share of all tokens in the common prefixes."""
        return self.num_kept / max(1, self.num_tokens)


class Policy:
    """A pretrained model, its engine, and updates by GRPO on sums at a constant rate."""

    def __init__(self, folder: Path, start: PreTrainedModel, kind: str, rate: float, seed: int) -> None:
        """Trains a copy of `start`."""
        torch.manual_seed(seed)
        self.model: Any = copy.deepcopy(start)
        if kind == "lora":
            from peft import LoraConfig, get_peft_model

            self.model = get_peft_model(self.model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
        self.engine = TorchEngine(
            self.model, max_batch=NUM_PROMPTS * GROUP_SIZE, max_tokens=16384, max_prefill=8192, seed=seed
        )
        self._optimizer = torch.optim.AdamW([each for each in self.model.parameters() if each.requires_grad], lr=rate)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._lines = sums_in_words(NUM_PROMPTS, seed)
        self._requests = requests_of(folder, num_prompts=NUM_PROMPTS, size=GROUP_SIZE, seed=seed)
        self._prompts = [each.prompt for each in self._requests[::GROUP_SIZE]]

    def requests(self, draw: int, temperature: float = 1.0) -> list[Request]:
        """The step's requests; `draw` names their noise."""
        return [
            replace(each, draw=draw, sampling=each.sampling.changed(max_tokens=MAX_TOKENS, temperature=temperature))
            for each in self._requests
        ]

    def sample(self, requests: Sequence[Request]) -> list[Rollout]:
        """Rollouts in the order of their requests."""
        found = {rollout.key: rollout for rollout in self.engine.generate(requests)}
        return [found[request.key] for request in requests]

    def draw_again(self, requests: Sequence[Request], tokens: Sequence[TokenIds]) -> Drawn:
        """Draws tokens again with the present weights and their own noise, in a prefill."""
        before = self.engine.stats
        self.engine.submit(replace(each, rehearsed=own) for each, own in zip(requests, tokens, strict=True))
        num_verified = -1
        while num_verified < (num_verified := self.engine.stats.num_verified):
            self.engine.step()
        self.engine.abort([each.key for each in requests])
        found = self.engine.stats.since(before)
        return Drawn(
            num_kept=found.num_kept, num_changed=found.num_changed, num_tokens=sum(each.size for each in tokens)
        )

    def update(self, rollouts: Sequence[Rollout], version: int) -> None:
        """Takes a step of the optimizer; groups whose rewards are equal get rewards by length, so that it moves."""
        self._optimizer.zero_grad()
        forests, advantages, masks = [], list[float](), []
        for i, (line, prompt) in enumerate(zip(self._lines, self._prompts, strict=True)):
            group = rollouts[i * GROUP_SIZE : (i + 1) * GROUP_SIZE]
            texts = [self._tokenizer.decode(each.tokens, skip_special_tokens=True).strip(" .") for each in group]
            rewards = np.array([float(text == line["answer"]) for text in texts])
            rewards = rewards if rewards.std() > 0 else np.array([-float(each.num_tokens) for each in group])
            forests.append(Forest.from_sequences([np.concatenate([prompt, each.tokens]) for each in group]))
            advantages += ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()
            masks += [[0] * prompt.size + [1] * each.num_tokens for each in group]
        backward(self.model, forests, grpo(advantages, masks))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self.engine.update_weights(version)


def of_rate(policy: Policy) -> dict[str, Any]:
    """Chance of a change one update later over all updates, and from the first weights to those some updates later."""
    first = {t: policy.requests(_FIRST + int(10 * t), t) for t in TEMPERATURES}
    sampled = {t: policy.sample(requests) for t, requests in first.items()}
    one_later: list[Drawn] = []
    later: dict[float, dict[int, Drawn]] = {t: {} for t in TEMPERATURES}
    rollouts = policy.sample(policy.requests(_NEXT))
    for number in range(1, NUM_UPDATES + 1):
        coming = policy.requests(_NEXT + number)
        rehearsed = [each.tokens for each in policy.sample(coming)]
        policy.update(rollouts, number)
        one_later.append(policy.draw_again(coming, rehearsed))
        rollouts = policy.sample([replace(each, rehearsed=own) for each, own in zip(coming, rehearsed, strict=True)])
        if number in APART:
            for t in TEMPERATURES:
                later[t][number] = policy.draw_again(first[t], [each.tokens for each in sampled[t]])
    return {
        "one_update_later": facts_of(one_later),
        "updates_apart": {
            f"{t:g}": {str(number): facts_of([found]) for number, found in own.items()} for t, own in later.items()
        },
        "entropy_nats": {
            f"{t:g}": -mean(np.concatenate([each.logprobs for each in own])) for t, own in sampled.items()
        },
        "num_tokens": {f"{t:g}": sum(each.num_tokens for each in own) for t, own in sampled.items()},
    }


def facts_of(found: Sequence[Drawn]) -> Mapping[str, float]:
    """Return the sums of several draws; `half_kept_tokens` is 0.0 where nothing changed."""
    total = Drawn(
        num_kept=sum(each.num_kept for each in found),
        num_changed=sum(each.num_changed for each in found),
        num_tokens=sum(each.num_tokens for each in found),
    )
    return {
        "change": total.change,
        "kept_share": total.kept_share,
        "num_changed": total.num_changed,
        "num_tokens": total.num_tokens,
        # Half of the tokens are kept where (1 - (1 - P)^L) / (P L) = 1/2, at P L = 1.594.
        "half_kept_tokens": 1.594 / total.change if total.num_changed else 0.0,
    }
