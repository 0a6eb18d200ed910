"""What trees save on two kinds of agent data, with the gradients of both ways compared.

    python examples/agent_trees/run.py toolbench     back-tracking search trees, one advantage a node
    python examples/agent_trees/run.py tau           each assistant turn its own sample

Reads the files of the real-data folder (TREERING_DATA, default ../shared/data); without it, generated trajectories.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import treering
from treering.data import AgentSpec, RenderedTrajectory, by_task, data_folder, generate_trajectories, read_trajectories
from treering.data import render as render_trajectories

VOCAB_SIZE = 4096
FILES = {"toolbench": "bench/toolbench_dfsdt.jsonl.gz", "tau": "bench/tau_airline_gpt4o.jsonl.gz"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """The training samples of a task: sequences, masks and advantages, one entry per token."""

    sequences: list[np.ndarray]
    loss_masks: list[np.ndarray]
    advantages: list[np.ndarray]


def search_tree(task: Sequence[RenderedTrajectory]) -> Samples:
    """The branches of a search with the advantage of each node over its parent."""
    forest = treering.Forest.from_sequences([branch.tokens for branch in task])
    return Samples(
        sequences=[branch.tokens for branch in task],
        loss_masks=[branch.loss_mask for branch in task],
        advantages=treering.tree_advantages(forest, [branch.reward or 0.0 for branch in task], "parent"),
    )


def turn_samples(task: Sequence[RenderedTrajectory]) -> Samples:
    """Each turn with all that stood before it, as inference saw it; trained on the turn alone."""
    rewards = np.array([trial.reward or 0.0 for trial in task])
    samples = Samples(sequences=[], loss_masks=[], advantages=[])
    for trial, advantage in zip(task, rewards - rewards.mean(), strict=True):
        begin = 0
        for end in trial.turn_ends.tolist():
            samples.sequences.append(trial.tokens[:end])
            samples.loss_masks.append(trial.loss_mask[:end] & (np.arange(end) >= begin))
            samples.advantages.append(np.full(end, advantage))
            begin = end
    return samples


KINDS: dict[str, Callable[[Sequence[RenderedTrajectory]], Samples]] = {"toolbench": search_tree, "tau": turn_samples}


def load_tasks(kind: str, num_tasks: int) -> list[list[RenderedTrajectory]]:
    """The first tasks of a file, or of generated trajectories."""
    folder = data_folder()
    if folder is None:
        print("no real data here: generated trajectories instead")
        return by_task(render_trajectories(list(generate_trajectories(AgentSpec(num_tasks=num_tasks)))))
    trajectories = read_trajectories(folder / FILES[kind])
    return folded(by_task(render_trajectories(trajectories, folder / "tokenizer", "plain"))[:num_tasks])


def folded(tasks: list[list[RenderedTrajectory]]) -> list[list[RenderedTrajectory]]:
    """The same with ids modulo `VOCAB_SIZE`: a real vocabulary would be most of so small a model."""
    return [[replace(one, tokens=one.tokens % VOCAB_SIZE) for one in task] for task in tasks]


def gradient(model: Qwen3ForCausalLM, samples: Samples, *, as_tree: bool) -> tuple[float, torch.Tensor]:
    """Seconds of process time and the whole gradient, as one tree or as separate sequences."""
    groups = [samples.sequences] if as_tree else [[sequence] for sequence in samples.sequences]
    forests = [treering.Forest.from_sequences(group) for group in groups]
    objective = treering.objectives.grpo(samples.advantages, samples.loss_masks, normalizer="token_mean")
    model.zero_grad()
    start = time.process_time()
    treering.backward(model, forests, objective, max_tokens=16384)
    seconds = time.process_time() - start
    return seconds, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def warm_up(model: Qwen3ForCausalLM, samples: Samples) -> None:
    """One untimed pass of a sample: what a process loads once belongs to neither way."""
    one = Samples(sequences=samples.sequences[:1], loss_masks=samples.loss_masks[:1], advantages=samples.advantages[:1])
    gradient(model, one, as_tree=True)


def main() -> None:
    """Prints a line per task and the total."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--tasks", type=int, default=3, help="tasks from the start of the file; 3")
    options = parser.parse_args()
    tasks = load_tasks(options.kind, options.tasks)
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB_SIZE, num_key_value_heads=2, head_dim=32, **shape))
    warm_up(model, KINDS[options.kind](tasks[0]))
    print(f"{'task':>24} {'samples':>8} {'flat':>8} {'tree':>8} {'ratio':>6} {'flat s':>7} {'tree s':>7} {'error':>8}")
    totals = np.zeros(5)
    for task in tasks:
        samples = KINDS[options.kind](task)
        num_tree = treering.Forest.from_sequences(samples.sequences).num_tokens
        num_flat = sum(sequence.size for sequence in samples.sequences)
        flat_s, flat = gradient(model, samples, as_tree=False)
        tree_s, tree = gradient(model, samples, as_tree=True)
        error = float((tree - flat).norm() / flat.norm()) if flat.any() else None
        print(line(str(task[0].task_id), len(samples.sequences), num_flat, num_tree, flat_s, tree_s, error))
        totals += (len(samples.sequences), num_flat, num_tree, flat_s, tree_s)
    print(line("all", *totals, None), f"{totals[3] / totals[4]:.2f}x")


def line(
    name: str, samples: float, num_flat: float, num_tree: float, flat_s: float, tree_s: float, error: float | None
) -> str:
    """One row of the table; without an error where all rewards are equal, so that there is no gradient."""
    counts = f"{samples:8.0f} {num_flat:8.0f} {num_tree:8.0f} {num_flat / num_tree:6.2f}"
    return f"{name:>24.24} {counts} {flat_s:7.1f} {tree_s:7.1f} {'-' if error is None else f'{error:.1e}':>8}"


if __name__ == "__main__":
    main()
