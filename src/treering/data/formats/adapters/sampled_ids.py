"""Rows of prompt ids and sampled ids: prime-rl's samples, and SkyRL's rows and batches of its generator.

Sources: `TrainingSample` of PrimeIntellect-ai/prime-rl, `GeneratorOutput` of NovaSky-AI/SkyRL.
"""

from collections.abc import Mapping
from typing import Any

from treering.data.formats.codec import check_readable
from treering.data.formats.json_fields import array, is_blank, number_field
from treering.data.formats.model_calls import token_call, token_trajectories
from treering.data.formats.record_format import NO_ANSWER, Note, RecordFormat, has_keys, task_of
from treering.data.trajectory import Trajectory
from treering.errors import InputError

_PRIME_RL_IDS = ("prompt_ids", "completion_ids", "completion_logprobs")
_SKYRL_IDS = ("prompt_token_ids", "response_ids", "rollout_logprobs")
_SKYRL_COLUMNS = (*_SKYRL_IDS, "loss_masks", "rewards", "trajectory_ids")


def decode_prime_rl(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """Decode a sample of prime-rl."""
    check_readable(record, but=("prompt_mask", "completion_mask"))
    return _sampled(record, note, _PRIME_RL_IDS, record.get("reward"))


def decode_skyrl(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """Decode a row of SkyRL, or a batch of its generator, whose fields hold one entry per row."""
    check_readable(record, but=("loss_mask", "loss_masks"))
    found = []
    for row in _rows(record):
        named, reward = row.get("trajectory_ids"), row.get("reward") if row.get("rewards") is None else row["rewards"]
        task = {"task_id": named["instance_id"]} if isinstance(named, dict) and named.get("instance_id") else {}
        found += _sampled({**row, **task}, note, _SKYRL_IDS, reward)
    return found


def _rows(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    first = next(iter(array("prompt_token_ids", record["prompt_token_ids"])), None)
    if not isinstance(first, list):
        return [record]
    columns = {key: array(key, record[key]) for key in _SKYRL_COLUMNS if not is_blank(record.get(key))}
    sizes = {key: len(column) for key, column in columns.items()}
    if len(set(sizes.values())) > 1:
        raise InputError(f"the fields of a batch have one entry per row, got {sizes}; align them")
    rest = {key: value for key, value in record.items() if key not in _SKYRL_COLUMNS}
    rows = zip(*columns.values(), strict=True)
    return [{**rest, **dict(zip(columns, row, strict=True))} for row in rows]


def _sampled(record: Mapping[str, Any], note: Note, keys: tuple[str, str, str], reward: object) -> list[Trajectory]:
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


FORMATS = (
    RecordFormat(
        name="prime_rl",
        decode=decode_prime_rl,
        keys=(_PRIME_RL_IDS[:2],),
        signs=((40, has_keys(*_PRIME_RL_IDS[:2])),),
    ),
    RecordFormat(name="skyrl", decode=decode_skyrl, keys=(_SKYRL_IDS[:2],), signs=((41, has_keys(*_SKYRL_IDS[:2])),)),
)
