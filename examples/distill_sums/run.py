"""Trains one small student in three ways, by steps: distilled on-policy from a teacher, by GRPO, and by SFT."""

import argparse
import time
from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import treering
from treering.config.model import DistillOptions
from treering.config.optim import OptimOptions
from treering.config.rl_options import RlOptions
from treering.config.sft_config import SftOptions
from treering.rl.loop import RlLoop
from treering.rl.tasks.sums import ChainedSums
from treering.train.loop.sft_loop import SftLoop

MAX_TOKENS = 64
SUMS_PER_STEP = 32


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    torch.manual_seed(options.seed)
    task = ChainedSums(options.prompts, options.seed, max_number=options.max_number)
    held_out = task.held_out(options.checked)
    solved = held_out.held_out(SUMS_PER_STEP * options.teacher_steps)
    teacher, student = make_model(task, options.teacher_width, 8), make_model(task, options.student_width, 4)
    for name, model, enough in (("teacher", teacher, 0.95), ("student", student, 0.3)):
        num_steps, right = warm_start(model, solved, held_out, enough, options)
        size = model.num_parameters() / 1e6
        print(f"{name}: {size:.1f} M parameters, {num_steps} supervised steps, {right:.2f} right", flush=True)
    teacher.eval().requires_grad_(False)
    own = DistillOptions(divergence="reverse_kl")
    ways: dict[str, Callable[[Qwen3ForCausalLM], Callable[[], object]]] = {
        # The student samples, and each of its tokens is moved towards what the teacher would say there; no reward.
        "distilled": lambda model: rl_loop(
            model, task, options, options.learning_rate, teacher, objective="distill", distill=own
        ),
        # The same rollouts, rewarded by whether they are right.
        "grpo": lambda model: rl_loop(model, task, options, options.grpo_learning_rate, None, objective="grpo"),
        "sft": lambda model: sft_loop(model, solved, options),
    }
    for name, make_loop in ways.items():
        started, model = time.perf_counter(), deepcopy(student)
        step = make_loop(model)
        accuracies = []
        for number in range(options.steps + 1):
            if number % options.check_every == 0:
                accuracies.append(accuracy(model, held_out))
            if number < options.steps:
                step()
        words = "  ".join(f"{value:.2f}" for value in accuracies)
        print(f"{name:10} right every {options.check_every} steps: {words}  ({time.perf_counter() - started:.0f} s)")


def sft_loop(model: Qwen3ForCausalLM, solved: ChainedSums, options: argparse.Namespace) -> Callable[[], object]:
    """As many written solutions a step as the others have rollouts."""
    loop = SftLoop(
        model,
        solved.held_out(options.rollouts * options.group * options.steps).solutions(),
        optim=OptimOptions(learning_rate=options.learning_rate),
        options=SftOptions(trees_per_step=options.rollouts * options.group, seed=options.seed),
    )
    return loop.step


def rl_loop(
    model: Qwen3ForCausalLM,
    task: ChainedSums,
    options: argparse.Namespace,
    learning_rate: float,
    teacher: Qwen3ForCausalLM | None,
    **how: object,
) -> Callable[[], object]:
    loop = RlLoop(
        model,
        task,
        lambda drafter, version: treering.TorchEngine(model, drafter, max_batch=32, version=version, num_threads=1),
        optim=OptimOptions(learning_rate=learning_rate),
        options=RlOptions(
            prompts_per_step=options.rollouts,
            group_size=options.group,
            sampling=treering.Sampling(max_tokens=MAX_TOKENS),
            seed=options.seed,
            **how,
        ),
        teacher=teacher,
    )
    return loop.step


def make_model(task: ChainedSums, width: int, num_layers: int) -> Qwen3ForCausalLM:
    heads = {"num_attention_heads": width // 32, "num_key_value_heads": width // 64, "head_dim": 32}
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": num_layers}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=task.vocab_size, **shape, **heads))


def warm_start(
    model: Qwen3ForCausalLM, solved: ChainedSums, held_out: ChainedSums, enough: float, options: argparse.Namespace
) -> tuple[int, float]:
    """Trains on written solutions until enough sums are right; the steps, and the share that is."""
    optim = OptimOptions(learning_rate=2e-3, warmup_steps=20, weight_decay=0.01, betas=(0.9, 0.99))
    loop = SftLoop(
        model, solved.solutions(), optim=optim, options=SftOptions(trees_per_step=SUMS_PER_STEP, seed=options.seed)
    )
    right = 0.0
    while loop.num_steps_done < options.teacher_steps and right < enough:
        loop.step()
        if loop.num_steps_done % 25 == 0:
            right = accuracy(model, held_out)
    return loop.num_steps_done, right


def accuracy(model: Qwen3ForCausalLM, task: ChainedSums) -> float:
    """The share of a task's prompts that one sampled rollout each gets right."""
    engine = treering.TorchEngine(model, max_batch=64, num_threads=1)
    sampling = treering.Sampling(max_tokens=MAX_TOKENS, stop_tokens=task.stop_tokens)
    prompts = {prompt.prompt_id: prompt for prompt in task.prompts}
    requests = [
        treering.Request(prompt_id=prompt.prompt_id, prompt=prompt.tokens, sampling=sampling) for prompt in task.prompts
    ]
    rewards = [task.reward(prompts[rollout.prompt_id], rollout) for rollout in engine.generate(requests)]
    return sum(rewards) / len(rewards)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default, text in (
        ("steps", 40, "updates of each way"),
        ("check_every", 10, "updates between two measurements"),
        ("prompts", 64, "prompts of the loops"),
        ("rollouts", 8, "prompts of a step"),
        ("group", 8, "rollouts of a prompt"),
        ("checked", 256, "held-out sums that accuracy is measured on"),
        ("max_number", 9, "largest number in a sum"),
        ("teacher_steps", 600, "supervised steps at most, of teacher and student"),
        ("teacher_width", 256, "hidden size of the teacher, which has 8 layers"),
        ("student_width", 192, "hidden size of the student, which has 4 layers"),
        ("seed", 0, "of weights, prompts and noise"),
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"{text} ({default})")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="of distillation and SFT (0.0003)")
    parser.add_argument("--grpo-learning-rate", type=float, default=3e-5, help="of GRPO, which needs less (0.00003)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
