"""Simulate one step of a cluster by definition: each worker decodes one token at a time for all its rollouts."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Worker:
    now: float
    queue: list[int]
    has_share: bool
    running: dict[int, int] = field(default_factory=dict)


def run(starts, queues: Sequence[Sequence[int]], lengths, token_s, *, prompts=None, prefill_s=0.0, steals=None):
    """Return the ends of workers and rollouts, the rollouts per worker, and how many were stolen.

    `steals`: believed lengths, by which a worker without a queue takes the first of the queue with the most tokens.
    """
    workers = [Worker(start, list(queue), bool(queue)) for start, queue in zip(starts, queues, strict=True)]
    ended, counts, num_stolen = {}, [0] * len(workers), 0
    while True:
        active = [w for w in workers if w.has_share and (w.running or w.queue or (steals and _any_queue(workers)))]
        if not active:
            return [w.now for w in workers], [ended[rollout] for rollout in range(len(lengths))], counts, num_stolen
        # min returns the first of equals, the lowest worker.
        worker = min(active, key=lambda w: w.now)
        while len(worker.running) < len(token_s) - 1:
            source = worker
            if not worker.queue:
                source = _richest(workers, steals) if steals else worker
            if source is None or not source.queue:
                break
            num_stolen += source is not worker
            rollout = source.queue.pop(0)
            worker.now += prefill_s * (prompts[rollout] if prompts else 0)
            worker.running[rollout] = lengths[rollout]
        worker.now += token_s[len(worker.running)]
        for rollout in list(worker.running):
            worker.running[rollout] -= 1
            if worker.running[rollout] == 0:
                del worker.running[rollout]
                ended[rollout] = worker.now
                counts[workers.index(worker)] += 1


def _any_queue(workers) -> bool:
    return any(worker.queue for worker in workers)


def _richest(workers, predicted):
    with_queue = [worker for worker in workers if worker.queue]
    return max(with_queue, key=lambda worker: sum(predicted[rollout] for rollout in worker.queue), default=None)
