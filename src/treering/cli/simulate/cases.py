"""Turns the options of `treering simulate` into traces, from a log or from a length law, and workers."""

from math import isfinite
from pathlib import Path

from treering.cli.simulate.options import SimulateOptions
from treering.errors import ConfigError, InputError
from treering.schedule.cluster import Cluster
from treering.schedule.latency import Latency, linear_latency
from treering.schedule.simulator.bounds import with_training
from treering.schedule.traces.replay import read_trace
from treering.schedule.traces.synthetic import synthetic_trace
from treering.schedule.traces.trace import Trace
from treering.schedule.traces.waits import parse_waits, with_waits

LENGTHS = "lognormal:8.2,0.8,16384"
NOISE = 0.25
ROLLOUTS = 4096
STEPS = 12
"""Defaults of options that are None unless given."""


Case = tuple[Trace, Cluster]
"""A trace and its workers."""


def make_cases(options: SimulateOptions) -> list[Case]:
    """One case per seed; a log has one.

    Raises:
        ConfigError: options contradict each other, or a value is out of range.
        InputError: a file, length law or latency cannot be read.
    """
    if not (isfinite(options.training) and options.training >= 0):
        raise ConfigError(f"--training is a share of a time, at least 0, got {options.training!r}; correct it")
    latency = _latency(options)
    if options.file is not None:
        _check_nothing_made_up(options)
        trace = _logged(options, options.file)
        return [(trace, _cluster(options, trace, latency))]
    return [_made_up(options, latency, seed) for seed in range(options.num_seeds or 1)]


def _check_nothing_made_up(options: SimulateOptions) -> None:
    of_laws = {"lengths": options.lengths, "noise": options.noise, "waits": options.waits, "seeds": options.num_seeds}
    given = [f"--{name}" for name, value in of_laws.items() if value is not None]
    if given:
        raise ConfigError(f"FILE has its own rollouts, and {', '.join(given)} makes some up; leave one of them out")


def _latency(options: SimulateOptions) -> Latency:
    try:
        step_ms, row_ms = (float(part) for part in options.decode.split(","))
    except ValueError as error:
        raise InputError(
            "--decode is STEP,ROW, the milliseconds of a decode step and of one more row, such as 20,0.05, got "
            f"{options.decode!r}; give two numbers"
        ) from error
    return linear_latency(
        step_s=step_ms / 1000, row_s=row_ms / 1000, prefill_s=options.prefill_ms / 1000, load_s=options.load_s
    )


def _cluster(options: SimulateOptions, trace: Trace, latency: Latency) -> Cluster:
    cluster = Cluster(
        num_workers=options.num_workers,
        num_slots=options.num_slots,
        max_tokens=trace.max_tokens,
        staleness=options.staleness,
        latency=latency,
    )
    return with_training(cluster, trace, options.training)


def _logged(options: SimulateOptions, file: Path) -> Trace:
    trace = read_trace(file, num_rollouts=options.num_rollouts, staleness=options.staleness)
    return Trace(steps=trace.steps[: options.num_steps], max_tokens=trace.max_tokens)


def _made_up(options: SimulateOptions, latency: Latency, seed: int) -> Case:
    noise = NOISE if options.noise is None else options.noise
    trace = synthetic_trace(
        LENGTHS if options.lengths is None else options.lengths,
        num_steps=options.num_steps or STEPS,
        num_rollouts=options.num_rollouts or ROLLOUTS,
        noise=noise,
        seed=seed,
    )
    cluster = _cluster(options, trace, latency)
    if options.waits is not None:
        trace = with_waits(trace, parse_waits(options.waits), cluster, noise=noise, seed=seed)
    return trace, cluster
