"""Compares an episode's traces with the log of its calls: what is trained is the log, and the traces have to agree."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from treering.data.trace import Trace
from treering.errors import InputError
from treering.rl.environments.calls import Call
from treering.types import TokenIds

Ids = tuple[bytes, bytes]
"""The ids of a call: its context, and what was sampled."""


def ids_of(call: Call) -> Ids:
    """The ids of a call of the log."""
    return call.context.tobytes(), call.rollout.tokens.astype(np.int32).tobytes()


def check_calls(trace: Trace, calls: Sequence[Call], name: str) -> None:
    """Compares the messages that a trace says were sampled with the calls that it made.

    Args:
        trace: of a trained agent.
        calls: of the log, those that came with the trace's id.
        name: of the agent, for errors.

    Raises:
        InputError: a sampled message without such a call, or a call without a message.
    """
    said, logged = Counter(sampled_ids(trace)), Counter(map(ids_of, calls))
    strange, lost = (said - logged).total(), (logged - said).total()
    if strange or lost:
        raise InputError(
            f"the trace of agent {name!r} does not match the calls that were answered: {strange} of its "
            f"{said.total()} sampled messages are no call, and {lost} of {logged.total()} calls are no message; ask "
            "the policy by the endpoint alone, and keep its answers as they are"
        )


def sampled_ids(trace: Trace, nodes: Iterable[int] | None = None) -> list[Ids]:
    """What the sampled messages of a trace, or those of the given nodes, were sampled after, and their ids.

    Raises:
        InputError: a sampled message whose ids are not known, or not in one piece.

    Example: nodes with the ids [5, 6] and, sampled, [7, 8] with the mask [False, True] are one call: [5, 6, 7] -> [8].
    """
    paths: dict[int, TokenIds] = {}
    found = []
    wanted = None if nodes is None else set(nodes)
    for i, node in enumerate(trace.nodes):
        before = np.zeros(0, np.int32) if node.parent is None else paths[node.parent]
        paths[i] = np.concatenate([before, node.token_ids]).astype(np.int32)
        if not (node.sampled or node.mask.any()) or (wanted is not None and i not in wanted):
            continue
        own = np.flatnonzero(node.mask)
        if own.size == 0 or own[-1] - own[0] + 1 != own.size:
            raise InputError(f"nodes[{i}] was sampled, and its ids are not known; ask the policy by the endpoint alone")
        start = before.size + int(own[0])
        found.append((paths[i][:start].tobytes(), paths[i][start : start + own.size].tobytes()))
    return found


def untrained_ids(trace: Trace) -> set[Ids]:
    """The calls on no trained path of a trace, such as compactions that were not accepted."""
    kept = {i for path in trace.paths() for i in path}
    return set(sampled_ids(trace, set(range(len(trace.nodes))) - kept))
