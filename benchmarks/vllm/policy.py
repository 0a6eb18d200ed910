"""A policy that repeats itself: a small model that has memorised a few solutions of each of some problems."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import treering

VOCAB, END = 384, 1
PROMPT_SIZE, SOLUTION_SIZE = 24, 160
NUM_SOLUTIONS = 3
_LEARNING_RATE, _ENOUGH, _MOST_STEPS = 2e-3, 0.02, 600


def problems(num_problems: int, seed: int = 0) -> list[tuple[list[int], list[list[int]]]]:
    """Each problem's prompt, and solutions that differ from each other at a tenth of the places."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(num_problems):
        prompt = rng.integers(2, VOCAB, PROMPT_SIZE)
        base = rng.integers(2, VOCAB, SOLUTION_SIZE)
        solutions = [np.where(rng.random(SOLUTION_SIZE) < 0.1, rng.integers(2, VOCAB, SOLUTION_SIZE), base)]
        while len(solutions) < NUM_SOLUTIONS:
            is_edit = rng.random(SOLUTION_SIZE) < 0.1
            size = SOLUTION_SIZE - int(rng.integers(SOLUTION_SIZE // 2))
            solutions.append(np.where(is_edit, rng.integers(2, VOCAB, SOLUTION_SIZE), base)[:size])
        found.append((prompt.tolist(), [[*solution.tolist(), END] for solution in solutions]))
    return found


def save_policy(folder: Path, num_problems: int, on_progress: Callable[[str], None]) -> float:
    """Trains the policy until it knows the solutions; returns the last loss, nats a token."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=384, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    pairs = [(prompt, solution) for prompt, solutions in problems(num_problems) for solution in solutions]
    masks = [np.array([False] * len(prompt) + [True] * len(solution)) for prompt, solution in pairs]
    forest = treering.Forest.from_sequences([np.array([*prompt, *solution], np.int32) for prompt, solution in pairs])
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
    loss = float("inf")
    for step in range(_MOST_STEPS):
        loss = treering.backward(model, forest, treering.objectives.sft(masks)).loss
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            on_progress(f"the policy memorises {num_problems} problems: step {step}, {loss:.2f} nats a token")
        if loss < _ENOUGH:
            break
    model.save_pretrained(folder)
    return loss
