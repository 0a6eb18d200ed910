"""A reward for runs in processes of their own."""

from treering.rl.tasks.task import Prompt


def share_of_the_first_half(prompt: Prompt, text: str) -> float:
    """The share of words w0 to w13, which differs between rollouts and rises with training."""
    words = text.split()
    return sum(word in {f"w{i}" for i in range(14)} for word in words) / max(len(words), 1)
