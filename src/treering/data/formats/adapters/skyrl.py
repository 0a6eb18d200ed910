"""SkyRL's rows of ids, and batches of its generator.

Source: `GeneratorOutput` of NovaSky-AI/SkyRL.
"""

from collections.abc import Mapping
from typing import Any

from treering.data.formats.adapters.prime_rl import sampled_call
from treering.data.formats.codec import check_readable
from treering.data.formats.json_fields import array, is_blank
from treering.data.formats.record_format import Note, RecordFormat, has_keys
from treering.data.trajectory import Trajectory
from treering.errors import InputError

_ROW_KEYS = ("prompt_token_ids", "response_ids", "loss_masks", "rewards", "rollout_logprobs", "trajectory_ids")
_IDS = ("prompt_token_ids", "response_ids", "rollout_logprobs")


def decode_skyrl(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """Decode a row of SkyRL, or a batch of its generator, whose fields hold one entry per row."""
    check_readable(record, but=("loss_mask", "loss_masks"))
    found = []
    for row in _rows(record):
        named, reward = row.get("trajectory_ids"), row.get("reward") if row.get("rewards") is None else row["rewards"]
        task = {"task_id": named["instance_id"]} if isinstance(named, dict) and named.get("instance_id") else {}
        found += sampled_call({**row, **task}, note, _IDS, reward)
    return found


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


FORMATS = (RecordFormat(name="skyrl", decode=decode_skyrl, keys=(_IDS[:2],), signs=((41, has_keys(*_IDS[:2])),)),)
