"""Records of trainers of agents: prime-rl's and SkyRL's ids, NeMo-RL's message logs, ART's choices, rLLM's episodes.

Sources: `TrainingSample` of PrimeIntellect-ai/prime-rl, `GeneratorOutput` of NovaSky-AI/SkyRL, `LLMMessageLogType` of
NVIDIA-NeMo/RL, `Trajectory` of OpenPipe/ART, `Episode` and `Step` of rllm-org/rllm.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from treering.data.formats.adapters.token_calls import token_call, token_calls, token_trajectories
from treering.data.formats.codec import check_readable
from treering.data.formats.fields import array, is_blank, number_field, show, text_field
from treering.data.formats.messages import decode_messages
from treering.data.formats.model_calls import MessageCall, message_branches
from treering.data.formats.tasks import NO_ANSWER, TASK_KEYS, Note, task_of
from treering.data.formats.token_arrays import decode_floats, decode_mask, token_ids
from treering.data.formats.tool_calls import nested_tools
from treering.data.trajectory import Message, Trajectory
from treering.errors import InputError

_ROW_KEYS = ("prompt_token_ids", "response_ids", "loss_masks", "rewards", "rollout_logprobs", "trajectory_ids")
_PRIME_IDS = ("prompt_ids", "completion_ids", "completion_logprobs")
_SKYRL_IDS = ("prompt_token_ids", "response_ids", "rollout_logprobs")
_STEP_IDS = ("prompt_ids", "response_ids", "logprobs")


def decode_prime_rl(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """A sample of prime-rl: ids, masks and log-probs of prompt and completion.

    Raises:
        InputError: a bad field, by its name, or arrays of other lengths.

    Example: prompt_ids [1, 2], completion_ids [3] and completion_mask [1] train the token 3.
    """
    check_readable(record, but=("prompt_mask", "completion_mask"))
    return _sampled(record, note, _PRIME_IDS, record.get("reward"))


def decode_skyrl(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """A row of SkyRL, or a batch of its generator, whose fields hold one entry per row.

    Raises:
        InputError: a bad field, by its name, or fields of a batch with different numbers of rows.

    Example: prompt_token_ids [1, 2], response_ids [3] and loss_mask [1] train the token 3.
    """
    check_readable(record, but=("loss_mask", "loss_masks"))
    found = []
    for row in _rows(record):
        named, reward = row.get("trajectory_ids"), row.get("reward") if row.get("rewards") is None else row["rewards"]
        task = {"task_id": named["instance_id"]} if isinstance(named, dict) and named.get("instance_id") else {}
        found += _sampled({**row, **task}, note, _SKYRL_IDS, reward)
    return found


def decode_nemo_rl(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """A message log of NeMo-RL: the token ids of its messages if all have them, else the messages.

    The assistant's messages are trained, and of one with a `token_loss_mask` the tokens that it names.

    Raises:
        InputError: a bad message, with its place, or a `loss_multiplier` other than 0 and 1.

    Example: the messages user [1, 2] and assistant [3] train the token 3.
    """
    check_readable(record)
    factor = number_field(record, "loss_multiplier")
    if factor not in (None, 0, 1):
        raise InputError(f"loss_multiplier weights the whole log, got {factor}; give 0 or 1, or repeat the log")
    log = array("message_log", record["message_log"])
    if factor == 0 or not log:
        note(NO_ANSWER)
        return []
    reward = number_field(record, "total_reward" if record.get("reward") is None else "reward")
    keys = (*TASK_KEYS, "idx")
    if any(not isinstance(one, dict) or is_blank(one.get("token_ids")) for one in log):
        messages = decode_messages(log, "message_log")
        return [
            Trajectory(task_id=task_of(record, note, messages=messages, keys=keys), messages=messages, reward=reward)
        ]
    parts = [_logged(one, f"message_log[{i}]") for i, one in enumerate(log)]
    tokens, mask, logprobs = (np.concatenate(column) for column in zip(*parts, strict=True))
    known = not np.isnan(logprobs[mask]).any()
    return [
        Trajectory(
            task_id=task_of(record, note, tokens=tokens, loss_mask=mask, keys=keys),
            tokens=tokens,
            loss_mask=mask,
            logprobs=np.nan_to_num(logprobs) if known else None,
            reward=reward,
        )
    ]


def decode_art(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """A trajectory of ART and its additional histories: choices are trained, messages are context.

    Raises:
        InputError: a bad message or choice, with its place.

    Example: a user's message and a choice with the message "Hello" train "Hello".
    """
    check_readable(record, but=("tools",))
    histories = [record, *array("additional_histories", record.get("additional_histories") or [])]
    found = [_history(one, "" if i == 0 else f"additional_histories[{i - 1}].") for i, one in enumerate(histories)]
    task_id = task_of(record, note, messages=found[0][0])
    reward = number_field(record, "reward")
    return [Trajectory(task_id=task_id, messages=messages, tools=tools, reward=reward) for messages, tools in found]


def decode_rllm(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """An episode of rLLM: the calls of each agent's steps, of token ids where each step has them.

    Raises:
        InputError: a bad step, with its place.

    Example: a step whose chat_completions are user "Hi" and assistant "Hello" trains "Hello".
    """
    check_readable(record)
    found = []
    for i, agent in enumerate(array("trajectories", record["trajectories"])):
        where = f"trajectories[{i}]"
        if not isinstance(agent, dict):
            raise InputError(f"{where} must be an object with steps, got {show(agent)}; repair it")
        steps = array(f"{where}.steps", agent.get("steps") or [])
        if not steps:
            note(NO_ANSWER)
            continue
        found += _agent(record, agent, steps, where, note)
    return found


def _sampled(record: Mapping[str, Any], note: Note, keys: tuple[str, str, str], reward: object) -> list[Trajectory]:
    """The one call whose prompt, completion and log-probs stand under `keys`."""
    if is_blank(record.get(keys[1])):
        note(NO_ANSWER)
        return []
    call = token_call(record, keys)
    return token_trajectories(
        [call],
        task_id=task_of(record, note, tokens=call.prompt),
        reward=_total(reward),
        advantage=number_field(record, "advantage"),
    )


def _rows(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    first = next(iter(array("prompt_token_ids", record["prompt_token_ids"])), None)
    if not isinstance(first, list):
        return [record]
    columns = {key: array(key, record[key]) for key in _ROW_KEYS if not is_blank(record.get(key))}
    sizes = {key: len(column) for key, column in columns.items()}
    if len(set(sizes.values())) > 1:
        raise InputError(f"the fields of a batch have one entry per row, got {sizes}; align them")
    rest = {key: value for key, value in record.items() if key not in _ROW_KEYS}
    rows = zip(*columns.values(), strict=True)
    return [{**rest, **dict(zip(columns, row, strict=True))} for row in rows]


def _total(reward: object) -> float | None:
    """The reward of a rollout, the sum where each token has one."""
    entries = reward if isinstance(reward, list) else [reward]
    values = [number_field({"reward": entry}, "reward") for entry in entries]
    given = [value for value in values if value is not None]
    return sum(given) if given else None


def _aligned(values: Any, size: int, key: str) -> Any:
    if values.size != size:
        raise InputError(f"{key} has one entry per token: {size} tokens, {values.size} entries; align them")
    return values


def _logged(
    message: Mapping[str, Any], where: str
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """Ids, mask and log-probs of a logged message; NaN where no log-prob is known."""
    tokens = token_ids(message["token_ids"], f"{where}.token_ids")
    is_sampled = text_field(message, "role", f"{where}.role") == "assistant"
    mask = np.full(tokens.size, is_sampled)
    if not is_blank(message.get("token_loss_mask")):
        name = f"{where}.token_loss_mask"
        mask = _aligned(decode_mask(message["token_loss_mask"], name), tokens.size, name)
    logprobs = np.full(tokens.size, np.nan)
    if is_sampled and not is_blank(message.get("generation_logprobs")):
        logprobs = _aligned(decode_floats(message, "generation_logprobs"), tokens.size, f"{where}.generation_logprobs")
    return tokens, mask, logprobs


def _history(history: object, where: str) -> tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...]]:
    if not isinstance(history, dict):
        raise InputError(f"{where[:-1]} must be an object with messages_and_choices, got {show(history)}; repair it")
    entries = array(f"{where}messages_and_choices", history.get("messages_and_choices"))
    messages = []
    for entry in entries:
        choice = entry.get("message") if isinstance(entry, dict) and "role" not in entry else None
        if choice is not None:
            messages.append(choice)
            continue
        is_answer = isinstance(entry, dict) and entry.get("role") == "assistant"
        messages.append({**entry, "weight": 0} if is_answer else entry)
    return decode_messages(messages, f"{where}messages_and_choices"), nested_tools(
        history.get("tools"), f"{where}tools"
    )


def _agent(
    record: Mapping[str, Any], agent: Mapping[str, Any], steps: Sequence[Any], where: str, note: Note
) -> list[Trajectory]:
    reward = number_field(agent, "reward")
    if reward is None and isinstance(record.get("is_correct"), bool):
        reward = float(record["is_correct"])
    known: dict[str, Any] = {"reward": reward}
    if isinstance(record.get("id"), str) and is_blank(record.get("task_id")):
        # An episode is named by its task and the number of its rollout.
        known["task_id"] = record["id"].rpartition(":")[0] or record["id"]
    if calls := token_calls(steps, _STEP_IDS, lambda i: f"{where}.steps[{i}]"):
        if "task_id" not in known:
            known["task_id"] = task_of(record, note, tokens=calls[0].prompt)
        return token_trajectories(calls, **known)
    branches = list(message_branches(_call(step, f"{where}.steps[{i}]") for i, step in enumerate(steps)))
    if "task_id" not in known:
        known["task_id"] = task_of(record, note, messages=branches[0])
    return [Trajectory(messages=messages, **known) for messages in branches]


def _call(step: object, where: str) -> MessageCall:
    """A step's call: its chat up to the answer, which stands at the end."""
    if not isinstance(step, dict):
        raise InputError(f"{where} must be an object with chat_completions, got {show(step)}; repair it")
    messages = decode_messages(step.get("chat_completions"), f"{where}.chat_completions")
    if not messages or not messages[-1].is_trained:
        raise InputError(
            f"{where}.chat_completions ends with what the policy answered, got {show(step.get('chat_completions'))}; "
            "keep the answer in it"
        )
    return MessageCall(prompt=messages[:-1], answer=messages[-1:])
