"""Claim: the engine decodes faster than `model.generate`, and faster still with drafts, without changing a token.

`python -m benchmarks engine` takes four to six minutes. It measures plain decoding of a random model, drafting with a
policy trained for a minute, and what a drafter costs where drafts cannot help. Wall time, all ways in turns in one
process; the controls count CPU time, pair by pair.
"""

import os
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.common.progress import OnProgress, silent
from benchmarks.common.timing import environment, one_thread
from benchmarks.engine.cases import SHAPE, warm_policy
from benchmarks.engine.controls import measure_controls
from benchmarks.engine.drafting import measure_drafting
from benchmarks.engine.runs import thread_counts
from benchmarks.engine.speed import PROMPT_LENGTH, RESPONSE_LENGTH, measure_speed
from benchmarks.tree.cases import build_model

NOTE = "four to six minutes, one of which trains the small policy whose rollouts are drafted"
TABLES = {
    "speed": ("batch_size", "generate.tokens_per_s", "engine.tokens_per_s", "ratio"),
    "drafting": (
        *("batch_size", "generate_tokens_per_s", "each_tokens_per_s", "plain_tokens_per_s", "drafting.tokens_per_s"),
        *("drafting.ratio_to_each", "drafting.ratio", "drafting.tokens_per_forward", "drafting.acceptance"),
        *("drafting.num_differing", "num_rollouts"),
    ),
    "controls": ("name", "ratio", "low", "high", "num_pairs", "drafted_per_forward", "num_differing", "num_rollouts"),
}


def measure(*, num_runs: int = 5, on_progress: OnProgress = silent) -> dict[str, Any]:
    """Plain decoding, drafting by batch size, and controls by case."""
    model = build_model(shape=SHAPE).eval()
    speed = measure_speed(model, num_runs=num_runs, on_progress=on_progress)
    with one_thread():
        policy = warm_policy(on_progress)
        drafting = measure_drafting(policy, num_runs=num_runs, on_progress=on_progress)
        # By CPU time, of which a thread that waits takes as much as one that works.
        controls = measure_controls(policy, on_progress=on_progress)
    alike = {"dtype": "float32", "threads": thread_counts()}
    return {
        "speed": speed,
        "drafting": drafting,
        "controls": controls,
        "environment": environment(
            cpu_capability=torch.backends.cpu.get_cpu_capability(),
            num_processors=os.cpu_count(),
            clock="wall time",
            runs=num_runs,
            speed={
                "model": asdict(SHAPE),
                "num_parameters": model.num_parameters(),
                **alike,
                "prompt_length": PROMPT_LENGTH,
                "response_length": RESPONSE_LENGTH,
            },
            drafting={
                "num_parameters": policy.model.num_parameters(),
                **alike,
                "warm_start_steps": policy.num_steps,
                "accuracy": policy.accuracy,
                "num_prompts": len(policy.task.prompts),
                "group_size": policy.group_size,
                "max_tokens": policy.max_tokens,
                "verify_costs": "measured",
            },
        ),
    }
