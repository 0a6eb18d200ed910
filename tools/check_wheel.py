"""Installs the wheel of a folder into a clean environment, and runs the commands from it: `make dist`.

Nothing of the checkout is on the path: they run in their own folder, without PYTHONPATH.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = """
[model]
hidden_size = 16
num_layers = 1
device = "cpu"
"""
SFT = f"""{MODEL}
[data]
files = ["data.jsonl"]
[train]
num_steps = 2
trees_per_step = 2
[run]
dir = "sft"
"""
TRAIN = f"""{MODEL}
[task]
max_prompts = 2
[sampling]
max_tokens = 8
[rl]
num_steps = 2
prompts_per_step = 2
group_size = 2
[run]
dir = "train"
"""


def main() -> None:
    """Checks the wheel and the sdist; raises where one of them lacks something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with one wheel and one sdist")
    folder = parser.parse_args().folder.resolve()
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        python = install(wheel, work / "venv")
        write_inputs(work)
        home = run([str(python), "-I", "-c", "import treering; print(treering.__file__)"], work).strip()
        if not Path(home).is_relative_to(work):
            raise SystemExit(f"the commands must come from the wheel, and treering is {home}")
        commands = (
            ["--version"],
            ["inspect", "data.jsonl", "--json"],
            ["sft", "sft.toml", "--json"],
            ["train", "train.toml", "--json"],
            ["report", "train"],
            ["doctor", "train", "--json"],
        )
        for command in commands:
            out = run([str(python.with_name("treering")), *command], work)
            if "--json" in command:
                json.loads(out)
            print("treering", *command, "- right", flush=True)
        for file in ("sft/checkpoints/step-000002/model.safetensors", "train/report.html"):
            if not (work / file).is_file():
                raise SystemExit(f"the commands must write {file}, and did not")
    print(f"{wheel.name} and {sdist.name} are right")


def install(wheel: Path, environment: Path) -> Path:
    """Makes an environment with the wheel and what its commands need; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = environment / "bin" / "python"
    options = ["--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([python, "-m", "pip", "install", *options, f"{wheel}[train,datasets]"], check=True)
    return python


def write_inputs(work: Path) -> None:
    """Writes data of two tasks, and the configurations."""
    lines = [{"task_id": f"t{i // 2}", "tokens": [1, 2, 3, 4 + i], "loss_mask": [0, 0, 1, 1]} for i in range(4)]
    (work / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (work / "sft.toml").write_text(SFT)
    (work / "train.toml").write_text(TRAIN)


def run(call: list[str], work: Path) -> str:
    """The standard output of a call in the folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(call, cwd=work, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(call)} failed with {done.returncode}:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
