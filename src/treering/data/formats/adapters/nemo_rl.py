"""NeMo-RL's message logs.

Source: `LLMMessageLogType` of NVIDIA-NeMo/RL.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from treering.data.formats.chat_messages import decode_messages
from treering.data.formats.codec import check_readable
from treering.data.formats.json_fields import (
    array,
    check_size,
    decode_floats,
    decode_mask,
    is_blank,
    number_field,
    text_field,
    token_ids,
)
from treering.data.formats.record_format import NO_ANSWER, TASK_KEYS, Note, RecordFormat, has_keys, task_of
from treering.data.trajectory import Trajectory
from treering.errors import InputError


def decode_nemo_rl(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """Decode a message log of NeMo-RL: the token ids of its messages if all have them, else the messages.

    The assistant's messages are trained; in a message with a `token_loss_mask`, the tokens of the mask are.
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


def _logged(
    message: Mapping[str, Any], where: str
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """Return ids, mask and log-probs of a message; log-probs are NaN if they are unknown."""
    tokens = token_ids(message["token_ids"], f"{where}.token_ids")
    is_sampled = text_field(message, "role", f"{where}.role") == "assistant"
    mask = np.full(tokens.size, is_sampled)
    if not is_blank(message.get("token_loss_mask")):
        mask = decode_mask(message["token_loss_mask"], f"{where}.token_loss_mask")
        check_size(mask, tokens.size, f"{where}.token_loss_mask")
    given = decode_floats(message, "generation_logprobs") if is_sampled else None
    if given is None or not given.size:
        return tokens, mask, np.full(tokens.size, np.nan)
    check_size(given, tokens.size, f"{where}.generation_logprobs")
    return tokens, mask, given


FORMATS = (
    RecordFormat(
        name="nemo_rl", decode=decode_nemo_rl, keys=(("message_log",),), signs=((42, has_keys("message_log")),)
    ),
)
