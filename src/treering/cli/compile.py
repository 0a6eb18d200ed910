"""`treering compile`: all functions of numba, ahead of their first use, part by part."""

import json
import time
from collections.abc import Callable, Mapping

import numpy as np
from rich.console import Console

from treering.extras import TRAIN, is_installed


def forests() -> None:
    """`Forest`, its paths, and why sharing was lost (`treering inspect --why`)."""
    from treering.tree.divergence import explain_losses
    from treering.tree.forest import Forest

    run = list(range(40))
    forest = Forest.from_sequences([[1, 2, *run], [1, 3, *run], [1, 2]])
    forest.paths()
    explain_losses([forest])


def drafts() -> None:
    """The drafter, and its replay of recorded rollouts (`treering inspect --drafts`)."""
    from treering.analysis.recording import sampled_runs
    from treering.analysis.replay import agreement, write_origins
    from treering.history.draft.drafter import Drafter
    from treering.history.store.store import HistoryStore

    Drafter(HistoryStore()).warm_up()
    zero, one, token = np.zeros(1, np.int64), np.arange(2), np.zeros(1, np.int32)
    ends, _ = sampled_runs(np.ones(1, bool), one)
    accepted, leaves = agreement(token, ends, zero, token, one, token - 1)
    write_origins(np.zeros(1, np.int8), zero, one, token - 1, accepted, leaves, zero)


def schedules() -> None:
    """Schedules by length and their simulator (`treering simulate`)."""
    from treering.schedule import HistoPipe, simulate, synthetic_trace

    simulate(HistoPipe(), synthetic_trace("constant:100", num_steps=4, num_rollouts=8, seed=0), workers=4)


def engine() -> None:
    """`TorchEngine` on a CPU with weights in float32, with drafts, cuts and penalties."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from treering.engine.request import Request, Sampling
    from treering.engine.torch_engine import TorchEngine
    from treering.history.draft.drafter import Drafter
    from treering.history.store.store import HistoryStore

    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    store = HistoryStore()
    store.add("q", [np.arange(1, 30, dtype=np.int32)] * 2, version=0)
    store.publish()
    penalised = Sampling(max_tokens=16, repetition_penalty=1.1, top_k=4)
    requests = [
        Request(prompt_id="q", prompt=np.array([1, 2, 3]), sampling=sampling, sample=sample)
        for sample, sampling in enumerate((Sampling(max_tokens=16, top_k=1), Sampling(max_tokens=16), penalised))
    ]
    list(TorchEngine(LlamaForCausalLM(config).float().eval(), Drafter(store), max_batch=4).generate(requests))


def parts() -> Mapping[str, Callable[[], None]]:
    """Those whose packages are installed, by name: the engine needs torch."""
    core = {"forests": forests, "drafts": drafts, "schedules": schedules}
    return core | {"engine": engine} if all(map(is_installed, TRAIN)) else core


def run(json_output: bool) -> int:
    """Compiles what numba compiles into its cache on disk, so that no later process does; returns 0.

    Args:
        json_output: the seconds of processor time by part as one JSON object, instead of lines.
    """
    console, seconds = Console(stderr=True), {}
    for name, compile_part in parts().items():
        start = time.process_time()
        with console.status(f"compiling {name}"):
            compile_part()
        seconds[name] = round(time.process_time() - start, 2)
        if not json_output:
            print(f"{name}: {seconds[name]:.1f} s of a processor")
    if json_output:
        print(json.dumps({"seconds": seconds}))
    return 0
