"""Writes the table of `docs/data.md` that says which keys of a record are read, refused and left out, from the code.

`python tools/data_keys.py` replaces it; `tests/data/test_every_key.py` compares it.
"""

from pathlib import Path

from treering.data.formats import chat_messages, codec, json_fields, reader, record_format

PAGE = Path(__file__).parents[1] / "docs" / "data.md"
BEGIN, END = "<!-- keys: begin (tools/data_keys.py) -->\n", "<!-- keys: end -->\n"


def as_table() -> str:
    """The table in Markdown, a row for each kind of key."""
    rows = [
        ("record", "read: token ids", json_fields.TOKEN_KEYS),
        ("record", "read: which tokens are trained", (*json_fields.MASK_KEYS, "labels")),
        ("record", "read: the task", record_format.TASK_KEYS),
        ("record", "read: numbers of the rollout", (*codec.SCALARS, "logprobs", "advantages")),
        ("record", "read where the format has it, else refused", (*codec.CONTEXT_KEYS, "routed_experts")),
        ("record", "refused: another mask or weight", ("*mask", "*masks", "*weights")),
        ("record", "refused next to tokens: a length", ("prompt_length", "response_len", "completion_length")),
        ("record", "refused", [key for key in codec.UNREADABLE if key != "routed_experts"]),
        ("record, policy's turn", "left out: a cut turn", (*reader.CUT_FLAGS, *reader.CUT_REASONS, "status")),
        ("record", "left out: a failed run", (*reader.ERROR_KEYS, *reader.COMPLETED_KEYS, *reader.END_KEYS)),
        ("message", "read: 1 trains it, 0 does not", chat_messages.TRAINED_KEYS),
        ("message", "read: 1 leaves it out", chat_messages.CONTEXT_KEYS),
        ("message", "read: the thought", (*chat_messages.REASONING_KEYS, "thinking_blocks", "thought")),
        (
            "policy's message",
            "refused: another word on training",
            [f"*{word}*" for word in chat_messages.ABOUT_TRAINING],
        ),
        ("message", "refused", chat_messages.UNREADABLE),
        ("any", "ignored", ("all others",)),
    ]
    lines = ["| key of a | what is done | keys |", "|---|---|---|"]
    lines += [f"| {of} | {what} | {', '.join(f'`{key}`' for key in keys)} |" for of, what, keys in rows]
    return "\n".join(lines).replace("`all others`", "all others") + "\n"


def main() -> None:
    """Replaces the table of the page."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + BEGIN + as_table() + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
