"""A policy that repeats itself: a small model that has memorised a few solutions of each of some problems."""

from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import treering
from benchmarks.common.progress import OnProgress
from treering.types import LossMask, TokenIds

VOCAB, END = 384, 1
PROMPT_SIZE, SOLUTION_SIZE = 24, 160
NUM_SOLUTIONS = 3
_LEARNING_RATE, _ENOUGH, _MOST_STEPS = 3e-3, 0.02, 600
_SLIPS = 0.05
"""Share of a solution's tokens that are replaced in a copy: the policy learns to come back after a wrong token."""


def problems(num_problems: int, seed: int = 0) -> list[tuple[list[int], list[list[int]]]]:
    """Each problem's prompt, and solutions that differ from each other at a tenth of the positions."""
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


def with_slips(
    known: list[tuple[list[int], list[list[int]]]], rng: np.random.Generator
) -> tuple[list[TokenIds], list[LossMask]]:
    """Each solution after its prompt, as it is and with wrong tokens, which are not trained."""
    sequences, masks = [], []
    for prompt, solutions in known:
        for solution in solutions:
            is_slip = rng.random(len(solution)) < _SLIPS
            slipped = np.where(is_slip, rng.integers(2, VOCAB, len(solution)), solution)
            for tokens, is_wrong in ((solution, np.zeros_like(is_slip)), (slipped, is_slip)):
                sequences.append(np.array([*prompt, *tokens], np.int32))
                masks.append(np.concatenate([np.zeros(len(prompt), bool), ~is_wrong]))
    return sequences, masks


def save_policy(folder: Path, num_problems: int, on_progress: OnProgress) -> float:
    """Trains the policy until it knows the solutions; returns the last loss, nats a token."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=384, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    known, rng = problems(num_problems), np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
    loss = float("inf")
    for step in range(_MOST_STEPS):
        tokens, masks = with_slips(known, rng)
        loss = treering.backward(model, treering.Forest.from_sequences(tokens), treering.objectives.sft(masks)).loss
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            on_progress(f"the policy memorises {num_problems} problems: step {step}, {loss:.2f} nats a token")
        if loss < _ENOUGH:
            break
    model.save_pretrained(folder)
    return loss
