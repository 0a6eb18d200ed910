"""Claim: recipes of Tinker's cookbook run unchanged on `treering serve --train`, and shared prefixes make them cheap.

`python -m benchmarks tinker` runs seven recipes of `tinker-cookbook` as they are, each with a server on a free port of
loopback, on a random model of two layers and on SmolLM2-135M-Instruct (`treering fetch smollm2`), one thread each. The
part switches runs one of them with `--sharing` and `--drafts` on and off, and compares the sampled texts. Each row is
kept in `--folder` when it is done, so that the same command goes on where it was ended. Seconds are the server's
processor time from its first request to the recipe's end, as other processes may take the machine: of the thread that
trains, and of all others, which sample and answer.
"""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from itertools import islice, product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common.progress import OnProgress, silent
from benchmarks.common.timing import chosen
from benchmarks.common.timing import environment as common_environment
from benchmarks.real.bench import kept
from treering.cli.display import PlainConsole
from treering.cli.fetch import fetched
from treering.data.generate import DATA_VARIABLE, data_folder
from treering.errors import InputError, MissingExtraError, StateError
from treering.extras import is_installed, require

NOTE = "about 20 minutes on two cores; --models tiny takes four, and --only sl_loop,switches names some rows"
_COSTS = ("server_s", "training_s", "sampling_s", "flat_tokens", "computed_tokens")
TABLES = {
    "recipes": ("model", "recipe", "num_steps", "first", "last", *_COSTS),
    "switches": ("sharing", "drafts", "num_texts", "num_equal", *_COSTS, "tokens_per_forward", "accepted_tokens"),
}
NAME = "Qwen/Qwen3-4B-Instruct-2507"
"""A name that the cookbook knows, of a model with the same chat format."""
_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
_NUM_PROBLEMS, _NUM_TESTED = 256, 8
_READY_S = 120.0


class Recipe(NamedTuple):
    """A recipe: its module, what it is meant to change of its metrics, its options, and more for the random model."""

    module: str
    metrics: str
    options: str
    tiny: str = ""


_POLICY = "loss_fn=importance_sampling"
_PLAYERS = "renderer_name=qwen3_instruct max_tokens=8 learning_rate=5e-4 eval_every=0"
RECIPES = {
    "sl_loop": Recipe("sl_loop", "train_mean_nll",
        "batch_size=4 learning_rate=5e-4 max_steps=12", "learning_rate=2e-2"),
    "rl_loop": Recipe("rl_loop", "reward/total",
        f"{_POLICY} batch_size=2 group_size=8 max_tokens=40 learning_rate=5e-4 max_steps=20"),
    "math_rl": Recipe("math_rl.train", "env/all/format env/all/correct",
        f"{_POLICY} env=arithmetic group_size=8 groups_per_batch=8 learning_rate=3e-4 max_steps=12"),
    "guess_number": Recipe("multiplayer_rl.guess_number.train", "env/all/reward/total",
        f"{_PLAYERS} group_size=4 batch_size=1 max_steps=2"),
    "text_arena": Recipe("multiplayer_rl.text_arena.train", "env/all/reward/total",
        f"{_PLAYERS} batch_size=8 max_steps=4"),
    "dpo": Recipe("preference.dpo.train", "dpo_loss",
        "batch_size=2 learning_rate=1e-4 max_steps=4", "learning_rate=2e-3"),
    "distillation": Recipe("distillation.on_policy_distillation", "teacher_kl",
        f"teacher_model={NAME} groups_per_batch=2 group_size=4 max_tokens=24 learning_rate=5e-4 max_steps=4",
        "learning_rate=1e-2"),
    # Answers of env=arithmetic are too short to draft. Groups are logged as text, at most four a step.
    "switches": Recipe("math_rl.train", "env/all/correct env/all/format",
        f"{_POLICY} env=gsm8k group_size=4 groups_per_batch=2 max_tokens=40 learning_rate=5e-4 eval_every=0 "
        "max_steps=5"),
}  # fmt: skip
MODELS = ("tiny", "smollm2")
ROWS: list[tuple[str, str, tuple[str, ...]]] = [
    *((model, name, ()) for model, name in product(MODELS, RECIPES) if name != "switches"),
    *(("smollm2", "switches", both) for both in product(("off", "on"), repeat=2)),
]
"""Model, recipe, and whether prefixes are shared and tokens drafted, where that is compared."""


def measure(
    *,
    only: Sequence[str] = (),
    models: Sequence[str] = MODELS,
    folder: Path = Path("runs/tinker-recipes"),
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Runs what `folder` does not hold yet, and puts together all that it holds; StateError where a recipe fails."""
    parts, names = chosen(only, list(RECIPES)), chosen(models, MODELS)
    require("the benchmark tinker", "tinker", "peft")
    if not is_installed("tinker_cookbook"):
        raise MissingExtraError("the benchmark tinker needs tinker-cookbook; docs/tinker.md says how to install it")
    rows = {"-".join((model, name, *switches)): (model, name, switches) for model, name, switches in ROWS}
    for key, (model, name, switches) in rows.items():
        # The teacher of the distillation is the model that the supervised loop trained.
        if model in names and (name in parts or (name == "sl_loop" and "distillation" in parts)):
            on_progress(key)
            make_folders(folder / model, model)
            work = partial(_measured, (folder / model).absolute(), key, model, name, switches)
            kept(folder / f"{key}.json", work)
    files = {key: folder / f"{key}.json" for key in rows}
    held = {key: json.loads(file.read_text(encoding="utf-8")) for key, file in files.items() if file.exists()}
    found = [report["found"] for report in held.values()]
    # A step's answers are compared in any order, because all are asked for at one time; the first row has both off.
    texts = [[Counter(step) for step in row.pop("texts")] for row in found]
    switched = [(row, own) for row, own in zip(found, texts, strict=True) if "sharing" in row]
    for row, own in switched:
        row["num_texts"] = sum(step.total() for step in own)
        row["num_equal"] = sum((step & plain).total() for step, plain in zip(own, switched[0][1], strict=True))
    return {
        "recipes": [row for row in found if "sharing" not in row],
        "switches": [row for row, _ in switched],
        "environment": common_environment(
            num_processors=os.cpu_count(),
            num_threads=1,
            packages={name: metadata.version(name) for name in ("tinker", "tinker-cookbook", "peft", "datasets")},
            load_average={key: report["load_average"] for key, report in held.items()},
        ),
    }


def make_folders(folder: Path, model: str) -> None:
    """Writes models and data sets as folders below the names on the hub that recipes know them by."""
    linked, source = folder / NAME, data_folder()
    if linked.is_dir():
        return
    if source is None:
        raise InputError(f"GSM8K is read from {DATA_VARIABLE}, which names no folder; set it")
    with gzip.open(source / "gsm8k" / "train.jsonl.gz", "rt", encoding="utf-8") as lines:
        solved = [json.loads(line) for line in islice(lines, _NUM_PROBLEMS)]
    roles = ("user", "question"), ("assistant", "answer")
    chats = [{"messages": [{"role": role, "content": row[key]} for role, key in roles]} for row in solved]
    talk = "\n\nHuman: {}\n\nAssistant: {}".format
    pairs = [
        {"chosen": talk(row["question"], row["answer"]), "rejected": talk(row["question"], other["answer"])}
        for row, other in zip(solved, [*solved[1:], solved[0]], strict=True)
    ]
    # SmolLM2 solves no problem of GSM8K. Questions come again, as in a second epoch.
    easy = [{"question": f"What is {n % 4 + 4} - {n % 4 + 1}?", "answer": "#### 3"} for n in range(_NUM_PROBLEMS)]
    _write(folder / "HuggingFaceH4/no_robots", train=chats)
    _write(folder / "openai/gsm8k", "main", train=easy, test=easy[:_NUM_TESTED])
    _write(folder / "Anthropic/hh-rlhf", train=pairs[:-_NUM_TESTED], test=pairs[-_NUM_TESTED:])
    _write(folder / "zwhe99/DeepMath-103K", train=solved)
    whole = fetched(PlainConsole(quiet=True))
    linked.parent.mkdir(parents=True, exist_ok=True)
    if model == "smollm2":
        linked.symlink_to(whole)
        return
    shutil.copytree(whole, linked, ignore=shutil.ignore_patterns("*.safetensors", "manifest.json"))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(whole, **_TINY)).save_pretrained(linked)


def _write(folder: Path, config: str = "default", **splits: Sequence[Mapping[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    files = "".join(f"\n  - {{split: {name}, path: {name}.jsonl}}" for name in splits)
    readme = f"---\nconfigs:\n- config_name: {config}\n  data_files:{files}\n---\n"
    (folder / "README.md").write_text(readme, encoding="utf-8")


def _measured(scratch: Path, key: str, model: str, name: str, switches: tuple[str, ...]) -> dict[str, Any]:
    """Runs a recipe with a server; what it logs, and what both took."""
    recipe, log = RECIPES[name], scratch / "logs" / key
    # A recipe asks what to do with the log of one that was ended.
    shutil.rmtree(log, ignore_errors=True)
    log.parent.mkdir(exist_ok=True)
    options = [*recipe.options.split(), *(recipe.tiny.split() if model == "tiny" else ())]
    if name == "distillation":
        (saved,) = _read_lines(scratch / "logs" / f"{model}-sl_loop" / "checkpoints.jsonl")
        options.append(f"teacher_checkpoint={saved['sampler_path']}")
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe.module}", f"model_name={NAME}", *options]
    output, switched = log.with_suffix(".txt"), dict(zip(("sharing", "drafts"), switches, strict=False))
    environ = {name: value for name, value in os.environ.items() if name != "TREERING_API_KEY"}
    environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(scratch / "hub")}
    environ["TINKER_API_KEY"] = "tml-local"
    server_output = log.with_suffix(".server.txt")
    with _served(scratch, server_output, switched, environ) as (url, process_id), output.open("wb") as out:
        started, processor_s = time.monotonic(), _processor_s(process_id)
        environ["TINKER_BASE_URL"] = url
        ended = subprocess.run([*command, f"log_path={log}"], cwd=scratch, env=environ, stdout=out, stderr=out)
        wall_s, server_s = time.monotonic() - started, _processor_s(process_id) - processor_s
        with urllib.request.urlopen(f"{url}/api/v1/treering/stats", timeout=60) as answer:
            stats = json.load(answer)
    if ended.returncode:
        raise StateError(f"{name} ended with {ended.returncode}; its output is in {output}")
    steps = _read_lines(log / "metrics.jsonl")
    metrics = {metric: [step[metric] for step in steps if metric in step] for metric in recipe.metrics.split()}
    # The last row may hold totals.
    num_steps = max(map(len, metrics.values()))
    third, training_s = max(1, num_steps // 3), stats["training"]["processor_s"]
    trees = sorted(log.glob("iteration_*/train_logtree.json"))
    return {
        "model": model,
        "recipe": name,
        **switched,
        "options": " ".join(options),
        "num_steps": num_steps,
        "metrics": metrics,
        "first": {metric: mean(values[:third]) for metric, values in metrics.items()},
        "last": {metric: mean(values[-third:]) for metric, values in metrics.items()},
        "wall_s": wall_s,
        "server_s": server_s,
        "training_s": training_s,
        "sampling_s": server_s - training_s,
        **{count: stats["training"][count] for count in ("flat_tokens", "computed_tokens")},
        **{count: stats["sampling"][count] for count in ("sampled_tokens", "drafted_tokens", "accepted_tokens")},
        "tokens_per_forward": stats["sampling"]["tokens_per_forward"],
        "texts": [list(_answers(json.loads(tree.read_text(encoding="utf-8"))["root"])) for tree in trees],
    }


def _answers(node: dict[str, Any]) -> Iterator[str]:
    """The texts of a step's log that are one message, as answers are; prompts have more."""
    messages = node.get("data", {}).get("messages", ())
    if len(messages) == 1:
        yield str(messages[0]["content"])
    for child in node["children"]:
        yield from _answers(child) if isinstance(child, dict) else ()


@contextmanager
def _served(
    scratch: Path, output: Path, switched: Mapping[str, str], environ: Mapping[str, str]
) -> Iterator[tuple[str, int]]:
    """A server of a folder's model; its address and process."""
    command = [sys.executable, "-m", "treering", "serve", NAME, "--train", "--port", "0", "--checkpoints", "saved"]
    command += [part for name, value in switched.items() for part in (f"--{name}", value)]
    with output.open("wb") as out:
        server = subprocess.Popen(command, cwd=scratch, env=environ, stderr=out)
    try:
        deadline = time.monotonic() + _READY_S
        while (found := re.search(r"serving \S+ at (\S+)", output.read_text(encoding="utf-8"))) is None:
            if server.poll() is not None or time.monotonic() > deadline:
                raise StateError(f"the server did not start; its output is in {output}")
            time.sleep(0.1)
        yield found[1], server.pid
    finally:
        server.terminate()
        server.wait()


def _processor_s(process_id: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
