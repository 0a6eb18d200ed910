import numpy as np
import pytest

from treering.data.formats.codec import decode
from treering.errors import InputError

TOKENS = {"task_id": "a", "tokens": [5, 6, 7]}


def chat(**message):
    return {"task_id": 1, "messages": [{"role": "assistant", "content": None, **message}]}


@pytest.mark.parametrize("text", ['{"x":  1e-7}', '{"x": NaN}', "{broken", "[1, 2]", '"quoted"', ""])
def test_arguments_that_are_text_stay_the_text_that_the_model_wrote(text):
    [message] = decode(chat(tool_calls=[{"name": "f", "arguments": text}])).messages
    assert message.tool_calls[0].arguments == text


def test_unknown_keys_are_ignored_and_null_fields_are_absent():
    trajectory = decode({**TOKENS, "rm_score": 0.3, "outcome": {"any": []}, "reward": None, "loss_mask": None})
    assert (trajectory.reward, trajectory.loss_mask, trajectory.tokens.tolist()) == (None, None, [5, 6, 7])


def test_every_optional_field_arrives_with_its_type():
    numbers = {"trial": 2, "reward": 1, "advantage": -0.5, "step": 7, "epoch": 3, "version": 9, "format": "raw"}
    trajectory = decode({**TOKENS, **numbers, "loss_mask": [0, True, 1], "logprobs": [0, -1.5, -2]})
    assert {key: getattr(trajectory, key) for key in numbers} == numbers
    assert type(trajectory.reward) is float
    assert (trajectory.tokens.dtype, trajectory.loss_mask.dtype, trajectory.logprobs.dtype) == (
        np.int32,
        np.bool_,
        np.float64,
    )
    assert trajectory.loss_mask.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"task_id": True, "tokens": [1]}, "task_id .* got True"),
        ({"task_id": 1}, "either messages or tokens, got neither"),
        ({"task_id": 1, "tokens": [1], "messages": [{"role": "user", "content": ""}]}, "got both"),
        ({"task_id": 1, "messages": []}, "at least one message"),
        ({"task_id": 1, "tokens": []}, "at least one token"),
        ({"task_id": 1, "tokens": [True]}, r"tokens\[0\] must be an integer .* got True"),
        ({"task_id": 1, "tokens": [2**31]}, r"tokens\[0\] .* got 2147483648"),
        ({**TOKENS, "logprobs": [0.0]}, "logprobs has one entry per token, got 1 for 3"),
        ({**TOKENS, "logprobs": [0.0, float("nan"), 0.0]}, "logprobs must be finite"),
        ({**TOKENS, "reward": float("inf")}, "reward must be a finite number, got inf"),
        ({**chat(content="x"), "loss_mask": [1]}, "loss_mask has one entry per token and messages were given"),
        ({**chat(content="x"), "action_mask": [1]}, "action_mask has one entry per token and messages were given"),
        ({**chat(content="x"), "labels": [1]}, "labels has one entry per token and messages were given"),
        ({**chat(tool_calls=[{"name": "f"}]), "format": "raw"}, "cannot hold tool_calls"),
    ],
)
def test_a_broken_record_is_refused_with_its_field_and_value(record, message):
    with pytest.raises(InputError, match=message):
        decode(record)
