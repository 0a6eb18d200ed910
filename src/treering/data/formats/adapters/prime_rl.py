"""prime-rl's samples: ids, masks and log-probs of prompt and completion.

Source: `TrainingSample` of PrimeIntellect-ai/prime-rl.
"""

from collections.abc import Mapping
from typing import Any

from treering.data.formats.codec import check_readable
from treering.data.formats.json_fields import (
    is_blank,
    number_field,
)
from treering.data.formats.model_calls import token_call, token_trajectories
from treering.data.formats.record_format import NO_ANSWER, Note, RecordFormat, has_keys, task_of
from treering.data.trajectory import Trajectory

_IDS = ("prompt_ids", "completion_ids", "completion_logprobs")


def decode_prime_rl(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """Decode a sample of prime-rl: ids, masks and log-probs of prompt and completion.

    Example: prompt_ids [1, 2], completion_ids [3] and completion_mask [1] train the token 3.
    """
    check_readable(record, but=("prompt_mask", "completion_mask"))
    return sampled_call(record, note, _IDS, record.get("reward"))


def sampled_call(record: Mapping[str, Any], note: Note, keys: tuple[str, str, str], reward: object) -> list[Trajectory]:
    """Decode the call whose prompt, completion and log-probs are under `keys`."""
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


def _total(reward: object) -> float | None:
    """Return the reward of a rollout, or the sum of per-token rewards."""
    entries = reward if isinstance(reward, list) else [reward]
    values = [number_field({"reward": entry}, "reward") for entry in entries]
    given = [value for value in values if value is not None]
    return sum(given) if given else None


FORMATS = (RecordFormat(name="prime_rl", decode=decode_prime_rl, keys=(_IDS[:2],), signs=((40, has_keys(*_IDS[:2])),)),)
