"""The doctor tells tested releases from others, and threads that wait for each other."""

from importlib import metadata

import pytest

from treering.cli.doctor import installation
from treering.cli.doctor.installation import Machine, find_packages


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

    monkeypatch.setattr(installation, "requires", lambda _name: lines)
    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.usefixtures("required")
def test_each_requirement_stands_beside_what_is_installed() -> None:
    found = {package.name: package for package in find_packages()}
    assert (found["numpy"].installed, found["numpy"].is_supported) == ("2.4.6", True)
    assert (found["torch"].needed, found["torch"].is_supported) == (">=2.11", False)
    assert (found["ray"].needed, found["ray"].installed, found["ray"].is_host) == ("<3,>=2.5", None, True)
    assert "ruff" not in found
    assert found["treering"].installed is None
    assert found["vllm"].is_supported is None


@pytest.mark.parametrize(("installed", "is_supported"), [("2.12.0rc1", True), ("2.11.0+cpu", True), ("2.10.1", False)])
def test_candidates_and_local_builds_count_as_their_release(
    installed: str, is_supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "requires", lambda _name: ["torch>=2.11"])
    monkeypatch.setattr(metadata, "version", lambda _name: installed)
    found = {package.name: package for package in find_packages()}
    assert found["torch"].is_supported is is_supported


@pytest.mark.parametrize(
    ("num_threads", "policy", "advice"),
    [(2, "PASSIVE", []), (4, "passive", ["OMP_NUM_THREADS=2"]), (2, "", ["OMP_WAIT_POLICY=PASSIVE"])],
)
def test_threads_that_slow_each_other_down_are_named(num_threads: int, policy: str, advice: list[str]) -> None:
    settings = {"OMP_WAIT_POLICY": policy} if policy else {}
    machine = Machine(
        system="Linux", num_cores=2, num_threads=num_threads, settings=settings, free_bytes=None, devices={}
    )
    assert len(machine.advice) == len(advice)
    assert all(fix in text for fix, text in zip(advice, machine.advice, strict=True))
