"""`treering demo`: the same small model trained twice from the same seeds, as trees and as packed sequences, compared.

Both sides take turns, step by step, in one process: what slows the machine down slows both. The packed side is the
plain path with its best settings: the same budget of tokens, no padding, the head on trained rows only.
"""

import json
import os
import platform
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from treering.cli.corpus import Corpus, load_corpus
from treering.cli.models import build_model
from treering.cli.progress import StepProgress
from treering.config.model import ModelConfig
from treering.config.sft import DataConfig, StandInConfig
from treering.data import data_folder
from treering.errors import InputError
from treering.metrics import JsonlSink, Metrics
from treering.train.batches import Layout, make_batch
from treering.train.loop import LoopOptions, SftLoop
from treering.train.optim import OptimOptions
from treering.train.step_report import StepReport
from treering.tree.stats import Bounds, Work, flat_work, tree_work, work_bounds
from treering.types import ModelShape

LAYOUTS: tuple[Layout, Layout] = ("tree", "packed")
NUM_STEPS = 14
TREES_PER_STEP = 3
MAX_TOKENS = 8192
FILES = ("small/toolbench_dfsdt.jsonl", "small/hotpotqa_react_reflexion.jsonl", "small/tot_game24_bfs.jsonl")
MODEL = ModelConfig(vocab_size=2048, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_size=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What the demo measured; seconds are wall time of training steps, the first (warm-up) step left out."""

    data: str
    num_tasks: int
    num_parameters: int
    num_steps: int
    flat_tokens: int
    unique_tokens: int
    sharing: float
    packed_s: float
    tree_s: float
    speedup: float
    token_bound: float
    flop_bound: float
    share_of_flop_bound: float
    first_loss: float
    last_loss: float
    largest_loss_difference: float
    """Over all steps; the two runs differ by rounding only."""
    machine: str
    num_threads: int
    versions: dict[str, str]


def run(out: Path | None, seed: int, json_output: bool) -> None:
    """Trains both ways with a live display on stderr and prints one table, or JSON, to stdout.

    Args:
        out: new or empty folder for `demo.json` and both runs' metrics; None keeps nothing.
        seed: of weights, order and generated data.
        json_output: JSON instead of the table.

    Raises:
        InputError: `out` holds files already.
    """
    _check_empty(out)
    console = Console(stderr=True, highlight=False)
    result = compare(seed=seed, out=out, console=console, num_steps=NUM_STEPS)
    if out is not None:
        (out / "demo.json").write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    if json_output:
        print(json.dumps(asdict(result), indent=2))
        return
    Console().print(as_table(result))


def compare(*, seed: int, out: Path | None, console: Console, num_steps: int) -> DemoResult:
    """Trains `num_steps` steps each way, in turns; the first step warms up and is not timed."""
    corpus = demo_corpus(seed)
    for note in corpus.notes:
        console.print(note, soft_wrap=True)
    with ExitStack() as open_sinks:
        tree, packed = (_side(layout, corpus, seed, out, open_sinks) for layout in LAYOUTS)
        console.print(
            f"{len(corpus.tasks)} tasks, {tree.num_parameters:,} parameters; {num_steps} steps as trees and as packed "
            "sequences",
            soft_wrap=True,
        )
        with StepProgress(num_steps=num_steps, first_step=0, console=console) as progress:
            for step in range(1, num_steps + 1):
                tree.step()
                packed.step()
                progress.tell(step, _standing(tree, packed))
    return _result(corpus, tree, packed, _bounds(tree.loop, corpus, num_steps))


def demo_corpus(seed: int) -> Corpus:
    """Real agent and search trajectories with folded ids where the data folder is, else the generated stand-in."""
    config = DataConfig(
        source="real",
        files=tuple(Path(file) for file in FILES),
        tokenizer=Path("tokenizer"),
        vocab="folded",
        stand_in=StandInConfig(num_tasks=24, num_trials=8, vocab_size=2048, seed=seed),
    )
    return load_corpus(config, beside=data_folder() or Path(), vocab_size=MODEL.vocab_size)


def as_table(result: DemoResult) -> Table:
    """The comparison for a terminal."""
    table = Table(title=f"Trees against packed sequences: {result.num_steps} steps, same seeds", title_justify="left")
    table.add_column()
    for name in ("packed", "tree", "ratio"):
        table.add_column(name, justify="right")
    table.add_row("training, seconds", f"{result.packed_s:.1f}", f"{result.tree_s:.1f}", f"{result.speedup:.2f}x")
    tokens = (result.flat_tokens, result.unique_tokens)
    table.add_row("tokens computed", *(f"{count:,}" for count in tokens), f"{result.token_bound:.2f}x")
    bound = f"{result.flop_bound:.2f}x"
    table.add_row("best possible by counted FLOPs", "", "", bound)
    table.add_row("share of that bound", "", "", f"{result.share_of_flop_bound:.0%}")
    table.add_row("largest difference of the loss curves", "", "", f"{result.largest_loss_difference:.1e}")
    table.add_row("loss, first -> last step", "", f"{result.first_loss:.3f} -> {result.last_loss:.3f}", "")
    table.caption = f"{result.data} data, {result.num_tasks} tasks; {result.num_parameters:,} parameters"
    return table


@dataclass(slots=True, kw_only=True)
class _Side:
    """One of the two runs."""

    loop: SftLoop
    metrics: Metrics
    reports: list[StepReport] = field(default_factory=list)

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.loop.model.parameters())

    @property
    def timed_s(self) -> float:
        return sum(report.seconds for report in self.reports[1:])

    @property
    def tokens_per_s(self) -> float:
        seconds = sum(report.seconds for report in self.reports)
        return sum(report.update.num_branch_tokens for report in self.reports) / seconds

    def step(self) -> None:
        report = self.loop.step()
        self.metrics.log(report.step, report.values())
        self.reports.append(report)


def _side(layout: Layout, corpus: Corpus, seed: int, out: Path | None, open_sinks: ExitStack) -> _Side:
    model = build_model(MODEL, num_ids=corpus.num_ids, seed=seed, folder=None)
    options = LoopOptions(trees_per_step=TREES_PER_STEP, max_tokens=MAX_TOKENS, layout=layout, seed=seed)
    optim = OptimOptions(learning_rate=1e-3, warmup_steps=4, weight_decay=0.01)
    sinks = [] if out is None else [JsonlSink(out / f"{layout}.jsonl", resume_step=None)]
    loop = SftLoop(model, corpus.tasks, optim=optim, options=options)
    return _Side(loop=loop, metrics=open_sinks.enter_context(Metrics(sinks)))


def _standing(tree: _Side, packed: _Side) -> str:
    loss = f"loss {tree.reports[-1].update.loss:.3f} as trees, {packed.reports[-1].update.loss:.3f} packed"
    speedup = packed.timed_s / tree.timed_s if tree.timed_s else 1.0
    return f"{loss}; {tree.tokens_per_s:,.0f} and {packed.tokens_per_s:,.0f} flat tokens/s ({speedup:.2f}x)"


def _bounds(loop: SftLoop, corpus: Corpus, num_steps: int) -> Bounds:
    """Bounds of exactly the timed steps."""
    flat, tree = Work(num_tokens=0, num_pairs=0), Work(num_tokens=0, num_pairs=0)
    for step in range(2, num_steps + 1):
        batch = make_batch([corpus.tasks[i] for i in loop.plan.tasks_of(step)], "tree")
        flat += flat_work(np.concatenate([forest.branch_length for forest in batch.forests]))
        tree += tree_work(batch.forests)
    return work_bounds(flat, tree, _shape(corpus))


def _shape(corpus: Corpus) -> ModelShape:
    return ModelShape(
        name="demo",
        num_layers=MODEL.num_layers,
        hidden_size=MODEL.hidden_size,
        num_heads=MODEL.num_heads,
        num_kv_heads=MODEL.num_kv_heads,
        head_size=MODEL.head_size,
        intermediate_size=MODEL.intermediate_size,
        vocab_size=MODEL.vocab_size or corpus.num_ids,
    )


def _result(corpus: Corpus, tree: _Side, packed: _Side, bounds: Bounds) -> DemoResult:
    flat = sum(report.update.num_branch_tokens for report in tree.reports[1:])
    unique = sum(report.update.num_tokens for report in tree.reports[1:])
    speedup = packed.timed_s / tree.timed_s
    losses = zip(tree.reports, packed.reports, strict=True)
    return DemoResult(
        data="real" if corpus.source == "files" else "generated",
        num_tasks=len(corpus.tasks),
        num_parameters=tree.num_parameters,
        num_steps=len(tree.reports),
        flat_tokens=flat,
        unique_tokens=unique,
        sharing=1.0 - unique / flat,
        packed_s=packed.timed_s,
        tree_s=tree.timed_s,
        speedup=speedup,
        token_bound=bounds.token_bound,
        flop_bound=bounds.flop_bound,
        share_of_flop_bound=speedup / bounds.flop_bound,
        first_loss=tree.reports[0].update.loss,
        last_loss=tree.reports[-1].update.loss,
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        num_threads=torch.get_num_threads(),
        versions={name: version(name) for name in ("torch", "transformers", "numpy")},
        largest_loss_difference=max(abs(ours.update.loss - plain.update.loss) for ours, plain in losses),
    )


def _check_empty(out: Path | None) -> None:
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise InputError(f"--out needs a new or empty folder, and {out} holds files; name another one")
