"""An agent with a tool, in our own environment and in verifiers; trees of recorded turns with and without thoughts."""

import asyncio
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from tokenizers import Tokenizer

from benchmarks.common.progress import OnProgress
from benchmarks.real.tasks import MAX_TURN_TOKENS, Calculator, write_task
from treering import metrics
from treering.cli.demo import DemoSize, write_config
from treering.cli.display import PlainConsole
from treering.cli.train import open_training
from treering.config import RlConfig, load
from treering.data import DATA_VARIABLE, Renderer, Trajectory, data_folder, read_trajectories
from treering.errors import InputError
from treering.report.run_data import read_run
from treering.tree.forest import Forest

SIZE = DemoSize(num_prompts=32, prompts_per_step=4, group_size=8, num_epochs=2, max_batch=32)
VERIFIERS_VARIABLE = "TREERING_VERIFIERS_PYTHON"
TASKSETS = Path(__file__).with_name("taskset")
_THOUGHT = re.compile(r"Thought \d+: (.*?)\n(Action \d+: .*)", re.DOTALL)
_TEMPLATE = (
    "{{% for m in messages %}}{{{{ '<|im_start|>' + m.role + '\\n' }}}}"
    "{{% if m.reasoning_content and {shown} %}}"
    "{{{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n' }}}}{{% endif %}}"
    "{{{{ (m.content or '') + '<|im_end|>\\n' }}}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}"
)
THOUGHTS = {"kept": _TEMPLATE.format(shown="true"), "dropped": _TEMPLATE.format(shown="loop.last")}
"""ChatML by whether earlier turns keep their thoughts."""


def verifiers_python() -> Path:
    """The interpreter of verifiers, which may be missing."""
    return Path(os.environ.get(VERIFIERS_VARIABLE, ".venv-env/bin/python")).absolute()


def measure_agents(folder: Path, model: Path, *, size: DemoSize = SIZE, on_progress: OnProgress) -> dict[str, Any]:
    """Rewards and tokens of both kinds of environment from one start, and trees of recorded turns with thoughts."""
    found: dict[str, Any] = {"own": trained_agent(folder / "own", model, size=size, on_progress=on_progress)}
    with taskset_path():
        sections = verifiers_sections(str(verifiers_python()))
        found["verifiers"] = trained_agent(folder / "verifiers", model, sections, size=size, on_progress=on_progress)
    on_progress("agents: rewards of both rules, thoughts")
    found["replayed"] = replayed(folder / "verifiers" / "treering", model)
    return found | {"thoughts": thoughts(recorded_thoughts(), model, folder)}


def verifiers_sections(python: str) -> Mapping[str, Mapping[str, Any]]:
    """Settings of the same task in verifiers."""
    task = {"kind": "verifiers", "env": "calculator_taskset", "python": python, "max_turn_tokens": MAX_TURN_TOKENS}
    return {"task": task, "task.renderer": {"name": "default"}}


@contextmanager
def taskset_path() -> Iterator[None]:
    """Inside, verifiers' process finds the taskset."""
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join([str(TASKSETS), os.environ.get("PYTHONPATH", "")])):
        yield


def trained_agent(
    out: Path,
    model: Path,
    sections: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    *,
    size: DemoSize,
    on_progress: OnProgress,
) -> dict[str, Any]:
    """`treering train` on the calculator, whose settings `sections` replace; resumed where it ended."""
    own = {**write_task("calculator", out, model, size, seed=0, temperature=1.0), **sections}
    config = load(RlConfig, write_config(out, size, own, side="treering", seed=0))
    with open_training(config, config_dir=out, console=PlainConsole(quiet=True)) as run:
        for report in run.steps:
            on_progress(f"agents: {out.name}, step {report.step} of {run.num_steps}")
    rows = read_run(out / "treering").rows
    total = {
        name: sum(row.get(key, 0) for row in rows)
        for name, key in (("flat_tokens", metrics.NUM_BRANCH_TOKENS), ("computed_tokens", metrics.NUM_TOKENS))
    }
    return {
        "reward_by_step": [row[metrics.REWARD_MEAN] for row in rows if metrics.REWARD_MEAN in row],
        "held_out_reward": [row[metrics.EVAL_REWARD] for row in rows if metrics.EVAL_REWARD in row],
        "tokens_per_forward_by_step": [row[metrics.TOKENS_PER_FORWARD] for row in rows if metrics.REWARD_MEAN in row],
        **total,
        "token_ratio": total["flat_tokens"] / max(1, total["computed_tokens"]),
    }


def replayed(run: Path, model: Path) -> dict[str, int]:
    """How many logged rollouts of a run get the same reward when our own environment hears their turns."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tasks = {task.id: task for task in Calculator.tasks}
    files = sorted((run / "rollouts").glob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    rewards = []
    for row in rows:
        texts = [tokenizer.decode(row["tokens"][start:stop]) for _, start, stop in row["episode"]["calls"]]
        rewards.append(asyncio.run(Calculator().run(tasks[row["task_id"]], Replayed(texts))))
    return {
        "num_rollouts": len(rows),
        "num_equal": sum(reward == row["reward"] for reward, row in zip(rewards, rows, strict=True)),
    }


class Replayed:
    """Policy that says given texts again."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = iter(texts)

    async def chat(self, messages: Any) -> Any:
        """The next text."""
        text = next(self._texts)
        return SimpleNamespace(text=text, message={"role": "assistant", "content": text})


def recorded_thoughts() -> list[Trajectory]:
    """HotpotQA's recorded agents: each turn a thought and an action.

    Raises:
        InputError: there is no folder of real data.
    """
    folder = data_folder()
    if folder is None:
        raise InputError(f"the part agents needs real trajectories: set {DATA_VARIABLE} to a folder that has them")
    return list(read_trajectories(folder / "bench" / "hotpotqa_react_reflexion.jsonl.gz"))


def thoughts(trajectories: Sequence[Trajectory], model: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Tokens of these chats, a tree per task, under a template that keeps thoughts and one that drops earlier ones."""
    chats = sorted(map(_with_thoughts, trajectories), key=_task)
    found = {}
    for name, template in THOUGHTS.items():
        tokenizer = folder / f"thoughts-{name}"
        tokenizer.mkdir(parents=True, exist_ok=True)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(model / file, tokenizer / file)
        (tokenizer / "chat_template.jinja").write_text(template, encoding="utf-8")
        renderer = Renderer(tokenizer=tokenizer, template="hf")
        sequences = [[each.tokens for each in renderer.render(list(own))] for _, own in groupby(chats, key=_task)]
        flat = sum(each.size for own in sequences for each in own)
        computed = sum(Forest.from_sequences(own).num_tokens for own in sequences)
        found[name] = {
            "num_sequences": sum(map(len, sequences)),
            "flat_tokens": flat,
            "computed_tokens": computed,
            "token_ratio": flat / computed,
        }
    return found


def _task(trajectory: Trajectory) -> str:
    return str(trajectory.task_id)


def _with_thoughts(trajectory: Trajectory) -> Trajectory:
    """The chat with thoughts apart from actions; a turn in another form stays one text."""
    messages = []
    for message in trajectory.messages or ():
        parts = _THOUGHT.fullmatch((message.content or "").strip()) if message.role == "assistant" else None
        messages.append(message if parts is None else replace(message, reasoning=parts[1].strip(), content=parts[2]))
    return replace(trajectory, messages=tuple(messages), format="chat")
