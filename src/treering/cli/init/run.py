"""`treering init`: reads the file and the model, and writes the configuration."""

import json
from pathlib import Path

from treering.cli.hub import is_hub_id
from treering.cli.init.model import read_model
from treering.cli.init.rl import rl_text
from treering.cli.init.sft import sft_text
from treering.cli.init.toml import comments
from treering.data import FormatName
from treering.errors import InputError


def run(
    *, file: Path, model: str, rl: bool, reward: str, out: Path | None, format: FormatName, json_output: bool
) -> None:
    """Writes a configuration for `file` and `model`, and prints the command that runs it.

    Raises:
        InputError: the configuration exists, or its folder does not; a bad file or model.
    """
    command = "train" if rl else "sft"
    path = out or Path(f"{command}.toml")
    _check_free(path)
    is_here = path.absolute().parent == Path.cwd()
    # A configuration finds what its settings name next to itself and in the current folder, so in no other.
    named = str(file if is_here else file.absolute())
    facts = read_model(model if is_here or is_hub_id(model, [Path()]) else str(Path(model).absolute()))
    run_dir = f"runs/{file.name.partition('.')[0]}-{command}"
    if rl:
        text = rl_text(file, named, facts, reward=reward, run_dir=run_dir)
    else:
        text = sft_text(file, named, facts, run_dir=run_dir, format=format)
    line = f"treering {command} {path}"
    head = comments(f"For {file} and {model}, by treering init. It runs as it is: {line}")
    with path.open("x", encoding="utf-8") as stream:
        stream.write(head + comments(f"All settings: treering {command} --help") + "#\n" + text)
    print(json.dumps({"config": str(path), "command": line}) if json_output else f"wrote {path}\nNext: {line}")


def _check_free(path: Path) -> None:
    if path.exists():
        raise InputError(f"init overwrites nothing, and {path} exists; name another file by --out, or move that one")
    if not path.absolute().parent.is_dir():
        raise InputError(f"--out needs an existing folder, got {path}: create {path.parent} first")
