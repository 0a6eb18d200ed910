"""Writes the table of `docs/data.md` that says which keys of a record are read, refused and left out, from the code.

`python tools/data_keys.py` replaces it; `tests/data/test_every_key.py` compares it.
"""

from pathlib import Path

from treering.data.formats import codec, endings, messages, tasks, token_arrays

PAGE = Path(__file__).parents[1] / "docs" / "data.md"
BEGIN, END = "<!-- keys: begin (tools/data_keys.py) -->\n", "<!-- keys: end -->\n"


def as_table() -> str:
    """The table in Markdown, a row for each kind of key."""
    rows = [
        ("record", "read: token ids", token_arrays.TOKEN_KEYS),
        ("record", "read: which tokens are trained", (*token_arrays.MASK_KEYS, "labels")),
        ("record", "read: the task", tasks.TASK_KEYS),
        ("record", "read: numbers of the rollout", (*codec.SCALARS, "logprobs", "advantages")),
        ("record", "read where the format has it, else refused", codec.CONTEXT_KEYS),
        ("record", "refused: another mask or weight", ("*mask", "*masks", "*weights")),
        ("record", "refused beside tokens: a length", ("prompt_length", "response_len", "completion_length")),
        ("record", "refused", codec.UNREADABLE),
        ("record, policy's turn", "left out: a cut turn", (*endings.CUT_FLAGS, *endings.CUT_REASONS, "status")),
        ("record", "left out: a failed run", (*endings.ERROR_KEYS, *endings.COMPLETED_KEYS, *endings.END_KEYS)),
        ("message", "read: 1 trains it, 0 does not", messages.TRAINED_KEYS),
        ("message", "read: 1 leaves it out", messages.CONTEXT_KEYS),
        ("message", "read: the thought", (*messages.REASONING_KEYS, "thinking_blocks", "thought")),
        ("policy's message", "refused: another word on training", [f"*{word}*" for word in messages.ABOUT_TRAINING]),
        ("message", "refused", messages.UNREADABLE),
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
