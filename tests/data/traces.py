"""Hand-made records of verifiers v1: nodes, runs and episodes, with only what a test is about."""

from typing import Any

Record = dict[str, Any]


def message(parent: int | None, tokens: list[int], **fields: Any) -> Record:
    """Return a message that the policy was shown."""
    record = {"parent": parent, "message": {"role": "user", "content": "text"}, "sampled": False, "timestamp": 12.5}
    return {**record, "token_ids": tokens, "mask": [False] * len(tokens), "logprobs": [], **fields}


def answer(parent: int | None, prompt: list[int], sampled: list[int], **fields: Any) -> Record:
    """Return a message of the policy: the generation prompt, then the sampled tokens with their log-probs."""
    record = message(parent, prompt + sampled, message={"role": "assistant", "content": "text"}, sampled=True)
    mask = [False] * len(prompt) + [True] * len(sampled)
    return {**record, "mask": mask, "logprobs": [-token / 7 for token in sampled], **fields}


def run(*nodes: Record, **fields: Any) -> Record:
    """Return a run of a trained agent that got the reward 1."""
    record = {"version": 1, "id": "run", "task": {"type": "Task", "data": {"prompt": "text"}, "key": "task"}}
    agent = {"name": "agent", "trainable": True, "config": {"model": None}}
    rewards = {"exact": {"score": 1.0, "weight": 1.0}}
    return {**record, "agent": agent, "nodes": list(nodes), "rewards": rewards, "ok": True, "errors": [], **fields}


def linked(node: Record, *links: tuple[int, str]) -> Record:
    """Return the node with semantic parents."""
    return {**node, "semantic_parents": [{"node": index, "type": kind} for index, kind in links]}
