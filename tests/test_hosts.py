"""The promised versions: what `make hosts` reports about a resolver's answers, and where each minimum is set."""

import re
import tomllib
from pathlib import Path

import pytest
from tools.hosts import Host, Resolved, as_table, judge, read_hosts

ROOT = Path(__file__).parents[1]
NAMES = {"trl", "vllm", "verl", "sglang", "skyrl", "verifiers", "tinker", "unsloth", "axolotl", "ms-swift", "openrlhf"}


def resolves(requirement: str) -> Resolved:
    return Resolved(versions={"vllm": "0.34.0", "torch": "2.14.0", "transformers": "5.20.2"})


def conflicts(requirement: str) -> Resolved:
    return Resolved(versions={}, error=f"no solution for {requirement}")


@pytest.mark.parametrize(
    ("conflict", "resolve", "result", "is_expected"),
    [
        (None, resolves, "resolves", True),
        (None, conflicts, "CONFLICT", False),
        ("pins torch", conflicts, "known conflict: pins torch", True),
        ("pins torch", resolves, "resolves, but is listed as a conflict", False),
    ],
)
def test_a_host_is_as_expected_only_if_the_table_lists_it(
    conflict: str | None, resolve: object, result: str, is_expected: bool
) -> None:
    row = judge(Host(name="vllm[x]", version="0.33.0", conflict=conflict), resolve)  # type: ignore[arg-type]
    assert (row.cells[-1], row.is_expected) == (result, is_expected)
    assert row.cells[:2] == ("vllm[x]", "0.33.0")
    assert row.error == ("" if is_expected or resolve is resolves else "no solution for vllm[x]==0.33.0")


def test_the_newest_release_is_asked_for_by_itself_and_without_extras() -> None:
    asked: list[str] = []

    def resolve(requirement: str) -> Resolved:
        asked.append(requirement)
        return resolves(requirement)

    assert judge(Host(name="vllm[x]", version="0.33.0"), resolve, newest=True).cells[1] == "0.34.0"
    assert asked == ["only vllm", "vllm[x]==0.34.0"]


def test_the_table_names_every_host_with_a_version_and_conflicts_with_a_reason() -> None:
    hosts, _ = read_hosts()
    assert {host.name.partition("[")[0] for host in hosts} == NAMES
    assert all(re.fullmatch(r"[\d.]+(post\d+)?", host.version) for host in hosts)
    assert all(host.conflict is None or len(host.conflict) > 20 for host in hosts)


def test_the_documented_table_has_the_hosts_of_the_tested_one() -> None:
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    for host in read_hosts()[0]:
        assert f"| {host.name} | {host.version} |" in page
    header = as_table([]).splitlines()[0]
    assert header in page


def test_oldest_versions_are_the_floors_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    required = [
        *project["dependencies"],
        *extras["train"],
        *extras["datasets"],
        *extras["peft"],
        *extras["tensorboard"],
    ]
    floors = dict(re.fullmatch(r"([\w-]+)>=([\d.]+)(?:,<\d+)?", line).groups() for line in required)  # type: ignore[union-attr]
    pins = dict(line.split("==") for line in lines_of("constraints-oldest.txt"))
    padded = {name: f"{floor}.0.0" for name, floor in floors.items()}
    assert {name: pin for name, pin in pins.items() if name in floors} == {
        name: ".".join(padded[name].split(".")[: len(pins[name].split("."))]) for name in floors
    }


def test_every_tool_is_pinned_alike_in_all_files() -> None:
    newest = dict(line.split("==") for line in lines_of("constraints.txt"))
    oldest = dict(line.split("==") for line in lines_of("constraints-oldest.txt"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tools = dict(line.split("==") for line in project["optional-dependencies"]["dev"] if re.match(r"[\w-]+==", line))
    assert {name: newest[name.replace("pre-commit", "pre_commit")] for name in tools} == tools
    assert {name: pin for name, pin in oldest.items() if name in tools} == {
        name: tools[name] for name in oldest if name in tools
    }


def lines_of(file: str) -> list[str]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]
