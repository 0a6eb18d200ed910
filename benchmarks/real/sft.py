"""`treering sft` on recorded agents, full and LoRA, tree and packed; then turns of the checkpoint by two engines."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch
from urllib.request import Request, urlopen

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from benchmarks.common.progress import OnProgress
from treering import metrics
from treering.cli.display import PlainConsole
from treering.cli.options import ServeOptions
from treering.cli.run_serve import opened
from treering.cli.sft_command import train
from treering.cli.toml import pair, section
from treering.config import SftConfig, load
from treering.data import DATA_VARIABLE, Trajectory, data_folder, read_trajectories, write_trajectories
from treering.errors import InputError
from treering.report.run_data import read_run
from treering.train.loop.checkpoint import StepReport
from treering.train.loop.sft_loop import SftLoop

WEIGHTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "full": {"optim": {"learning_rate": 1e-4}},
    "lora": {"lora": {"rank": 16}, "optim": {"learning_rate": 1e-3}},
}
"""Settings by what is trained."""
LAYOUTS = {"treering": "tree", "plain": "packed"}
CUT = {"system": 800, "tool": 100}
"""Characters that are kept of messages, by role: schemas of tools and their results take most of the context."""
MAX_CHARACTERS = 4_000
"""Length of a task's longest trajectory, so that all runs together take minutes; raise it with time at hand."""
NUM_EPOCHS = 2
NUM_CHATS, MAX_TURN_TOKENS = 3, 96
SERVED = "served"


def recorded_agents() -> list[Trajectory]:
    """ToolBench's searches by depth, in the folder of real data.

    Raises:
        InputError: there is no such folder.
    """
    folder = data_folder()
    if folder is None:
        raise InputError(f"the part sft needs real trajectories: set {DATA_VARIABLE} to a folder that has them")
    return list(read_trajectories(folder / "bench" / "toolbench_dfsdt.jsonl.gz"))


def split(trajectories: Sequence[Trajectory]) -> tuple[list[Trajectory], list[Trajectory]]:
    """Trained and held-out trajectories: those of tasks with several, and of tasks with one, which share nothing.

    Messages are cut to `CUT`; tasks with a trajectory that is still longer than `MAX_CHARACTERS` are left out.
    """
    trained, held = list[Trajectory](), list[Trajectory]()
    for _, found in groupby(sorted(map(_cut, trajectories), key=_task), key=_task):
        task = list(found)
        if max(map(_num_characters, task)) <= MAX_CHARACTERS:
            (trained if len(task) > 1 else held).extend(task)
    return trained, held


def _task(trajectory: Trajectory) -> str:
    return str(trajectory.task_id)


def _num_characters(trajectory: Trajectory) -> int:
    texts = [message.content or "" for message in trajectory.messages or ()]
    calls = [str(call.arguments) for message in trajectory.messages or () for call in message.tool_calls]
    return sum(map(len, texts + calls))


def _cut(trajectory: Trajectory) -> Trajectory:
    messages = [
        replace(message, content=(message.content or "")[: CUT[message.role]]) if message.role in CUT else message
        for message in trajectory.messages or ()
    ]
    return replace(trajectory, messages=tuple(messages))


def measure_sft(
    folder: Path, model: Path, trajectories: Sequence[Trajectory], weights: str, *, on_progress: OnProgress
) -> dict[str, Any]:
    """Training by both layouts from one start, and turns of the checkpoint of the tree."""
    folder.mkdir(parents=True, exist_ok=True)
    trained, held = split(trajectories)
    write_trajectories(folder / "trained.jsonl", trained)
    write_trajectories(folder / "held_out.jsonl", held)
    sides = {}
    for side, layout in LAYOUTS.items():
        on_progress(f"sft: {weights}, {layout}")
        sides[side] = trained_run(folder / f"{weights}-{layout}", folder, model, layout, WEIGHTS[weights])
    checkpoints = {side: Path(found.pop("checkpoint")) for side, found in sides.items()}
    on_progress(f"sft: {weights}, turns of the checkpoint")
    plain, tree = sides["plain"], sides["treering"]
    return {
        "num_trajectories": len(trained),
        "num_held_out": len(held),
        "sides": sides,
        "loss_difference": max(abs(a - b) / abs(a) for a, b in zip(plain["losses"], tree["losses"], strict=True)),
        "token_ratio": tree["flat_tokens"] / tree["computed_tokens"],
        "processor_ratio": plain["processor_s"] / tree["processor_s"],
        "turns": turns(checkpoints["treering"], model, contexts(folder / "held_out.jsonl")),
    }


def trained_run(
    run: Path, data: Path, model: Path, layout: str, own: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """A run of `treering sft`: losses by step, held-out losses, tokens and the processor seconds of its steps."""
    sections: dict[str, Mapping[str, Any]] = {
        "model": {"path": str(model.absolute())},
        # The model's own template has no form for calls.
        "data": {"files": ["trained.jsonl"], "template": "plain"},
        "eval": {"files": ["held_out.jsonl"]},
        "train": {"num_epochs": NUM_EPOCHS, "trees_per_step": 1, "layout": layout},
        **own,
        "run": {"dir": str(run.absolute()), "save_every": 1000, "keep": 1},
    }
    file = data / f"{run.name}.toml"
    file.write_text("".join(section(key, [pair(*each) for each in sections[key].items()]) for key in sections))
    with processor_time() as seconds:
        summary, _ = train(load(SftConfig, file), config_dir=data, console=PlainConsole(quiet=True))
    rows = read_run(run).rows
    return {
        "losses": [row[metrics.LOSS] for row in rows if metrics.LOSS in row],
        "held_out_loss": [row[metrics.EVAL_LOSS] for row in rows if metrics.EVAL_LOSS in row],
        "flat_tokens": summary["flat_tokens"],
        "computed_tokens": summary["unique_tokens"],
        "processor_s": sum(seconds),
        "checkpoint": summary["checkpoint"],
    }


@contextmanager
def processor_time() -> Iterator[list[float]]:
    """Processor seconds of each step of an `SftLoop` that runs inside."""
    step, seconds = SftLoop.step, list[float]()

    def timed(loop: SftLoop) -> StepReport:
        started = time.process_time()
        report = step(loop)
        seconds.append(time.process_time() - started)
        return report

    with patch.object(SftLoop, "step", timed):
        yield seconds


def contexts(file: Path) -> list[list[dict[str, Any]]]:
    """Messages before turns of a file's trajectories, as OpenAI's clients send them: `NUM_CHATS`, evenly spread."""
    found = {}
    for trajectory in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        chat = [_openai(message) for message in trajectory["messages"]]
        for end in (i for i, message in enumerate(chat) if message["role"] == "assistant"):
            found[json.dumps(chat[:end])] = chat[:end]
    chats = list(found.values())
    return chats[:: max(1, len(chats) // NUM_CHATS)][:NUM_CHATS]


def _openai(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        {"id": f"call{i}", "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for i, call in enumerate(message.get("tool_calls") or ())
    ]
    named = {"role": message["role"], "content": message.get("content")}
    return named | ({"tool_calls": calls} if calls else {})


def turns(checkpoint: Path, base: Path, chats: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Greedy next turns by stock transformers and by `treering serve`, and how they end."""
    served = _served(checkpoint, chats)
    ids = [choice["token_ids"] for choice in served]
    stock = _generated(checkpoint, base, chats)
    texts = [choice["message"]["content"] or "" for choice in served]
    return {
        "num_equal": sum(a == b for a, b in zip(ids, stock, strict=True)),
        "num_chats": len(chats),
        "finish_reasons": {
            reason: sum(choice["finish_reason"] == reason for choice in served) for reason in ("stop", "length")
        },
        "num_ended_stock": sum(len(each) < MAX_TURN_TOKENS for each in stock),
        "mean_tokens": mean(map(len, ids)),
        "num_calls": sum('{"name":' in text for text in texts),
        "texts": texts[:2],
    }


def _served(checkpoint: Path, chats: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    options = ServeOptions(name=str(checkpoint), served_name=SERVED, port=0, max_tokens=16384, device="cpu")
    found = []
    with opened(options) as server:
        for chat in chats:
            asked = {"model": SERVED, "messages": chat, "temperature": 0, "return_token_ids": True}
            body = json.dumps(asked | {"max_tokens": MAX_TURN_TOKENS}).encode()
            headers = {"Content-Type": "application/json"}
            with urlopen(Request(f"{server.url}/v1/chat/completions", body, headers)) as answer:
                found.append(json.load(answer)["choices"][0])
    return found


def _generated(checkpoint: Path, base: Path, chats: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[int]]:
    """As the checkpoint's model card says."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    if (checkpoint / "adapter_config.json").is_file():
        from peft import PeftModel

        model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), checkpoint)
        model.generation_config = GenerationConfig.from_pretrained(checkpoint)
    else:
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
    found = []
    for chat in chats:
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.inference_mode():
            tokens = model.generate(**inputs, max_new_tokens=MAX_TURN_TOKENS, do_sample=False)
        found.append(tokens[0, inputs["input_ids"].shape[1] :].tolist())
    return found
