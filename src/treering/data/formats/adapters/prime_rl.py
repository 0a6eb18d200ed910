"""prime-rl's samples: ids, masks and log-probs of prompt and completion.

Source: `TrainingSample` of PrimeIntellect-ai/prime-rl.
"""

from collections.abc import Mapping
from typing import Any

from treering.data.formats.codec import check_readable
from treering.data.formats.json_fields import is_blank, number_field
from treering.data.formats.model_calls import token_call, token_trajectories
from treering.data.formats.record_format import NO_ANSWER, Note, RecordFormat, has_keys, task_of
from treering.data.trajectory import Trajectory

_IDS = ("prompt_ids", "completion_ids", "completion_logprobs")


def decode_prime_rl(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """Decode a sample of prime-rl."""
    check_readable(record, but=("prompt_mask", "completion_mask"))
    return sampled_call(record, note, _IDS, record.get("reward"))


def sampled_call(record: Mapping[str, Any], note: Note, keys: tuple[str, str, str], reward: object) -> list[Trajectory]:
    """Decode the call whose prompt, completion and log-probs are under `keys`."""
    if is_blank(record.get(keys[1])):
        note(NO_ANSWER)
        return []
    call = token_call(record, keys)
    # Rewards may be one number per token.
    values = [number_field({"reward": each}, "reward") for each in (reward if isinstance(reward, list) else [reward])]
    given = [value for value in values if value is not None]
    return token_trajectories(
        [call],
        task_id=task_of(record, note, tokens=call.prompt),
        reward=sum(given) if given else None,
        advantage=number_field(record, "advantage"),
    )


FORMATS = (RecordFormat(name="prime_rl", decode=decode_prime_rl, keys=(_IDS[:2],), signs=((40, has_keys(*_IDS[:2])),)),)
