"""TRL's trainers alone, with shared prefixes, and with this engine's rollouts: GRPO on sums, SFT and DPO on agents.

Each way runs in its own process with the same script and seed. Gradients and weights of the first three steps are
compared; seconds are of the processor, on one thread.
"""

import json
import multiprocessing
import runpy
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.progress import OnProgress
from benchmarks.real.bench import kept
from benchmarks.trl.bench import labelled_positions_only
from treering.cli.demo import PROMPTS_FILE, REWARDS_FILE, DemoSize, write_real_task
from treering.data import RenderedTrajectory, data_folder, read_trajectories, render
from treering.errors import InputError
from treering.extras import require

WAYS = {"grpo": ("stock", "shared", "engine", "drafts"), "sft": ("stock", "shared"), "dpo": ("stock", "shared")}
"""stock: TRL alone. shared: `share_prefixes`. engine: also `HistoryRollouts` without drafts. drafts: with them."""
VLLM_WAYS = ("vllm", "vllm_drafts")
"""Shared, with TRL's own vLLM, and with `vllm_drafts`; part vllm runs them, in whose environment both hosts are."""
EXACT_STEPS = 3
MAX_NEW, MAX_VLLM_LENGTH = 24, 128
MAX_LENGTH, ROWS_PER_STEP = 1536, 2
AGENTS = "toolbench_dfsdt", "tau_airline_gpt4o"
_DIFFERENCE = "sampling/sampling_logp_difference/mean"
_COMMON = {
    "lr_scheduler_type": "constant",
    "model_init_kwargs": {"dtype": "float32"},
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "seed": 0,
}


def measure(folder: Path, model: Path, *, size: DemoSize, on_progress: OnProgress) -> dict[str, Any]:
    """Every trainer and way; what is done is kept in `folder`."""
    require("the part trl", "trl")
    found: dict[str, Any] = {}
    for kind, ways in WAYS.items():
        if kind != "grpo" and data_folder() is None:
            continue
        states = {way: folder / f"{kind}-{way}" for way in ways}
        for way, state in states.items():
            on_progress(f"TRL: {kind}, {way}")
            kept(state.with_suffix(".json"), partial(alone, train, kind, way, model, state, size))
        reports = {way: json.loads(state.with_suffix(".json").read_text())["found"] for way, state in states.items()}
        found[kind] = {way: {**summary(rows), "steps": rows} for way, rows in reports.items()}
        kept(folder / f"{kind}-apart.json", partial(_apart, states["stock"], states["shared"], model))
        found[kind]["apart"] = json.loads((folder / f"{kind}-apart.json").read_text())["found"]
    rows = {way: found["grpo"][way]["steps"] for way in ("engine", "drafts")}
    pairs = zip(rows["engine"], rows["drafts"], strict=True)
    found["grpo"]["steps_with_other_tokens_by_drafts"] = sum(one["tokens"] != other["tokens"] for one, other in pairs)
    return found


def alone(work: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a function in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Processor seconds of a step after the first, which has the check of `share_prefixes`; tokens of all steps."""
    later = rows[1:] or rows
    whole, sampling = (mean(row[name] for row in later) for name in ("whole_s", "sampling_s"))
    flat, computed = (sum(row.get(name, 0) for row in rows) for name in ("flat_tokens", "computed_tokens"))
    found = {
        "processor_s": {"sampling": sampling, "training": whole - sampling, "whole": whole, "first": rows[0]["whole_s"]}
    }
    if computed:
        found |= {"flat_tokens": flat, "computed_tokens": computed, "token_ratio": flat / computed}
    if "reward" in rows[0]:
        found["reward"] = mean(row["reward"] for row in rows)
    return found


def train(kind: str, way: str, model: Path, state: Path, size: DemoSize) -> list[dict[str, Any]]:
    """A row for each step; gradients and weights of the first three are left in the folder `state`."""
    torch.set_num_threads(1)
    from treering.integrations.trl import share_prefixes

    state.mkdir(parents=True, exist_ok=True)
    with labelled_positions_only(), _on_cpu() if way in VLLM_WAYS else nullcontext():
        trainer = _MAKERS[kind](model, state, way, size)
        meter = meter_of(trainer, state if way in ("stock", "shared") else None)
        handle = None
        if way != "stock":
            # Other rows than the stock trainer's would be no comparison; those of a task stand together in the data.
            options = {} if kind == "grpo" else {"group_batches": False, "verify_first": False}
            handle = share_prefixes(trainer, **options)
        trainer.train()
    if handle is not None and handle.difference is not None:
        # How far trees are, and what other rounding does to the stock path.
        meter.rows[0]["verified"] = asdict(handle.difference)
    return list(meter.rows)


def _grpo(model: Path, state: Path, way: str, size: DemoSize) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from treering.integrations.trl import HistoryRollouts, vllm_drafts

    write_real_task(state, model, size, seed=0)
    lines = [json.loads(line) for line in (state / PROMPTS_FILE).read_text(encoding="utf-8").splitlines()]
    data = Dataset.from_list([{**line, "prompt": [{"role": "user", "content": line["prompt"]}]} for line in lines])
    number_alone = runpy.run_path(str(state / REWARDS_FILE))["number_alone"]

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        pairs = zip(answer, completions, strict=True)
        return [number_alone(SimpleNamespace(answer=right), said[0]["content"]) for right, said in pairs]

    has_vllm = way in VLLM_WAYS
    args = GRPOConfig(
        output_dir=str(state / "out"),
        **({"use_vllm": True, "vllm_max_model_length": MAX_VLLM_LENGTH} if has_vllm else {}),
        per_device_train_batch_size=size.prompts_per_step * size.group_size,
        num_generations=size.group_size,
        max_completion_length=MAX_NEW,
        learning_rate=1e-5,
        max_steps=size.num_steps,
        gradient_checkpointing=False,
        # Part vllm samples with these weights.
        save_strategy="steps" if way == "engine" else "no",
        save_steps=size.steps_per_epoch,
        save_only_model=True,
        **_COMMON,
    )
    drafts = {"engine": "off", "drafts": "auto"}.get(way)
    rollouts = HistoryRollouts(drafts=drafts, num_threads=1) if drafts else None  # type: ignore[arg-type]
    with vllm_drafts(state / "history") if way == "vllm_drafts" else nullcontext():
        return GRPOTrainer(str(model), reward, args, data, rollout_func=rollouts)


def _on_cpu() -> AbstractContextManager[None]:
    from tests.integrations.vllm.trl_on_cpu import trl_on_cpu

    return trl_on_cpu()


def _sft(model: Path, state: Path, *_: Any) -> Any:
    """Branches of ToolBench's search trees, in the order of their tasks."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [row for rows in agent_rows(AGENTS[0], model).values() for row in rows if row.tokens.size <= MAX_LENGTH]
    rows = rows[: ROWS_PER_STEP * EXACT_STEPS]
    labels = [np.where(row.loss_mask, row.tokens, -100).tolist() for row in rows]
    data = Dataset.from_dict({"input_ids": [row.tokens.tolist() for row in rows], "labels": labels})
    args = SFTConfig(**_agents(state, ROWS_PER_STEP))
    return SFTTrainer(str(model), args=args, train_dataset=data)


def _dpo(model: Path, state: Path, *_: Any) -> Any:
    """Pairs of tau-bench: a trial of a task that was solved and one that was not, after what they begin with."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(model)
    pairs = []
    for rows in agent_rows(AGENTS[1], model).values():
        chosen, rejected = ([row for row in rows if row.reward == reward] for reward in (1.0, 0.0))
        if chosen and rejected:
            best, worst = chosen[0].tokens[:MAX_LENGTH], rejected[0].tokens[:MAX_LENGTH]
            size = min(best.size, worst.size)
            start = int(np.append(np.flatnonzero(best[:size] != worst[:size]), size)[0])
            parts = {"prompt": best[:start], "chosen": best[start:], "rejected": worst[start:]}
            pairs.append({name: tokenizer.decode(tokens) for name, tokens in parts.items()})
    args = DPOConfig(**_agents(state, 1))
    return DPOTrainer(str(model), args=args, train_dataset=Dataset.from_list(pairs[:EXACT_STEPS]))


_MAKERS = {"grpo": _grpo, "sft": _sft, "dpo": _dpo}


def _agents(state: Path, num_rows: int) -> dict[str, Any]:
    return _COMMON | {
        "output_dir": str(state / "out"),
        "per_device_train_batch_size": num_rows,
        "max_length": MAX_LENGTH,
        "max_steps": EXACT_STEPS,
        "save_strategy": "no",
        "train_sampling_strategy": "sequential",
    }


def agent_rows(name: str, model: Path) -> dict[Any, list[RenderedTrajectory]]:
    """Trajectories of a set as the model's tokens, by task in the order of the file."""
    folder = data_folder()
    if folder is None:
        raise InputError("agents' trajectories are read from TREERING_DATA, which names no folder; set it")
    # The model's own template drops calls of tools.
    rendered = render(read_trajectories(folder / "bench" / f"{name}.jsonl.gz"), model, "plain")
    tasks = defaultdict(list)
    for row in rendered:
        tasks[row.task_id].append(row)
    return dict(tasks)


def meter_of(trainer: Any, state: Path | None) -> Any:
    """A callback of the trainer whose `rows` have a step's logs and seconds; saves the first steps in `state`."""
    from transformers import TrainerCallback

    class Meter(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rows: list[dict[str, Any]] = []
            self._tokens, self._sampling_s = 0, 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self._began, self._sampling_s = time.process_time(), 0.0

        def on_pre_optimizer_step(self, args: Any, at: Any, *_: Any, model: Any = None, **__: Any) -> None:
            began = time.process_time()
            gradients = {name: weight.grad for name, weight in model.named_parameters()}
            self._save(f"gradient-{at.global_step + 1}", at.global_step, gradients)
            self._began += time.process_time() - began

        def on_step_end(self, args: Any, at: Any, *_: Any, model: Any = None, **__: Any) -> None:
            self._whole_s = time.process_time() - self._began
            if at.global_step == EXACT_STEPS:
                self._save("weights", 0, dict(model.named_parameters()))

        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            if "loss" not in logs:
                return
            own = {"whole_s": self._whole_s, "sampling_s": self._sampling_s}
            own |= {name: logs[name] for name in ("loss", "grad_norm", "reward") if name in logs}
            if "reward" in logs:
                own["tokens"] = self._tokens
                own["tokens_per_forward"] = logs.get("rollout/tokens_per_forward", 1.0)
            if _DIFFERENCE in logs:
                # Old weights in vLLM would show here.
                own["logprob_difference"] = logs[_DIFFERENCE]
            if computed := logs.get("tree/tokens_computed"):
                own |= {"flat_tokens": round(computed * logs["tree/token_ratio"]), "computed_tokens": round(computed)}
            self.rows.append(own)

        def generate(self, *arguments: Any) -> Any:
            began = time.process_time()
            found = original(*arguments)
            self._sampling_s += time.process_time() - began
            self._tokens = zlib.crc32(json.dumps([list(map(int, ids)) for ids in found[1]]).encode())
            return found

        def _save(self, name: str, step: int, tensors: dict[str, Tensor]) -> None:
            if state is not None and step < EXACT_STEPS:
                torch.save({key: each.detach() for key, each in tensors.items()}, state / f"{name}.pt")

    meter, original = Meter(), getattr(trainer, "_generate", None)
    if original is not None:
        trainer._generate = meter.generate
    trainer.add_callback(meter)
    return meter


def _apart(stock: Path, shared: Path, model: Path) -> dict[str, Any]:
    """Distances between two ways over the stock way's norm: gradients by step, weights, and what the steps added."""
    from transformers import AutoModelForCausalLM

    names = [f"gradient-{step}" for step in range(1, EXACT_STEPS + 1)]
    found: dict[str, Any] = {"gradients": [_distance(*_loaded(stock, shared, name)) for name in names]}
    ours, theirs = _loaded(stock, shared, "weights")
    start = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())
    found["weights"] = _distance(ours, theirs)
    found["update"] = _distance(*({n: each[n] - start[n].detach() for n in each} for each in (ours, theirs)))
    for state in (stock, shared):
        for file in state.glob("*.pt"):
            file.unlink()
    return found


def _loaded(stock: Path, shared: Path, name: str) -> list[dict[str, Tensor]]:
    return [torch.load(state / f"{name}.pt") for state in (stock, shared)]


def _distance(stock: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    square = sum(float((other[name] - own).double().square().sum()) for name, own in stock.items())
    # A step without any reward has no gradient.
    norm = sum(float(own.double().square().sum()) for own in stock.values()) or 1.0
    return (square / norm) ** 0.5
