"""Drafts inside vLLM while a pretrained model learns: from its own history, by vLLM's drafters, and none.

Each epoch samples all prompts with the weights that part trl left at its start, so that they change in between.
"""

import json
import multiprocessing
import tempfile
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common.progress import OnProgress
from benchmarks.real import trl
from benchmarks.real.bench import kept
from benchmarks.real.exact import requests_of
from benchmarks.vllm.runs import Asked, Case, measure_epochs
from treering.cli.demo import DemoSize
from treering.errors import InputError
from treering.extras import require

METHODS = {
    "none": ("none", ""),
    "ngram": ("ngram", ""),
    "suffix": ("suffix", ""),
    "history": ("history", ""),
    "history_0.4": ("history", "min_acceptance = 0.4"),
}
"""Method of `benchmarks.vllm` and lines of the drafter's file; 0.4 is what docs/settings.md advises on CPUs."""
ROWS, TEMPERATURES = (8, 32), (1.0, 0.7)
NUM_DRAFTS = 8


def measure(folder: Path, model: Path, *, size: DemoSize, on_progress: OnProgress) -> dict[str, Any]:
    """Every method with every number of rows and temperature; what is done is kept in `folder`."""
    require("the part vllm", "vllm")
    weights = weights_of(folder.parent, model, size.num_epochs)
    methods = [name for name in METHODS if name != "suffix" or find_spec("arctic_inference")]
    rows = []
    for temperature, num_rows, name in product(TEMPERATURES, ROWS, methods):
        on_progress(f"vLLM: {name}, {num_rows} rows, temperature {temperature}")
        file = folder / f"{name}-{num_rows}-{temperature}.json"
        method, options = METHODS[name]
        case = Case(method=method, num_rows=num_rows, num_drafts=NUM_DRAFTS, options=options)  # type: ignore[arg-type]
        asked = asked_of(model, size, temperature)
        kept(file, partial(_alone, case, asked, weights))
        epochs = json.loads(file.read_text(encoding="utf-8"))["found"]
        rows.append({"method": name, "num_rows": num_rows, "temperature": temperature, "epochs": epochs})
    notes = [] if "suffix" in methods else ["suffix is left out: arctic-inference is not installed (docs/vllm.md)"]
    return {"trl": in_trl(folder, model, size, on_progress), "cases": rows, "notes": notes}


def in_trl(folder: Path, model: Path, size: DemoSize, on_progress: OnProgress) -> dict[str, Any]:
    """TRL's trainer of part trl with its own vLLM, without drafts and with `vllm_drafts`."""
    found = {}
    for way in trl.VLLM_WAYS:
        on_progress(f"TRL: grpo, {way}")
        file = folder / f"grpo-{way}.json"
        kept(file, partial(trl.alone, trl.train, "grpo", way, model, folder / way, size))
        steps = json.loads(file.read_text(encoding="utf-8"))["found"]
        found[way] = {**trl.summary(steps), "steps": steps}
    return found


def weights_of(folder: Path, model: Path, num_epochs: int) -> list[Path]:
    """The model at the start of each epoch of the part trl."""
    saved = sorted(folder.glob("trl/grpo-engine/out/checkpoint-*"), key=lambda each: int(each.name.split("-")[1]))
    found = [model, *saved][:num_epochs]
    if len(found) < num_epochs:
        raise InputError(
            f"part vllm samples with the weights that part trl leaves after each epoch, and {folder} has "
            f"{len(saved)}; run --only trl first"
        )
    return found


def asked_of(model: Path, size: DemoSize, temperature: float) -> Asked:
    """The prompts of part trl."""
    requests = requests_of(model, num_prompts=size.num_prompts, size=1, seed=0)
    sampling = requests[0].sampling
    return Asked(
        prompts=[request.prompt.tolist() for request in requests],
        group_size=size.group_size,
        max_tokens=sampling.max_tokens,
        stop_token=int(sampling.stop_tokens[0]),
        temperature=temperature,
    )


def _alone(case: Case, asked: Asked, weights: list[Path]) -> list[dict[str, Any]]:
    """Measures in a new process."""
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(1) as pool:
        found: list[dict[str, Any]] = pool.apply(measure_epochs, (case, asked, weights, Path(folder)))
    return found
