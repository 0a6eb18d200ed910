"""The texts of a run's tokens, for its page: those of its tokenizer, or of the symbols of a task of sums."""

from collections.abc import Callable
from pathlib import Path

from treering.data import data_folder
from treering.errors import TreeringError
from treering.report.content import CHECKPOINTS_FOLDER
from treering.report.run import RunData, section_of

_TOKENIZER_FILE = "tokenizer.json"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""How SentencePiece writes a space before a word."""


def find_text(run: RunData) -> Callable[[int], str] | None:
    """A function of a token id; None without a whole tokenizer of the run, or without `treering[train]`.

    It is looked up in the newest checkpoint, then where the settings say.

    Example: a run on sums, in characters, gives "+" for the id of the plus sign.
    """
    folder = _tokenizer_folder(run)
    try:
        if section_of(run.config, "task").get("kind") == "sums":
            return _text_of_symbols()
        return None if folder is None else _text_of_tokenizer(folder)
    except (ImportError, TreeringError):
        return None


def _text_of_symbols() -> Callable[[int], str]:
    from treering.rl.tasks.sums import ChainedSums

    symbols = ChainedSums.symbols
    return lambda token: symbols[token] if token < len(symbols) else f"[{token}]"


def _text_of_tokenizer(folder: Path) -> Callable[[int], str]:
    from treering.data.rendering.encoder import open_tokenizer

    tokenizer = open_tokenizer(folder)

    def text_of(token: int) -> str:
        # Decoding one token drops the space that these pieces begin with.
        piece, text = str(tokenizer.id_to_token(token) or ""), str(tokenizer.decode([token], skip_special_tokens=False))
        return f" {text.lstrip()}" if piece.startswith(_SPACE) else text or f"[{token}]"

    return text_of


def _tokenizer_folder(run: RunData) -> Path | None:
    checkpoints = sorted((run.folder / CHECKPOINTS_FOLDER).glob(f"*/{_TOKENIZER_FILE}"))
    if checkpoints:
        return checkpoints[-1].parent
    sections = [section_of(run.config, name) for name in ("task", "data", "model")]
    named = [each.get(key) for each in sections for key in ("tokenizer", "path")]
    roots = [Path(), *([] if (data := data_folder()) is None else [data])]
    places = [root / name for name in named if isinstance(name, str) for root in roots]
    return next((place for place in places if (place / _TOKENIZER_FILE).is_file()), None)
