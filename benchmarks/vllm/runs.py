"""One engine in its own process: samples the problems epoch after epoch, and measures the last one."""

import os
import time
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
        num_epochs: the last one is measured; the plugin's history is what the ones before gave.
        options: lines of the plugin's TOML file.
    """

    method: Method
    num_rows: int
    num_drafts: int = 16
    num_epochs: int = 2
    options: str = ""


def measure_case(case: Case, model: Path, folder: Path, num_problems: int, group_size: int) -> dict[str, Any]:
    """Tokens, steps and seconds of the last epoch, for JSON.

    Args:
        case: what to measure.
        model: the saved policy.
        folder: for the history.
        num_problems: that the policy knows; all are sampled.
        group_size: rollouts of each.
    """
    os.environ.update(_ENVIRONMENT, TREERING_HISTORY=str(folder / "history"), TREERING_VLLM_CONFIG=str(folder / "c"))
    (folder / "c").write_text(f"refresh_interval_s = 0\n{case.options}\n")
    llm = _make_llm(case, model)
    # numba is imported from here on only: vLLM's CPU worker must start before.
    from tests.integrations.vllm.shim import right_sampling

    from treering.history.store.store import HistoryStore

    meter = _Meter(llm)
    known = problems(2 * num_problems)
    asked, other = known[:num_problems], known[num_problems:]
    with right_sampling(), HistoryStore(folder / "history") as store:
        if case.method == "other history":
            _record_others(llm, store, [prompt for prompt, _ in asked], [solutions for _, solutions in other])
        for epoch in range(case.num_epochs):
            meter.reset()
            outputs, names = _sample(llm, [prompt for prompt, _ in asked], group_size, epoch)
            found = meter.report(sum(len(output.outputs[0].token_ids) for output in outputs))
            if case.method in ("history", "contract"):
                _record(llm, store, outputs, names, epoch)
    return {"method": case.method, "num_rows": case.num_rows, "num_drafts": case.num_drafts, **found}


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
        kv_cache_memory_bytes=1 << 27,
        worker_extension_cls="treering.integrations.vllm.WorkerExtension",
        speculative_config=None if case.method == "none" else drafts,
    )


def _sample(llm: Any, prompts: list[list[int]], group_size: int, epoch: int) -> tuple[list[Any], list[str]]:
    """The rollouts of an epoch at temperature 1, and the prompt_id of each."""
    from vllm import SamplingParams

    from treering.integrations.vllm import request_args

    contexts = [(str(prompt), prompt) for prompt in prompts for _ in range(group_size)]
    params = [
        SamplingParams(
            temperature=1.0, max_tokens=SOLUTION_SIZE + 20, stop_token_ids=[END], detokenize=False,
            seed=1000 * epoch + number, extra_args=request_args(name, epoch),
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


def _record_others(llm: Any, store: Any, prompts: list[list[int]], solutions: list[list[list[int]]]) -> None:
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
