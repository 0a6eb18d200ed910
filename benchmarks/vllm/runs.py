"""One engine in its own process: samples prompts epoch after epoch, new weights or not, and measures each epoch."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.vllm.policy import END, SOLUTION_SIZE, problems

Method = Literal["none", "ngram", "suffix", "history", "other history", "contract"]
"""none: no drafts. ngram, suffix: vLLM's own. history: the plugin with the rollouts of the epoch before. other history:
each problem has the solutions of another one as its history. contract: as history, by vLLM's documented contract
alone."""

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What to measure.

    Attributes:
        method: see `Method`.
        num_rows: rows of the batch.
        num_drafts: K, most tokens of a draft.
        num_epochs: the plugin's history is what the ones before gave.
        options: lines of the plugin's TOML file.
    """

    method: Method
    num_rows: int
    num_drafts: int = 16
    num_epochs: int = 2
    options: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What every epoch samples.

    Attributes:
        prompts: as tokens.
        group_size: rollouts of each.
        max_tokens: most of a rollout.
        stop_token: ends a rollout.
        temperature: of sampling.
    """

    prompts: Sequence[list[int]]
    group_size: int
    max_tokens: int
    stop_token: int
    temperature: float = 1.0


def measure_case(case: Case, model: Path, folder: Path, num_problems: int, group_size: int) -> dict[str, Any]:
    """Tokens, steps and seconds of the last epoch, for JSON.

    Args:
        case: what to measure.
        model: the saved policy.
        folder: for the history.
        num_problems: that the policy knows; all are sampled.
        group_size: rollouts of each.
    """
    known = problems(2 * num_problems)
    prompts = [prompt for prompt, _ in known[:num_problems]]
    asked = Asked(prompts=prompts, group_size=group_size, max_tokens=SOLUTION_SIZE + 20, stop_token=END)
    others = [solutions for _, solutions in known[num_problems:]] if case.method == "other history" else None
    return measure_epochs(case, asked, [model] * case.num_epochs, folder, others)[-1]


def measure_epochs(
    case: Case, asked: Asked, weights: Sequence[Path], folder: Path, others: list[list[list[int]]] | None = None
) -> list[dict[str, Any]]:
    """Tokens, steps and seconds of each epoch, for JSON.

    Args:
        case: what to measure.
        asked: what is sampled.
        weights: the saved policy of each epoch; where it is another one than before, it is loaded before the epoch.
        folder: for the history.
        others: rollouts that are the history of each prompt at the start.
    """
    os.environ.update(_ENVIRONMENT, TREERING_HISTORY=str(folder / "history"), TREERING_VLLM_CONFIG=str(folder / "c"))
    (folder / "c").write_text(f"refresh_interval_s = 0\n{case.options}\n")
    llm = _make_llm(case, weights[0])
    # numba is imported from here on only: vLLM's CPU worker must start before.
    from tests.integrations.vllm.shim import right_sampling

    from treering.history.store.store import HistoryStore

    meter = _Meter(llm)
    found, loaded = [], weights[0]
    with right_sampling(), HistoryStore(folder / "history") as store:
        if others is not None:
            _record_others(llm, store, asked.prompts, others)
        for epoch, policy in enumerate(weights):
            if policy != loaded:
                _load(llm, policy)
                loaded = policy
            meter.reset()
            outputs, names = _sample(llm, asked, epoch)
            figures = meter.report(sum(len(output.outputs[0].token_ids) for output in outputs))
            found.append({"method": case.method, "num_rows": case.num_rows, "num_drafts": case.num_drafts, **figures})
            if case.method in ("history", "contract"):
                _record(llm, store, outputs, names, epoch)
    return found


def _load(llm: Any, policy: Path) -> None:
    """Gives the engine other weights, the head too where it is the embedding."""
    from transformers import AutoModelForCausalLM

    from treering.integrations.vllm.llm import checkpoint_of

    with checkpoint_of(AutoModelForCausalLM.from_pretrained(policy, dtype="float32")) as written:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(written)})
    llm.reset_prefix_cache()


def _make_llm(case: Case, model: Path) -> Any:
    from vllm import LLM

    from treering.integrations.vllm import register

    drafts: dict[str, Any] = {"method": case.method, "num_speculative_tokens": case.num_drafts}
    if case.method in ("history", "other history", "contract"):
        proposer = "treering.integrations.vllm.HistoryProposer"
        drafts = {"method": "custom_class", "model": proposer, "num_speculative_tokens": case.num_drafts}
    if case.method != "contract":
        register()
    return LLM(
        str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=case.num_rows,
        kv_cache_memory_bytes=1 << 28,
        worker_extension_cls="treering.integrations.vllm.WorkerExtension",
        speculative_config=None if case.method == "none" else drafts,
    )


def _sample(llm: Any, asked: Asked, epoch: int) -> tuple[list[Any], list[str]]:
    """The rollouts of an epoch, and the prompt_id of each."""
    from vllm import SamplingParams

    from treering.integrations.vllm import request_args

    contexts = [(str(prompt), prompt) for prompt in asked.prompts for _ in range(asked.group_size)]
    params = [
        SamplingParams(
            temperature=asked.temperature, max_tokens=asked.max_tokens, stop_token_ids=[asked.stop_token],
            detokenize=False, seed=1000 * epoch + number, extra_args=request_args(name, epoch),
        )
        for number, (name, _) in enumerate(contexts)
    ]  # fmt: skip
    outputs = llm.generate([{"prompt_token_ids": prompt} for _, prompt in contexts], params, use_tqdm=False)
    return outputs, [name for name, _ in contexts]


def _record(llm: Any, store: Any, outputs: list[Any], names: list[str], epoch: int) -> None:
    from treering.integrations.vllm import record

    record(store, outputs, epoch, prompt_ids=names)
    # By the contract alone, prompts are found by their tokens.
    record(store, outputs, epoch)
    store.publish()
    llm.collective_rpc("treering_refresh")


def _record_others(llm: Any, store: Any, prompts: Sequence[list[int]], solutions: list[list[list[int]]]) -> None:
    import numpy as np

    for prompt, known in zip(prompts, solutions, strict=True):
        store.add(str(prompt), [np.array(solution, np.int32) for solution in known], version=0)
    store.publish()
    llm.collective_rpc("treering_refresh")


class _Meter:
    """Counts rows, drafted tokens and seconds of a runner's steps and of its drafter."""

    def __init__(self, llm: Any) -> None:
        self.reset()
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        sample = runner.sample_tokens

        def sample_tokens(*arguments: Any) -> Any:
            output = sample(*arguments)
            self.num_steps += 1
            self.num_rows += sum(1 for new in output.sampled_token_ids if new)
            return output

        runner.sample_tokens = sample_tokens
        drafter = getattr(runner, "drafter", None)
        if drafter is not None:
            self._propose = drafter.propose
            drafter.propose = self._timed

    def _timed(self, *arguments: Any, **named: Any) -> Any:
        began = time.process_time()
        drafts = self._propose(*arguments, **named)
        self.propose_s += time.process_time() - began
        self.num_drafted += sum(map(len, drafts))
        return drafts

    def reset(self) -> None:
        """Begins an epoch."""
        self.num_steps = self.num_rows = self.num_drafted = 0
        self.propose_s = 0.0
        self._began = time.process_time()

    def report(self, num_tokens: int) -> dict[str, Any]:
        """The figures of the epoch, which gave that many tokens."""
        cpu_s = time.process_time() - self._began
        return {
            "num_tokens": num_tokens,
            "num_steps": self.num_steps,
            "tokens_per_row_and_step": num_tokens / self.num_rows,
            "num_drafted": self.num_drafted,
            "accepted_share": (num_tokens - self.num_rows) / self.num_drafted if self.num_drafted else 0.0,
            "propose_us_per_row": 1e6 * self.propose_s / self.num_rows,
            "cpu_s": cpu_s,
        }
