"""The command line: what reaches each subcommand, and how a process ends."""

import os
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cli.runs import call
from tests.killing import ROOT
from treering.cli.commands import app
from treering.cli.inspect.inspect_options import InspectOptions
from treering.cli.main import main
from treering.cli.simulate import SimulateOptions
from treering.errors import ConfigError, DataWarning, InputError, StateError, UnsupportedError

MODULES = {
    **{"demo": "demo", "inspect": "inspect.run_inspect", "report": "report"},
    **{"simulate": "simulation", "sft": "run_training", "train": "run_training"},
}
SUBCOMMANDS = [each.name or each.callback.__name__ for each in app.registered_commands]


def replace(monkeypatch: pytest.MonkeyPatch, name: str, run: Callable[..., None]) -> None:
    """Replace a subcommand's module by one with this `run`, so that no work is done."""
    module_name = f"treering.cli.{MODULES[name]}"
    module = ModuleType(module_name)
    setattr(module, f"run_{name}" if MODULES[name] == "run_training" else "run", run)
    monkeypatch.setitem(sys.modules, module_name, module)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("inspect a.jsonl b.jsonl.gz", InspectOptions(files=[Path("a.jsonl"), Path("b.jsonl.gz")])),
        (
            "inspect a --tokenizer t --model-shape llama3-8b --template hf --json --no-cache --format=sharegpt --more",
            InspectOptions(
                files=[Path("a")], tokenizer="t", model_shape="llama3-8b", template="hf", json_output=True,
                no_cache=True, format="sharegpt", more=True,
            ),
        ),
        ("sft c.toml --json", {"config_path": Path("c.toml"), "overrides": []}),
        ("train c.toml rl.group_size=3 run.dir=x --json", {"overrides": ["rl.group_size=3", "run.dir=x"]}),
        (
            "report a b --open --refresh --out p.html --rollouts r.parquet --json",
            {"folders": [Path("a"), Path("b")], "out": Path("p.html"), "open_page": True}
            | {"refresh": True, "rollouts": Path("r.parquet")},
        ),
        ("demo --out o --seed 3 --json", {"out": Path("o"), "seed": 3}),
        ("simulate", SimulateOptions()),
        (
            "simulate log --json --workers 3 --slots 4 --rollouts 5 --steps 6 "
            "--staleness 2 --seeds 7 --lengths lognormal:8,0 --noise 0.9 "
            "--decode 1,2 --training 0.3 --prefill 0.4 --load 0.5",
            SimulateOptions(
                file=Path("log"), json_output=True, num_workers=3, num_slots=4,
                num_rollouts=5, num_steps=6, staleness=2, num_seeds=7, lengths="lognormal:8,0", noise=0.9,
                decode="1,2", training=0.3, prefill_ms=0.4, load_s=0.5,
            ),
        ),
    ],
)  # fmt: skip
def test_a_subcommand_gets_its_arguments_by_name(monkeypatch: pytest.MonkeyPatch, line: str, expected: Any) -> None:
    got: list[Any] = []
    words = shlex.split(line)
    replace(monkeypatch, words[0], lambda *options, **given: got.extend([*options, given]))
    assert call(monkeypatch, *words) == 0
    if isinstance(expected, dict):
        expected |= {"json_output": True}
        got[0] = {name: got[0][name] for name in expected}
    assert got[0] == expected


@pytest.mark.parametrize("error", [ConfigError, InputError, StateError, UnsupportedError])
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type[Exception]
) -> None:
    def run(**_: object) -> None:
        raise error("the rule,\n  the value; the fix")

    replace(monkeypatch, "demo", run)
    assert call(monkeypatch, "demo", "--json") == 2
    assert capsys.readouterr() == ("", "treering: the rule, the value; the fix\n")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["inspect"], "Missing argument 'FILES...'"),
        (["sft"], "Missing argument"),
        (["train"], "Missing argument 'CONFIG'"),
        (["demo", "--sed", "3"], "No such option: --sed"),
        (["demo", "--seed", "-1"], "Invalid value for '--seed'"),
        (["bench", "engine"], "No such command 'bench'"),
        (["inspekt"], "inspekt"),
        (["simulate", "--workers", "0"], "Invalid value for '--workers'"),
        (["inspect", "a", "--template", "none"], "'none' is not one of"),
        (["serve", "model", "--device", "cdua"], "'cdua' is not one of"),
        (["serve", "model", "--dtype", "int8"], "'int8' is not one of"),
    ],
)
def test_a_mistyped_call_is_one_line_on_stderr_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    assert call(monkeypatch, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("treering: ")
    assert err.count("\n") == 1
    assert part in err


def test_ctrl_c_ends_with_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(**_: object) -> None:
        raise KeyboardInterrupt

    replace(monkeypatch, "demo", run)
    assert call(monkeypatch, "demo") == 130


def test_an_unexpected_exception_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(**_: object) -> None:
        raise ZeroDivisionError("a bug")

    replace(monkeypatch, "demo", run)
    monkeypatch.setattr(sys, "argv", ["treering", "demo"])
    with pytest.raises(ZeroDivisionError, match="a bug"):
        main()


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_of_a_subcommand_shows_an_example_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert call(monkeypatch, name, "--help") == 0
    out = capsys.readouterr().out
    assert f"Example: treering {name}" in out
    # TRL decides what `trl` prints, and `serve` prints an address.
    assert ("--json" in out) == (name not in ("trl", "serve"))


def test_version_is_the_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import treering

    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"treering {treering.__version__}\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "PASSIVE 30000"),
        ({"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "INFINITY"}, "ACTIVE INFINITY"),
    ],
)
def test_waiting_threads_spin_briefly_unless_the_user_sets_otherwise(before: dict[str, str], after: str) -> None:
    code = (
        "import os, sys\n"
        "from treering.cli.main import main\n"
        "sys.argv = ['treering', '--version']\n"
        "names = 'OMP_WAIT_POLICY', 'GOMP_SPINCOUNT'\n"
        "try: main()\n"
        "except SystemExit: print(*(os.environ[name] for name in names), 'torch' in sys.modules)\n"
    )
    kept = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    environment = kept | before
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=500
    )
    assert done.stdout.splitlines()[-1] == f"{after} False"


@pytest.mark.parametrize("line", ["cache", "cache --json"])
def test_a_result_that_nobody_takes_ends_the_command_without_a_traceback(tmp_path: Path, line: str) -> None:
    def ended(stdout: int) -> tuple[int, str]:
        command = [sys.executable, "-m", "treering", *line.split()]
        given = os.environ | {"TREERING_CACHE": str(tmp_path)}
        done = subprocess.run(command, env=given, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
        os.close(stdout)
        return done.returncode, done.stderr

    reader, writer = os.pipe()
    os.close(reader)
    assert ended(writer) == (1, "")
    code, said = ended(os.open("/dev/full", os.O_WRONLY))
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith("treering: the result cannot be written (No space left on device); free space")


def test_notes_about_data_are_one_line_each_on_stderr_and_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: object) -> None:
        for text in ("a.jsonl: one\nnote", "a.jsonl: one note", "b.jsonl: another"):
            warnings.warn(text, DataWarning, stacklevel=1)
        print("{}")

    replace(monkeypatch, "inspect", run)
    assert call(monkeypatch, "inspect", "a.jsonl", "--json") == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("{}\n", "treering: note: a.jsonl: one note\ntreering: note: b.jsonl: another\n")


# Torch could start while the command line is imported.
PROGRAM = """
import os, sys, types

command_line = types.ModuleType("treering.cli.main")
command_line.main = lambda: print("torch" in sys.modules, *sorted(
    f"{name}={value}" for name, value in os.environ.items() if name.endswith("ALLOC_CONF")))
sys.modules["treering.cli.main"] = command_line
from treering.cli.start import main
main()
"""


@pytest.mark.parametrize("name", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_the_allocator_has_growing_segments_before_torch_starts_unless_the_user_sets_it(name: str | None) -> None:
    own = {} if name is None else {name: "max_split_size_mb:64"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": str(ROOT / "src"), **own},
        capture_output=True,
        text=True,
        check=True,
    )
    wanted = own or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert done.stdout.split() == ["False", *(f"{key}={value}" for key, value in wanted.items())]
