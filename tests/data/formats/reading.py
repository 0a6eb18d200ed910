"""Files of a few records, read with the notes about them, for the tests of formats."""

import json
import warnings

from treering.data import read_trajectories
from treering.errors import DataWarning

QUESTION = {"role": "user", "content": "Where is parcel 17?"}
ANSWER = {"role": "assistant", "content": "It is in Basel."}


def read(tmp_path, *records, format="auto", name="set.jsonl"):
    """The trajectories of a file with these records, and what was said of it."""
    file = tmp_path / name
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", DataWarning)
        found = read_trajectories(file, format)
    return found, [str(one.message).removeprefix(f"{file}: ") for one in said]


def turns(trajectory):
    """The role, content and training of each message."""
    return [(message.role, message.content, message.is_trained) for message in trajectory.messages]
