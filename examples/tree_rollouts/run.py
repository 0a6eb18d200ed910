"""Trains a small policy on tree rollouts: each rollout of a group is branched at its least likely tokens."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from sums_with_calculator import Calculator
from transformers import Qwen3Config, Qwen3ForCausalLM

import treering
from treering.config.optim import OptimOptions
from treering.config.sft_config import SftOptions
from treering.train.loop.sft_loop import SftLoop


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    task = Calculator(options.prompts, options.seed, max_terms=4, max_number=20)
    model = warm_start(task, options.warmup_steps, options.seed)
    engine = treering.TorchEngine(model, max_batch=32, num_threads=1)
    engine.keep_rollouts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    for step in range(1, options.steps + 1):
        before = engine.stats
        requests = list(root_requests(task, step, options.roots))
        roots = sample(engine, task, requests)
        rollouts = roots + sample(engine, task, list(branch_requests(requests, roots, options)))
        done = engine.stats.since(before)
        forests = train(model, optimizer, task, rollouts)
        engine.update_weights(step)
        reward = np.mean([rollout.reward for rollout in roots])
        num_flat = sum(int(rollout.loss_mask.sum()) for rollout in rollouts)
        sharing = 1 - sum(f.num_tokens for f in forests) / sum(f.num_branch_tokens for f in forests)
        print(
            f"step {step:2}  reward {reward:.3f}  rollouts {len(rollouts)}  sharing {sharing:.2f}  "
            f"sampled {done.num_sampled} (flat {num_flat})  prefilled {done.num_prefilled}",
            flush=True,
        )


def root_requests(task: Calculator, step: int, num_roots: int) -> Iterator[treering.Request]:
    sampling = treering.Sampling(max_tokens=64, stop_tokens=task.stop_tokens)
    for prompt in task.prompts:
        for i in range(num_roots):
            yield treering.Request(
                prompt_id=prompt.prompt_id, prompt=prompt.tokens, sampling=sampling, draw=step, sample=i
            )


def branch_requests(
    requests: Sequence[treering.Request], roots: Sequence[treering.Rollout], options: argparse.Namespace
) -> Iterator[treering.Request]:
    """Samples each root again from its least likely tokens on; a branch at its first token is a sibling."""
    for request, root in zip(requests, roots, strict=True):
        least_likely = np.argsort(np.where(root.loss_mask, root.policy_logprobs, 1.0))
        points = least_likely[: min(options.points, int(root.loss_mask.sum()))].repeat(options.branches)
        first = options.roots + root.sample * options.points * options.branches
        for index, num_shared in enumerate(points.tolist(), first):
            yield replace(request, sample=index, so_far=root.branch(num_shared, sample=index))


def sample(
    engine: treering.TorchEngine, task: Calculator, requests: Sequence[treering.Request]
) -> list[treering.Rollout]:
    """The finished rollouts with rewards: after each call the calculator answers, and the rollout continues."""
    prompts = {prompt.prompt_id: prompt for prompt in task.prompts}
    by_key = {request.key: request for request in requests}
    finished: dict[object, treering.Rollout] = {}
    engine.submit(requests)
    while engine.num_unfinished:
        for rollout in engine.step():
            request = by_key[rollout.key]
            answer = task.answer(rollout) if rollout.finish_reason == "stop" else None
            if answer is not None and rollout.num_tokens + answer.size < request.sampling.max_tokens:
                engine.submit([replace(request, so_far=rollout.observe(answer))])
            else:
                reward = task.reward(prompts[rollout.prompt_id], rollout)
                finished[rollout.key] = replace(rollout, reward=reward)
    return [finished[request.key] for request in requests]


def train(
    model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, task: Calculator, rollouts: Sequence[treering.Rollout]
) -> list[treering.Forest]:
    """One update: a tree per prompt, one advantage per node, and every token of a tree once."""
    forests, advantages, masks, logprobs = [], [], [], []
    for prompt in task.prompts:
        group = [rollout for rollout in rollouts if rollout.prompt_id == prompt.prompt_id]
        forests.append(treering.Forest.from_sequences([np.concatenate([prompt.tokens, r.tokens]) for r in group]))
        advantages += treering.tree_advantages(forests[-1], [rollout.reward for rollout in group], "siblings")
        masks += [np.concatenate([np.zeros(prompt.tokens.size), r.loss_mask]) for r in group]
        logprobs += [np.concatenate([np.zeros(prompt.tokens.size), r.policy_logprobs]) for r in group]
    objective = treering.objectives.grpo(advantages, masks, logprobs, normalizer="token_mean", shared="once")
    optimizer.zero_grad()
    treering.backward(model, forests, objective)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return forests


def warm_start(task: Calculator, num_steps: int, seed: int) -> Qwen3ForCausalLM:
    """A policy of 0.6 M parameters, trained on the solutions of other sums."""
    torch.manual_seed(seed)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    shape = {"vocab_size": task.vocab_size, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, **heads))
    optim = OptimOptions(learning_rate=3e-3, warmup_steps=20, weight_decay=0.01)
    solved = task.held_out(32 * num_steps).solutions()
    loop = SftLoop(model, solved, optim=optim, options=SftOptions(trees_per_step=32, seed=seed))
    for _ in range(num_steps):
        loop.step()
    return model


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default, text in (
        ("steps", 20, "updates"),
        ("prompts", 16, "prompts of a step"),
        ("roots", 4, "rollouts of a prompt before branching"),
        ("points", 2, "tokens at which each of them is branched"),
        ("branches", 2, "branches at each of these tokens"),
        ("warmup-steps", 150, "supervised steps"),
        ("seed", 0, "of weights and prompts"),
        ("learning-rate", 1e-4, "of the updates"),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
