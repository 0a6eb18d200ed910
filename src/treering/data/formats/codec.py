"""Conversion of trajectories to and from Treering's own JSON format."""

import hashlib
import json
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from treering.data.formats.chat_messages import decode_messages, decode_tools
from treering.data.formats.json_fields import (
    MASK_KEYS,
    check_masks_are_known,
    decode_floats,
    decode_loss_mask,
    decode_routes,
    decode_tokens,
    filled,
    integer_field,
    is_blank,
    number_field,
    show,
    text_field,
)
from treering.data.trajectory import (
    Message,
    TaskId,
    Trajectory,
    decode_episode,
    decode_rehearsed,
    encode_episode,
    valid_text,
)
from treering.errors import InputError
from treering.types import LossMask, TokenIds

SCALARS = ("trial", "reward", "advantage", "step", "epoch", "version", "preference")
UNREADABLE = MappingProxyType(
    {
        **dict.fromkeys(
            ("images", "image"),
            'images stand next to messages with a part {"type": "image"} for each, in formats treering, chat and trl; '
            "write them so, or remove the key if the text stands by itself",
        ),
        **dict.fromkeys(
            ("videos", "video", "audio", "audios"),
            "Treering trains on text and images; keep trajectories without it, or remove the key if the text stands "
            "by itself",
        ),
        "label": "a label of good or bad is for KTO, which Treering lacks; keep the good ones and remove the key",
        **dict.fromkeys(
            ("chosen", "rejected", "rejected_response", "rejected_messages"),
            "a preference pair has a prompt, chosen and rejected, and no messages; write it so",
        ),
        **dict.fromkeys(
            ("weight", "sample_weight", "loss_weight"),
            "all trajectories have the same weight; repeat or drop trajectories, and remove the key",
        ),
        "routed_experts": "routes are replayed next to tokens in format treering; write them so, or remove the key and "
        "the model chooses",
        "documents": "templates with documents are not rendered; write them into a message",
        "chat_template_kwargs": "template options are not read; write what they add into messages, and remove the key",
    }
)
"""Top-level keys that change what is trained, each with the fix; a weight of 1 is allowed."""
CONTEXT_KEYS = MappingProxyType(
    {
        **dict.fromkeys(
            ("system", "system_prompt", "system_message", "system_instruction", "instructions", "developer_prompt"),
            "write it as the first message, of role system",
        ),
        **dict.fromkeys(
            ("tools", "functions", "tool_defs", "oai_tools", "tool_schemas", "tool_definitions", "available_tools"),
            "write the schemas as tools",
        ),
    }
)
"""Top-level keys with context of the messages, each with the fix for formats that do not read it."""
_IDS = ("tokens", "input_ids", "token_ids", "prompt_ids", "prompt_token_ids")


def decode(record: Mapping[str, Any]) -> Trajectory:
    """Decode a trajectory; null fields count as absent, unknown fields are ignored unless they change what is trained.

    Without a task_id, trajectories with equal first prompts form a task, see `first_prompt_id`.

    Raises:
        InputError: a field is bad; the message has its name, value and rule.

    Example: `decode({"task_id": 3, "tokens": [5, 6], "loss_mask": [0, 1], "source": "x"}).loss_mask` is
    `[False, True]`.
    """
    check_readable(record, but=("system", "tools", "functions", "routed_experts", *MASK_KEYS))
    messages = None if record.get("messages") is None else _messages(record)
    tokens = decode_tokens(record)
    if messages is None and tokens is None:
        raise InputError("a trajectory has either messages or tokens, got neither; add one of them")
    loss_mask = decode_loss_mask(record, tokens)
    task_id, preference = decode_task_id(record), record.get("preference")
    if preference not in (None, "chosen", "rejected"):
        raise InputError(f'preference is "chosen" or "rejected", got {show(preference)}; correct it or drop it')
    return Trajectory(
        task_id=first_prompt_id(messages, tokens, loss_mask) if task_id is None else task_id,
        messages=messages,
        tokens=tokens,
        loss_mask=loss_mask,
        logprobs=decode_floats(record, "logprobs"),
        advantages=decode_floats(record, "advantages"),
        routed_experts=None if record.get("routed_experts") is None else decode_routes(record, tokens),
        tools=() if tokens is not None and messages is None else decode_tools(record),
        format=text_field(record, "format") or "chat",
        preference=preference,
        episode=None if tokens is None else decode_episode(record),
        rehearsed=decode_rehearsed(record),
        **decode_scalars(record),
    )


def decode_scalars(record: Mapping[str, Any]) -> dict[str, Any]:
    """Decode trial, reward, advantage, step, epoch and version, by name."""
    return {
        **{key: integer_field(record, key) for key in ("trial", "step", "epoch", "version")},
        **{key: number_field(record, key) for key in ("reward", "advantage")},
    }


def check_readable(record: Mapping[str, Any], *, but: Collection[str] = ()) -> None:
    """Check that a record has no unread key that changes what is trained or what the policy saw, except `but`.

    Raises:
        InputError: such a key has a value; the message has the fix.

    Example: `{"messages": [...], "images": ["a.png"]}` is refused; an empty list of images is not.
    """
    check_masks_are_known(record, but=but)
    has_ids = bool(filled(record, _IDS))
    for key in filled(record, CONTEXT_KEYS):
        value = record[key]
        # Token ids include everything that the policy saw, and a text that is also a message is read there.
        if key not in but and not has_ids and not _is_message(record, value):
            raise InputError(
                f"{key} stands next to the messages and is not read, got {show(value)}: {CONTEXT_KEYS[key]}"
            )
    for key in filled(record, UNREADABLE):
        value = record[key]
        if key not in but and not (key.endswith("weight") and value in (1, True)):
            raise InputError(f"{key} changes what is trained and cannot be read, got {show(value)}: {UNREADABLE[key]}")


def _is_message(record: Mapping[str, Any], value: object) -> bool:
    lists = [record.get(key) for key in ("messages", "prompt", "conversations", "history", "messages_and_choices")]
    messages = [one for messages in lists if isinstance(messages, list) for one in messages if isinstance(one, dict)]
    return any(value in (one.get("content"), one.get("value")) for one in messages)


def decode_task_id(record: Mapping[str, Any], key: str = "task_id") -> TaskId | None:
    """Return the task id of a record; None if it is null or absent."""
    value = record.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise InputError(f"{key} is text or an integer, got {show(value)}; correct it or drop it")
    return valid_text(value, key) if isinstance(value, str) else value


def first_prompt_id(messages: tuple[Message, ...] | None, tokens: TokenIds | None, loss_mask: LossMask | None) -> str:
    """Return a task id, 16 hexadecimal digits, as a hash of everything before the first trained part.

    A trajectory of tokens without a mask, or trained from its first token, is its own task.

    Example: two answers to the same question have the same id.
    """
    if messages is None:
        assert tokens is not None, "a trajectory has messages or tokens"
        num_prompt = 0 if loss_mask is None else int(loss_mask.argmax())
        return _digest(tokens[: num_prompt or None].astype("<i4").tobytes())
    roles = [message.role for message in messages]
    prompt = messages[: roles.index("assistant")] if "assistant" in roles else messages
    content = json.dumps([(message.role, message.content) for message in prompt]).encode()
    # Equal questions about two images are two tasks.
    for image in (image for message in prompt for image in message.images):
        content += image.at.to_bytes(8, "little") + hashlib.blake2b(image.source.read(), digest_size=16).digest()
    return _digest(content)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def encode(trajectory: Trajectory) -> dict[str, Any]:
    """Return the JSON value of a trajectory, without fields that are None; `decode` reads it.

    Raises:
        InputError: the trajectory has images.
    """
    if trajectory.images or any(message.images for message in trajectory.messages or ()):
        raise InputError("a trajectory with images is not written to a file; keep the file that it was read from")
    record: dict[str, Any] = {key: getattr(trajectory, key) for key in ("task_id", "format", *SCALARS)}
    if trajectory.messages is not None:
        record["messages"] = [_encode_message(message) for message in trajectory.messages]
    if trajectory.tools:
        record["tools"] = [dict(tool) for tool in trajectory.tools]
    for key in ("tokens", "loss_mask", "logprobs", "advantages", "routed_experts"):
        values = getattr(trajectory, key)
        record[key] = None if values is None else values.tolist()
    record["episode"] = None if trajectory.episode is None else encode_episode(trajectory.episode)
    record["rehearsed"] = None if trajectory.rehearsed is None else list(trajectory.rehearsed)
    return {key: value for key, value in record.items() if value is not None}


def _encode_message(message: Message) -> dict[str, Any]:
    record: dict[str, Any] = {"role": message.role, "content": message.content}
    named = {
        "reasoning_content": message.reasoning,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "weight": None if message.trained else 0,
    }
    record.update((key, value) for key, value in named.items() if value is not None)
    if message.tool_calls:
        record["tool_calls"] = [
            {
                **({} if call.id is None else {"id": call.id}),
                "name": call.name,
                "arguments": call.arguments if isinstance(call.arguments, str) else dict(call.arguments),
            }
            for call in message.tool_calls
        ]
    return record


def _messages(record: Mapping[str, Any]) -> tuple[Message, ...]:
    if given := next((key for key in (*MASK_KEYS, "labels") if record.get(key) is not None), None):
        raise InputError(f"{given} has one entry per token and messages were given; give tokens instead of messages")
    messages = decode_messages(record["messages"])
    if is_blank(record.get("system")):
        return messages
    if messages and messages[0].role == "system":
        raise InputError("system and messages[0] both are the system message; keep one of them")
    return (*decode_messages([{"role": "system", "content": record["system"]}], "system"), *messages)
