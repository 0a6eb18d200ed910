"""rLLM's episodes: the calls of each agent's steps.

Source: `Episode` and `Step` of rllm-org/rllm.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any

from treering.data.formats.chat_messages import decode_messages
from treering.data.formats.codec import check_readable
from treering.data.formats.json_fields import array, checked_object, is_blank, number_field, show
from treering.data.formats.model_calls import message_branches, token_calls, token_trajectories
from treering.data.formats.record_format import NO_ANSWER, Note, RecordFormat, task_of
from treering.data.trajectory import Message, Trajectory
from treering.errors import InputError

_IDS = ("prompt_ids", "response_ids", "logprobs")


def decode_rllm(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """Decode the calls of each agent's steps, as token ids if each step has them."""
    check_readable(record)
    found = []
    for i, agent in enumerate(array("trajectories", record["trajectories"])):
        where = f"trajectories[{i}]"
        agent = checked_object(where, agent, fields="steps")
        steps = array(f"{where}.steps", agent.get("steps") or [])
        if not steps:
            note(NO_ANSWER)
            continue
        found += _agent(record, agent, steps, where, note)
    return found


def _agent(
    record: Mapping[str, Any], agent: Mapping[str, Any], steps: Sequence[Any], where: str, note: Note
) -> list[Trajectory]:
    reward = number_field(agent, "reward")
    if reward is None and isinstance(record.get("is_correct"), bool):
        reward = float(record["is_correct"])
    if isinstance(record.get("id"), str) and is_blank(record.get("task_id")):
        # The id of an episode is TASK:ROLLOUT.
        record = {**record, "task_id": record["id"].rpartition(":")[0] or record["id"]}
    if calls := token_calls(steps, _IDS, lambda i: f"{where}.steps[{i}]"):
        task_id = task_of(record, note, tokens=calls[0].prompt)
        return token_trajectories(calls, task_id=task_id, reward=reward)
    branches = list(message_branches(_chat(step, f"{where}.steps[{i}]") for i, step in enumerate(steps)))
    task_id = task_of(record, note, messages=branches[0])
    return [Trajectory(messages=messages, task_id=task_id, reward=reward) for messages in branches]


def _chat(step: object, where: str) -> tuple[Message, ...]:
    """Decode a step; its chat ends with the answer."""
    chat = checked_object(where, step, fields="chat_completions").get("chat_completions")
    messages = decode_messages(chat, f"{where}.chat_completions")
    if not messages or not messages[-1].is_trained:
        raise InputError(
            f"{where}.chat_completions must end with the policy's answer, got {show(chat)}; keep the answer in it"
        )
    return messages


def _has_steps(record: Mapping[str, Any], filled: Set[str]) -> bool:
    agents = record.get("trajectories")
    first = agents[0] if isinstance(agents, list) and agents else None
    return isinstance(first, dict) and "steps" in first


FORMATS = (RecordFormat(name="rllm", decode=decode_rllm, keys=(("trajectories",),), signs=((50, _has_steps),)),)
