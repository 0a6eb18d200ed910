"""Shows which files of the package run in one `backward` and in one step of `treering train`.

Both are tiny: a Qwen3 of two layers, and a GRPO step of two prompts with two rollouts each in one process. Counted are
functions that are entered; bodies of modules and what they call are not, nor what numba's compiler runs.

    python tools/flow.py                   # the numbers
    python tools/flow.py backward --show   # files and functions in the order in which they are first entered
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

PACKAGE = Path(__file__).parents[1] / "src" / "treering"
WORDS = ["?", "q", "<|im_start|>", "<|im_end|>", "user", "assistant", "yes", "no", "1", "2"]
CONFIG = """
[task]
kind = "prompts"
file = "prompts.jsonl"
tokenizer = "words"
template = "raw"
reward = "flow_rewards:rising"
[model]
hidden_size = 16
num_layers = 2
device = "cpu"
[sampling]
max_tokens = 8
[rl]
num_steps = 1
prompts_per_step = 2
group_size = 2
[engine]
num_threads = 1
[run]
dir = "out"
"""
REWARDS = """
from itertools import count
numbers = count()
def rising(prompt, text):
    return float(next(numbers))
"""


@dataclass
class Flow:
    """The functions that were entered, by file, both in the order of first entry."""

    functions: dict[str, list[str]] = field(default_factory=dict)
    num_switches: int = 0
    """How often a function was entered after one of another file."""

    def counts(self) -> dict[str, int]:
        """Return the numbers of files, of distinct functions and of switches between files."""
        num_functions = sum(len(names) for names in self.functions.values())
        return {"files": len(self.functions), "functions": num_functions, "switches": self.num_switches}


@contextlib.contextmanager
def recorded() -> Iterator[Flow]:
    """Record the functions of the package that this thread and those it starts enter."""
    from numba.core.dispatcher import Dispatcher

    flow, seen, last = Flow(), set(), ""
    loading: dict[int, FrameType] = {}
    root = f"{PACKAGE}{os.sep}"

    def watch(frame: FrameType, event: str, _: object) -> None:
        nonlocal last
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(root):
            return
        if code.co_name == "<module>":
            if event == "call":
                loading.setdefault(threading.get_ident(), frame)
            elif loading[threading.get_ident()] is frame:
                del loading[threading.get_ident()]
        elif event == "call" and threading.get_ident() not in loading and not code.co_name.startswith("<"):
            file = code.co_filename.removeprefix(root)
            flow.num_switches += last not in ("", file)
            last = file
            if code not in seen:
                seen.add(code)
                flow.functions.setdefault(file, []).append(code.co_qualname)

    compile_for = Dispatcher._compile_for_args

    def compile_unwatched(self: Dispatcher, *arguments: object) -> object:
        watching = sys.getprofile()
        sys.setprofile(None)
        try:
            return compile_for(self, *arguments)
        finally:
            sys.setprofile(watching)

    Dispatcher._compile_for_args = compile_unwatched
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        yield flow
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        Dispatcher._compile_for_args = compile_for


def backward() -> Flow:
    """Trace one `backward` of a Qwen3 with two layers on two trees with two branches each."""
    import numpy as np
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import treering

    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=32, head_dim=8, intermediate_size=16, **shape))
    prompts, completions = ([1, 2, 3], [4, 5]), ([6, 7, 8], [9, 10])
    rows = [(prompt, completion) for prompt in prompts for completion in completions]
    forest = treering.Forest.from_sequences([np.array(prompt + completion) for prompt, completion in rows])
    masks = [np.arange(len(prompt + completion)) >= len(prompt) for prompt, completion in rows]
    advantages = np.array([1.0, -1.0, 1.0, -1.0])
    with recorded() as flow:
        treering.backward(model, forest, treering.objectives.grpo(advantages, masks))
    return flow


def train() -> Flow:
    """Trace `treering train` with one step: settings, model, rollouts, update, checkpoint."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from treering.cli.main import main

    folder = Path(tempfile.mkdtemp())
    # An empty cache of tokens: what the prompts' files enter must not depend on earlier runs of this machine.
    os.environ["TREERING_CACHE"] = str(folder / "cache")
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (folder / "words").mkdir()
    tokenizer.save(str(folder / "words" / "tokenizer.json"))
    (folder / "prompts.jsonl").write_text('{"prompt": "q 1", "id": "1"}\n{"prompt": "q 2", "id": "2"}\n')
    (folder / "flow_rewards.py").write_text(REWARDS)
    (folder / "run.toml").write_text(CONFIG)
    sys.path.insert(0, str(folder))
    sys.argv = ["treering", "train", "run.toml"]
    with contextlib.chdir(folder), contextlib.redirect_stdout(sys.stderr), recorded() as flow:
        try:
            main()
        except SystemExit as ended:
            if ended.code:
                raise
    return flow


FLOWS: dict[str, Callable[[], Flow]] = {"backward": backward, "train": train}


def main() -> None:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*FLOWS, []], metavar="NAME", help=" or ".join(FLOWS))
    parser.add_argument("--show", action="store_true", help="list files and functions in the order of first entry")
    parser.add_argument("--json", action="store_true", help="print the numbers, and with --show the lists, as JSON")
    options = parser.parse_args()
    flows = {name: FLOWS[name]() for name in options.names or FLOWS}
    if options.json:
        found = {name: flow.counts() | (flow.functions if options.show else {}) for name, flow in flows.items()}
        print(json.dumps(found))
        return
    for name, flow in flows.items():
        print(f"{name}: " + ", ".join(f"{count:,} {what}" for what, count in flow.counts().items()))
        for file, functions in flow.functions.items() if options.show else ():
            print(f"  {file}: {', '.join(functions)}")


if __name__ == "__main__":
    main()
