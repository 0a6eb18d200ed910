"""Files of a run as data: its settings, rows of metrics, starts, and figures by epoch."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from treering import metrics
from treering.errors import InputError
from treering.files.lock import is_locked
from treering.files.step_lines import read_rows, spans
from treering.files.writing import check_regular, write_text
from treering.metrics import METRICS_FILE

CONFIG_FILE = "config.json"
LOCK_FILE = "run.lock"
DEMO_FILE = "demo.json"
Side = Literal["plain", "treering"]
SIDES: tuple[Side, Side] = ("plain", "treering")
"""Runs in a demo's folder, ours last."""

Row = Mapping[str, Any]
"""A line of metrics.jsonl: "step", and numbers by the names of `treering.metrics`, or "nan", "inf", "-inf"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """Data that a run has written so far.

    Attributes:
        name: name of the run on its page.
        folder: folder of the run.
        rows: one row per step, ascending; the later row if a step has two.
        config: the settings of `config.json`; empty if it is missing or damaged.
        notes: sentences on missing data.
    """

    name: str
    folder: Path
    rows: tuple[Row, ...]
    config: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def num_total(self) -> int | None:
        """Number of steps that the settings amount to; None without settings."""
        count = self.config.get("num_steps")
        return count if isinstance(count, int) else None

    @property
    def is_supervised(self) -> bool:
        """Whether the run trains on given trajectories and samples no rollouts."""
        # Step 0 only has an evaluation.
        steps = [row for row in self.rows if row["step"] > 0]
        return "train" in self.config or (bool(steps) and metrics.NUM_SAMPLED not in steps[-1])

    @property
    def runs_episodes(self) -> bool:
        """Whether the rollouts are runs of an environment, with one or several branches each."""
        return section_of(self.config, "task").get("kind") in ("environment", "verifiers")


def read_runs(folder: Path) -> tuple[RunData, ...]:
    """Read the run of a folder, or both runs of a demo's folder, ours last.

    Raises:
        InputError: the folder is missing, or holds no run.

    Example: `read_runs(Path("runs/demo"))` gives the runs "plain" and "treering".
    """
    if not folder.is_dir():
        raise InputError(
            f"treering report needs the folder of a run, got {folder}, which is not a folder; name a run.dir"
        )
    found = [folder / side for side in SIDES if _is_run(folder / side)]
    if _is_run(folder) or not found:
        if not _is_run(folder):
            raise InputError(
                f"treering report needs the folder of a run with {METRICS_FILE} or {CONFIG_FILE}, and {folder} "
                "has neither; name the run.dir of a run, or a demo's folder"
            )
        found = [folder]
    return tuple(read_run(each) for each in found)


def read_run(folder: Path) -> RunData:
    """Read the folder of one run; unreadable data gives a note.

    Example: a run that was killed while it wrote its ninth row has the rows 1 to 8 and the note "metrics.jsonl has 1
    line that cannot be read".
    """
    notes: list[str] = []
    rows = _rows(folder / METRICS_FILE, notes)
    config = _object(folder / CONFIG_FILE, notes)
    return RunData(name=folder.resolve().name, folder=folder, rows=rows, config=config, notes=tuple(notes))


def read_demo(folder: Path) -> Mapping[str, Any]:
    """Return the comparison that `treering demo` writes when it ends; empty before that, and for other folders."""
    return _object(folder / DEMO_FILE, []) if (folder / DEMO_FILE).is_file() else {}


def is_training(folder: Path) -> bool:
    """Return whether a process of this machine trains in a run's folder, or in one of a demo's."""
    return any(is_locked(each / LOCK_FILE) for each in (folder, *(folder / side for side in SIDES)))


def number(value: object) -> float | None:
    """Return a metric as a finite number; None for a missing, infinite or non-numeric one.

    Example: 2 and 2.0 give 2.0, and "nan" gives None.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (METRICS_FILE, CONFIG_FILE))


def _rows(file: Path, notes: list[str]) -> tuple[Row, ...]:
    if not file.is_file():
        notes.append(f'{file.name} is missing: no step is done yet, or the sink "jsonl" is off.')
        return ()
    check_regular(file)
    # Count first, because a training run may add lines meanwhile, and these are not damaged.
    with file.open("rb") as lines:
        num_lines = sum(1 for _ in lines)
    found = list(read_rows(file))
    num_bad = max(0, num_lines - len(found))
    rows = {row["step"]: row for row in found}
    if num_bad:
        notes.append(f"{file.name} has {num_bad} line{'s' * (num_bad > 1)} that cannot be read.")
    missing = set(range(1, max(rows, default=0) + 1)) - rows.keys()
    if missing:
        notes.append(f"{file.name} lacks step{'s' * (len(missing) > 1)} {spans(missing)}.")
    if not rows:
        notes.append("No step is done yet.")
    return tuple(rows[step] for step in sorted(rows))


def section_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a run's settings; empty if it is missing or not a section."""
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _object(file: Path, notes: list[str]) -> dict[str, Any]:
    try:
        check_regular(file)
        value = json.loads(file.read_bytes())
        if isinstance(value, dict):
            return value
        notes.append(f"{file.name} holds no JSON object, so the settings are unknown.")
    except FileNotFoundError:
        notes.append(f"{file.name} is missing, so the settings are unknown.")
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{file.name} cannot be read ({error}), so the settings are unknown.")
    return {}


def by_epoch(rows: Sequence[Row]) -> list[dict[str, float | None]]:
    """Return weighted means over the steps of each epoch; None if nothing was counted.

    Tokens per forward are tokens per row of a forward pass, acceptance is accepted per drafted token, sharing is
    1 - computed / flat tokens. Reward and length are means over rollouts.

    Example: steps with 300 tokens in 100 rows and 100 tokens in 100 rows have 2.0 tokens per forward in total.
    """
    epochs: dict[int, list[Row]] = {}
    for row in rows:
        epoch = number(row.get(metrics.EPOCH))
        if epoch is not None:
            epochs.setdefault(int(epoch), []).append(row)
    return [{"epoch": epoch, **figures(epochs[epoch])} for epoch in sorted(epochs)]


def figures(rows: Sequence[Row]) -> dict[str, float | None]:
    """Return the means of `by_epoch` over all given steps; None if nothing was counted.

    Example: without a row of sampled tokens "tokens_per_forward" is None.
    """
    sampled = _pairs(rows, metrics.NUM_SAMPLED, metrics.TOKENS_PER_FORWARD)
    drafted = _pairs(rows, metrics.NUM_DRAFTED, metrics.ACCEPTANCE)
    flat = total(rows, metrics.NUM_BRANCH_TOKENS)
    return {
        "tokens_per_forward": _ratio(sum(n for n, _ in sampled), sum(n / gain for n, gain in sampled if gain)),
        "acceptance": _ratio(sum(n * share for n, share in drafted), sum(n for n, _ in drafted)),
        "reward": _mean(rows, metrics.REWARD_MEAN),
        "length": _mean(rows, metrics.LENGTH_MEAN),
        "sharing": _ratio(flat - total(rows, metrics.NUM_TOKENS), flat),
        "token_bound": _ratio(flat, total(rows, metrics.NUM_TOKENS)),
    }


def held_out(rows: Sequence[Row]) -> dict[str, str]:
    """Return the first and the last evaluation, by metric.

    Example: {"held-out loss": "2.3170 after step 0, 2.1012 after step 40"}.
    """
    found = {}
    for name, words in eval_names(rows).items():
        values = [(row["step"], value) for row in rows if (value := number(row.get(name))) is not None]
        if values:
            (first, at_first), (last, at_last) = values[0], values[-1]
            found[f"held-out {words}"] = f"{at_first:.4f} after step {first}, {at_last:.4f} after step {last}"
    return found


def eval_names(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the scores that rows have of held-out data, and how they are shown: loss, reward, pass@1, pass@2 ..."""
    names = {name for row in rows for name in row}
    passes = sorted((name for name in names if metrics.EVAL_PASS_AT in name), key=lambda name: (len(name), name))
    scores = [name for name in (metrics.EVAL_LOSS, metrics.EVAL_REWARD) if name in names]
    return {name: name.removeprefix("eval/").replace("pass_at_", "pass@") for name in [*scores, *passes]}


def phase_seconds(row: Row) -> dict[str, float]:
    """Return the seconds of a step by phase; "other" is the rest of the step, 0 if phases overlap.

    Example: a step of 10 s with 6 s of rollout, 3 s of training and 0.5 s of update has 0.5 s of "other".
    """
    names = {"rollout": metrics.ROLLOUT_S, "training": metrics.TRAIN_S, "update": metrics.UPDATE_S}
    found = {phase: seconds for phase, name in names.items() if (seconds := number(row.get(name))) is not None}
    step_s = number(row.get(metrics.STEP_S))
    # A supervised step has no phases, so all of it is training.
    if step_s is None:
        return found
    return found | {"other": max(0.0, step_s - sum(found.values()))} if found else {"training": step_s}


def account(rows: Sequence[Row], *, has_branches: bool = False) -> dict[str, int]:
    """Return counts of the rollouts by outcome: trained, or dropped for one of four reasons.

    With `has_branches` they are runs of an environment. Metrics count trained branches but not trained runs, so trained
    runs and runs of equal rewards are then one count.

    Example: of 64 rollouts, 2 without a reward and 22 in groups of equal rewards, 40 are trained.
    """
    with_reward, trained = total(rows, metrics.NUM_ROLLOUTS), total(rows, metrics.NUM_BRANCHES)
    scored = {"trained": trained, "equal rewards in the group": with_reward - trained}
    counts = {
        **({"with a reward": with_reward} if has_branches else scored),
        "reward failed": total(rows, metrics.NUM_REWARD_ERRORS),
        "not scored": total(rows, metrics.NUM_UNSCORED),
        "empty": total(rows, metrics.NUM_EMPTY),
    }
    return {name: round(count) for name, count in counts.items()}


def faults(rows: Sequence[Row]) -> dict[str, int]:
    """Return counts of faults and moves over all steps; only those that the run counts."""
    names = {
        "rollouts at their maximum length": metrics.NUM_OVERLONG,
        "groups without a rollout": metrics.NUM_EMPTY_GROUPS,
        "rollouts sampled again after a worker died": metrics.NUM_RESAMPLED,
        "rollouts started on another worker than assigned": metrics.NUM_STOLEN,
        "moves of a running rollout": metrics.NUM_MOVED,
    }
    return {words: round(total(rows, name)) for words, name in names.items() if any(name in row for row in rows)}


def total(rows: Iterable[Row], name: str) -> float:
    """Return the sum of a metric over the rows that have it."""
    return sum(number(row.get(name)) or 0.0 for row in rows)


def _pairs(rows: Iterable[Row], first: str, second: str) -> list[tuple[float, float]]:
    found = [(number(row.get(first)), number(row.get(second))) for row in rows]
    return [(a, b) for a, b in found if a is not None and b is not None]


def _mean(rows: Iterable[Row], name: str) -> float | None:
    pairs = _pairs(rows, metrics.NUM_ROLLOUTS, name)
    return _ratio(sum(count * mean for count, mean in pairs), sum(count for count, _ in pairs))


def _ratio(over: float, under: float) -> float | None:
    return over / under if under else None


STARTS_FILE = "starts.jsonl"
"""A line for each start of a run: "step" (the last one before it), "time", "machine", "num_ranks", "parameters",
"versions"."""


def facts_of(run: RunData) -> dict[str, Any]:
    """Return the facts of a run: a table, its settings by dotted name, and the steps after which it was resumed.

    Example: a run that was killed in its seventh step and resumed after its fifth has "resumed" [5].
    """
    starts = [row for row in read_rows(run.folder / STARTS_FILE) if isinstance(row.get("step"), int)]
    return {
        "table": {**dict(_table(run.config, starts[-1] if starts else {})), **held_out(run.rows)},
        "settings": dict(_flat(run.config)),
        "resumed": sorted({start["step"] for start in starts} - {0}),
    }


def note_start(folder: Path, start: Mapping[str, Any]) -> None:
    """Add a start to the run in a folder; damaged lines are dropped.

    Raises:
        OSError: the file cannot be written.

    Example: `note_start(folder, {"step": 0, "time": "2026-03-01 10:20", "machine": "Linux x86_64, 16 cores"})`.
    """
    file = folder / STARTS_FILE
    rows = [*read_rows(file), dict(start)]
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))


def _table(config: Mapping[str, Any], start: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    model = config.get("model")
    if isinstance(model, Mapping):
        yield "model", str(model["path"]) if model.get("path") else "random weights"
    for name, key in (("parameters", "parameters"), ("machine", "machine"), ("processes", "num_ranks")):
        if start.get(key):
            yield name, str(start[key])
    versions = start.get("versions")
    if isinstance(versions, Mapping):
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    if start.get("time"):
        yield "started", str(start["time"])


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value)


TIMELINE_FILE = "timeline.jsonl"
_SECONDS = ("started_s", "ended_s", "busy_s")


def read_timeline(folder: Path) -> list[dict[str, Any]]:
    """Return the spans of a run, in order; empty if it has no workers. Damaged lines are dropped.

    Each has "step", "worker" (None for the trainer), "started_s", "ended_s" and "busy_s" in seconds of `time.time`, and
    "num_rollouts".

    Example: a step of two workers has three spans, the trainer's last.
    """
    return [row for row in read_rows(folder / TIMELINE_FILE) if _is_span(row)]


def _is_span(row: dict[str, Any]) -> bool:
    worker = row.get("worker")
    return (worker is None or isinstance(worker, int)) and all(number(row.get(name)) is not None for name in _SECONDS)
