"""Files of a few records, read with the notes about them, for the tests of formats."""

import json
import warnings

from treering.data import read_trajectories
from treering.errors import DataWarning

QUESTION = {"role": "user", "content": "Where is parcel 17?"}
ANSWER = {"role": "assistant", "content": "It is in Basel."}
CALLED = [
    ("user", QUESTION["content"], False),
    ("assistant", None, True),
    ("tool", "Basel", False),
    ("assistant", ANSWER["content"], True),
]
"""The `turns` of a question, a call, its result and the answer."""

RECORDS = {
    "treering": {"task_id": 1, "tokens": [5, 6, 7]},
    "chat": {"messages": [QUESTION, ANSWER]},
    "sharegpt": {"task_id": 1, "conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}]},
    "trl": {"task_id": 1, "prompt": [QUESTION], "completion": [ANSWER]},
    "verifiers": {"example_id": 0, "prompt": [QUESTION], "completion": [ANSWER], "reward": 1.0, "task": "x"},
    "swe_agent": {"instance_id": "a", "history": [QUESTION, {**ANSWER, "action": "It is in Basel."}], "trajectory": []},
    "openhands": {"instance_id": "a", "messages": [QUESTION], "response": {"choices": [{"message": ANSWER}]}},
    "nemo_gym": {
        **{"task_id": 1, "responses_create_params": {"input": [QUESTION]}},
        "response": {"output": [{"type": "message", **ANSWER}]},
    },
    "verl": {"task_id": 1, "input": "a", "output": "b", "score": 0.0, "step": 1},
    "atif": {
        **{"task_id": 1, "schema_version": "ATIF-v1.6", "agent": {}},
        "steps": [{"source": "user", "message": "?"}, {"source": "agent", "message": "!"}],
    },
    "prime_rl": {"task_id": 1, "prompt_ids": [1, 2], "completion_ids": [3, 4]},
    "skyrl": {"task_id": 1, "prompt_token_ids": [1, 2], "response_ids": [3, 4]},
    "nemo_rl": {"task_id": 1, "message_log": [QUESTION, ANSWER]},
    "art": {"task_id": 1, "messages_and_choices": [QUESTION, {"message": ANSWER}]},
    "rllm": {"task_id": 1, "trajectories": [{"steps": [{"chat_completions": [QUESTION, ANSWER]}]}]},
}


def read(tmp_path, *records, format="auto", name="set.jsonl"):
    """Return the trajectories of a file with these records, and the notes on it."""
    file = tmp_path / name
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", DataWarning)
        found = read_trajectories(file, format)
    return found, [str(one.message).removeprefix(f"{file}: ") for one in said]


def turns(trajectory):
    """Return role, content and training of each message."""
    return [(message.role, message.content, message.is_trained) for message in trajectory.messages]
