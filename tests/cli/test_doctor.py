"""The doctor recognises tested releases, finds damaged files of a run, and compares engine and trainer."""

import json
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.cli.train.test_command import prompts
from treering import extras
from treering.cli.doctor import EXIT_FAULT, doctor, find_packages, thread_advice
from treering.cli.doctor_run import check_run, measure_mismatch
from treering.cli.run_training import run_train
from treering.errors import InputError, MissingExtraError


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of four steps, with checkpoints of steps 3 and 4."""
    return _train(tmp_path_factory.mktemp("doctor"))


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run to damage."""
    return shutil.copytree(finished, tmp_path / "run")


def _train(folder: Path, *overrides: str) -> Path:
    run = [f"run.dir={folder / 'run'}", "run.save_every=1", "run.keep=2", *overrides]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREERING_DATA", str(folder))
        patch.setitem(sys.modules, "tests_rewards", sys.modules[prompts.__module__])
        run_train(config_path=prompts(folder), overrides=run, json_output=True)
    return folder / "run"


def damaged_files(folder: Path) -> list[str]:
    return [file["name"] for file in check_run(folder)["files"] if file["damage"] is not None]


def test_a_finished_run_is_whole(folder: Path) -> None:
    found = check_run(folder)
    assert damaged_files(folder) == []
    assert found["resume"] == "it resumes after step 4, from step-000004"
    assert found["checkpoints"] == ["step-000004", "step-000003"]
    words = {file["name"]: file["words"] for file in found["files"]}
    assert words["metrics.jsonl"] == "4 lines of steps 1 to 4"
    assert words["checkpoints/step-000003"] == "step 3, checksums match"


def test_checking_changes_no_byte(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    check_run(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("file", "resume"),
    [
        ("checkpoints/step-000004/model.safetensors", "step 3, from step-000003; steps 4 to 4 are trained again"),
        ("checkpoints/step-000003/training_state.pt", "step 4, from step-000004"),
        ("metrics.jsonl", "step 4"),
        ("rollouts/epoch-000.jsonl", "step 4"),
        ("history/step-000004", "step 4"),
        ("config.json", "step 4"),
    ],
)
def test_a_damaged_file_is_found(file: str, resume: str, folder: Path) -> None:
    path = folder / file
    content = bytearray(path.read_bytes())
    # Within the first line of a log, and within the tensors of a checkpoint.
    middle = 3 if file.endswith(("jsonl", "json")) else len(content) // 2
    content[middle] ^= 0xFF
    path.write_bytes(bytes(content))
    expected = "/".join(Path(file).parts[:2]) if file.startswith("checkpoints") else file
    assert damaged_files(folder) == [expected]
    assert f"resumes after {resume}" in check_run(folder)["resume"]


def test_without_a_whole_checkpoint_it_does_not_start(folder: Path) -> None:
    for checkpoint in (folder / "checkpoints").iterdir():
        (checkpoint / "model.safetensors").write_bytes(b"")
    assert check_run(folder)["resume"].startswith("it does not start: every checkpoint is damaged")


def test_a_run_without_checkpoints_begins_again(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")
    assert (
        check_run(folder)["resume"]
        == "it begins with step 1, because there is no checkpoint; steps 1 to 4 are trained again"
    )


def test_files_left_by_a_kill_are_not_damaged(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    words = {file["name"]: file["words"] for file in check_run(folder)["files"]}
    assert damaged_files(folder) == []
    assert words["metrics.jsonl"].endswith(", and an unfinished one")


def test_a_checkpoint_of_another_run_is_found(folder: Path) -> None:
    identity = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**identity, "rl.seed": 77}))
    assert damaged_files(folder) == ["checkpoints/step-000004", "checkpoints/step-000003"]


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"neither run\.json nor checkpoints/"):
        check_run(tmp_path)


def test_the_mismatch_is_rounding_where_engine_and_trainer_agree(folder: Path) -> None:
    found = measure_mismatch(folder, check_run(folder)["checkpoints"])
    # The weights after step 3 sampled step 4: 2 prompts x 3 rollouts. Logs hold float64 log-probs of float32 sums over
    # 8 numbers.
    assert (found["checkpoint"], found["num_rollouts"]) == ("step-000003", 6)
    assert found["mean"] <= found["largest"] < 1e-5


def test_other_weights_are_seen_in_the_mismatch(folder: Path) -> None:
    newest, older = check_run(folder)["checkpoints"]
    weights = folder / "checkpoints" / newest / "model.safetensors"
    shutil.copyfile(weights, folder / "checkpoints" / older / "model.safetensors")
    assert measure_mismatch(folder, [older])["mean"] > 1e-3


def test_a_model_that_takes_images_leaves_nothing_to_compare(folder: Path) -> None:
    checkpoints = check_run(folder)["checkpoints"]
    for checkpoint in checkpoints:
        (folder / "checkpoints" / checkpoint / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    found = measure_mismatch(folder, checkpoints)
    words = "not measured: the trainer computes stored rollouts as text, but the checkpoint needs"
    assert found["words"].startswith(words)


def test_truncated_log_probs_are_not_compared(tmp_path: Path) -> None:
    folder = _train(tmp_path, "sampling.top_p=0.5", "rl.num_steps=2")
    found = measure_mismatch(folder, check_run(folder)["checkpoints"])
    assert found["words"] == "not measured: the log-probs of rollouts include top_p, but a trainer's do not"


@pytest.mark.parametrize("content", ["{", "[]", '{"sampling": {"temperature": 1.0}}', '{"sampling": 1, "model": {}}'])
def test_damaged_settings_leave_nothing_to_compare(content: str, folder: Path) -> None:
    (folder / "config.json").write_text(content)
    found = measure_mismatch(folder, check_run(folder)["checkpoints"])
    assert found["words"].startswith("not measured: config.json lacks the sampling settings of the rollouts")


def test_a_run_is_not_passed_over_where_torch_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="treering doctor RUN needs torch"):
        doctor(folder, json_output=True)


def test_the_command_exits_with_1_if_a_file_is_damaged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(folder, json_output=True) == 0
    whole: dict[str, Any] = json.loads(capsys.readouterr().out)
    verdicts = {backend["backend"]: backend["has_passed"] for backend in whole["backends"]}
    # The tests run triton's kernels in its interpreter.
    assert verdicts.pop("triton") in (True, None)
    assert verdicts == {"segments": True, "flex": True, "flash": None}
    assert whole["mismatch"]["checkpoint"] == "step-000003"
    (folder / "checkpoints" / "step-000004" / "model.safetensors").write_bytes(b"")
    assert doctor(folder, json_output=False) == EXIT_FAULT
    assert "damaged" in capsys.readouterr().out


@pytest.fixture
def required(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "numpy>=2",
        'torch>=2.11; extra == "train"',
        'ray[default]<3,>=2.5; extra == "ray"',
        'treering[train]; extra == "dev"',
        'ruff==0.17.5; extra == "dev"',
    ]
    versions = {"numpy": "2.4.6", "torch": "2.9.1"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "requires", lambda _name: lines)
    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.usefixtures("required")
def test_each_requirement_is_listed_with_the_installed_release() -> None:
    found = {package["name"]: package for package in find_packages()}
    assert (found["numpy"]["installed"], found["numpy"]["is_supported"]) == ("2.4.6", True)
    assert (found["torch"]["needed"], found["torch"]["is_supported"]) == (">=2.11", False)
    assert (found["ray"]["needed"], found["ray"]["installed"]) == ("<3,>=2.5", None)
    assert "ruff" not in found
    assert found["treering"]["installed"] is None
    assert found["vllm"]["is_supported"] is None


@pytest.mark.parametrize(("installed", "is_supported"), [("2.12.0rc1", True), ("2.11.0+cpu", True), ("2.10.1", False)])
def test_candidates_and_local_builds_count_as_their_release(
    installed: str, is_supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "requires", lambda _name: ["torch>=2.11"])
    monkeypatch.setattr(metadata, "version", lambda _name: installed)
    found = {package["name"]: package for package in find_packages()}
    assert found["torch"]["is_supported"] is is_supported


@pytest.mark.parametrize(
    ("num_threads", "policy", "advice"),
    [(2, "PASSIVE", []), (4, "passive", ["OMP_NUM_THREADS=2"]), (2, "", ["OMP_WAIT_POLICY=PASSIVE"])],
)
def test_threads_that_slow_each_other_down_are_named(num_threads: int, policy: str, advice: list[str]) -> None:
    settings = {"OMP_WAIT_POLICY": policy} if policy else {}
    found = thread_advice(2, num_threads, settings)
    assert len(found) == len(advice)
    assert all(fix in text for fix, text in zip(advice, found, strict=True))
