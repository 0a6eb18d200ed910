"""How far float32 gradients are from float64: on trees, flat, and flat with one operation in float64."""

import cProfile
import pstats
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.common.progress import OnProgress
from benchmarks.tree.steps import gradient, relative_error
from treering.cli.demo import sums_in_words
from treering.engine.protocol import Request, Sampling
from treering.engine.torch_engine import TorchEngine
from treering.objectives import grpo
from treering.train.step import backward
from treering.tree.forest import Forest
from treering.types import TokenIds

GROUP_SIZE = 4
PAIR = 2
"""Size of a group in 16 bits, whose products take a minute on a processor without them."""
LOSS_SCALE = 1024.0


def distances(folder: Path, *, num_seeds: int, on_progress: OnProgress) -> dict[str, Any]:
    """Distance of each way to the float64 tree over its norm, medians over seeds.

    tree: Treering. packed: Treering, one chain per sequence. stock: transformers, one sequence after another.
    stock_wide: the same with its log-softmax, over 49,152 logits, in float64.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    rows = []
    for seed in range(num_seeds):
        on_progress(f"exactness: seed {seed + 1} of {num_seeds}")
        ways = Ways(model, *sample_group(model, folder, seed), seed)
        model.double()
        truth = ways.tree()
        model.float()
        found = {"tree": ways.tree, "packed": ways.packed, "stock": ways.stock, "stock_wide": ways.stock_wide}
        rows.append({"seed": seed, **{name: relative_error(way(), truth) for name, way in found.items()}})
    medians = {name: median(row[name] for row in rows) for name in rows[0] if name != "seed"}
    return {"medians": medians, "stock_over_tree": medians["stock"] / medians["tree"], "seeds": rows}


def half_distances(folder: Path, dtype: torch.dtype, *, num_seeds: int, on_progress: OnProgress) -> dict[str, Any]:
    """Return how far gradients of 16-bit weights are from float64, for trees and flat sequences: medians over seeds.

    The float64 gradient is of the same rounded weights. float16 has its loss scaled, as every training in it has.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    rows = []
    for seed in range(num_seeds):
        on_progress(f"{dtype}: seed {seed + 1} of {num_seeds}")
        scale = LOSS_SCALE if dtype == torch.float16 else 1.0
        ways = Ways(model.float(), *sample_group(model, folder, seed, PAIR), seed, scale=scale)
        # Rounds the weights.
        model.to(dtype).double()
        truth = ways.tree()
        model.to(dtype)
        found = {"tree": ways.tree, "stock": ways.stock}
        rows.append({"seed": seed, **{name: relative_error(way(), truth) for name, way in found.items()}})
    medians = {name: median(row[name] for row in rows) for name in rows[0] if name != "seed"}
    return {"medians": medians, "tree_over_stock": medians["tree"] / medians["stock"], "seeds": rows}


def sample_group(model: PreTrainedModel, folder: Path, seed: int, size: int = GROUP_SIZE) -> tuple[int, list[TokenIds]]:
    """Tokens of a prompt, and whole sequences of its group, sampled at temperature 1."""
    engine = TorchEngine(model, max_batch=size, max_tokens=2048, seed=seed)
    requests = requests_of(folder, num_prompts=1, size=size, seed=seed)
    prompt = requests[0].prompt
    return prompt.size, [np.concatenate([prompt, rollout.tokens]) for rollout in engine.generate(requests)]


def requests_of(folder: Path, *, num_prompts: int, size: int, seed: int) -> list[Request]:
    """Groups of rollouts of at most 24 tokens for sums written as text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sampling = Sampling(max_tokens=24, stop_tokens=(tokenizer.eos_token_id,))
    found = []
    for line in sums_in_words(num_prompts, seed):
        chat = [{"role": "user", "content": line["prompt"]}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompt = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        found += [Request(prompt_id=line["prompt_id"], prompt=prompt, sampling=sampling, sample=i) for i in range(size)]
    return found


class Ways:
    """Gradients of one group: the negated mean over its sequences of advantage times mean log-probability."""

    def __init__(
        self, model: PreTrainedModel, num_prompt: int, sequences: Sequence[TokenIds], seed: int, *, scale: float = 1.0
    ) -> None:
        """Draw advantages whose sum is 0, and multiply them by `scale`."""
        self._model, self._start, self._sequences = model, num_prompt, sequences
        draws = scale * np.random.default_rng(seed).standard_normal(len(sequences))
        self._advantages = (draws - draws.mean()).tolist()

    def tree(self) -> torch.Tensor:
        """Shared tokens once."""
        self.step([Forest.from_sequences(self._sequences)])
        return gradient(self._model)

    def packed(self) -> torch.Tensor:
        """One chain per sequence."""
        self.step([Forest.from_sequences([each]) for each in self._sequences])
        return gradient(self._model)

    def step(self, forests: Sequence[Forest]) -> None:
        """Fills `.grad` from new."""
        self._model.zero_grad()
        masks = [[0] * self._start + [1] * (each.size - self._start) for each in self._sequences]
        backward(self._model, forests, grpo(self._advantages, masks))

    def stock(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Stock transformers; `dtype` is that of the log-softmax."""
        self._model.zero_grad()
        for sequence, advantage in zip(self._sequences, self._advantages, strict=True):
            ids = torch.from_numpy(sequence).long()[None]
            logits = self._model(input_ids=ids, use_cache=False).logits[0, self._start - 1 : -1].to(dtype)
            chosen = logits.log_softmax(-1).gather(1, ids[0, self._start :, None]).mean()
            (-advantage / len(self._sequences) * chosen).backward()
        return gradient(self._model)

    def stock_wide(self) -> torch.Tensor:
        """`stock` with its log-softmax in float64."""
        return self.stock(torch.float64)


def profiles(folder: Path) -> dict[str, Any]:
    """What takes the time of sampling 32 rollouts and of the gradient of one group."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = TorchEngine(model, max_batch=32, max_tokens=8192)
    asked = requests_of(folder, num_prompts=8, size=4, seed=0)
    ways = Ways(model.train(), *(group := sample_group(model, folder, 0)), 0)
    forests = [Forest.from_sequences(group[1])]
    return {
        "sampling": _profile(lambda: list(engine.generate(asked))),
        "gradient": _profile(lambda: ways.step(forests)),
    }


def _profile(work: Callable[[], object]) -> dict[str, Any]:
    """Processor seconds of the second call, and the functions that take most of them."""
    work()
    functions, started = cProfile.Profile(), time.process_time()
    functions.runcall(work)
    total = time.process_time() - started
    stats = pstats.Stats(functions).stats  # type: ignore[attr-defined]
    ranked = sorted(stats.items(), key=lambda item: -item[1][2])[:10]
    return {
        "processor_s": total,
        "functions": {f"{Path(code[0]).name}:{code[2]}": facts[2] for code, facts in ranked},
    }
