"""Turns the options of `treering simulate` into traces, from a log or from a length law, and workers."""

from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path

from treering.data import FormatName
from treering.errors import ConfigError, InputError
from treering.schedule.cluster import Cluster
from treering.schedule.compare import with_decode_scaled
from treering.schedule.latency import Latency, linear_latency
from treering.schedule.predict.lengths import PredictorName, make_predictor
from treering.schedule.simulator.bounds import with_training
from treering.schedule.traces.distort import Distortion, distort
from treering.schedule.traces.replay import read_trace
from treering.schedule.traces.stability import noise_for_stability, sigma_for_stability, stable_trace
from treering.schedule.traces.synthetic import synthetic_trace
from treering.schedule.traces.trace import Trace
from treering.schedule.traces.waits import parse_waits, with_waits

LENGTHS = "lognormal:8.2,0.8,16384"
NOISE = 0.25
ROLLOUTS = 4096
STEPS = 12
GROUP_SIZE = 16
"""Defaults of options that are None unless given; groups exist only with a stability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """The options of the subcommand that make cases; None for an option that was not given.

    Example: `SimulateOptions(num_workers=4, lengths="constant:100")` leaves the rest at the defaults.
    """

    file: Path | None = None
    format: FormatName = "auto"
    num_workers: int = 32
    num_slots: int = 128
    num_rollouts: int | None = None
    num_steps: int | None = None
    staleness: int = 1
    lengths: str | None = None
    noise: float | None = None
    stability: float | None = None
    crossed: float | None = None
    group_size: int | None = None
    distort: Distortion | None = None
    predictor: PredictorName | None = None
    decode: str = "20,0.05"
    training: float = 0.07
    prefill_ms: float = 0.0
    load_s: float = 0.0
    believed_latency: float = 1.0
    num_seeds: int = 1
    waits: str | None = None


Case = tuple[Trace, Cluster, Cluster]
"""A trace, its workers, and the workers as the policies see them."""

_OF_LAWS = {
    "lengths": "--lengths",
    "noise": "--noise",
    "stability": "--stability",
    "crossed": "--crossed",
    "group_size": "--group-size",
    "waits": "--waits",
}


def make_cases(options: SimulateOptions) -> list[Case]:
    """One case per seed.

    Raises:
        ConfigError: options contradict each other, or a value is out of range.
        InputError: a file, length law or latency cannot be read.
    """
    _check(options)
    latency = _latency(options)
    cases: list[Case] = []
    for trace in _traces(options):
        cluster = Cluster(
            num_workers=options.num_workers,
            num_slots=options.num_slots,
            max_tokens=trace.max_tokens,
            staleness=options.staleness,
            latency=latency,
        )
        cluster = with_training(cluster, trace, options.training)
        if options.waits is not None:
            noise = NOISE if options.noise is None else options.noise
            trace = with_waits(trace, parse_waits(options.waits), cluster, noise=noise, seed=len(cases))
        cases.append((trace, cluster, with_decode_scaled(cluster, options.believed_latency)))
    return cases


def _check(options: SimulateOptions) -> None:
    given = {field.name for field in fields(options) if getattr(options, field.name) is not None}
    if options.file is not None:
        made_up = [flag for name, flag in _OF_LAWS.items() if name in given]
        if made_up:
            raise ConfigError(
                f"FILE has its own rollouts, and {', '.join(made_up)} makes some up; leave one of them out"
            )
    elif options.format != "auto":
        raise ConfigError("--format is that of a FILE, got none; name one, or leave it out")
    elif "predictor" in given:
        raise ConfigError("--predictor predicts the rollouts of a FILE, got none; name one, or see --noise")
    if {"noise", "stability"} <= given:
        raise ConfigError("--noise and --stability are two ways to make predictions wrong; leave one of them out")
    if "crossed" in given and "stability" not in given:
        raise ConfigError("--crossed says how much of --stability only crosses a boundary; add that, or drop this")
    if "group_size" in given and "stability" not in given:
        raise ConfigError("rollouts of a group share a prediction with --stability only; add it, or drop --group-size")
    for flag, value in (("--training", options.training), ("--believed-latency", options.believed_latency)):
        if not (isfinite(value) and value >= 0) or (flag == "--believed-latency" and value == 0):
            raise ConfigError(f"{flag} is a factor of a time, above 0, got {value!r}; correct it")


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


def _traces(options: SimulateOptions) -> list[Trace]:
    traces = [_logged(options)] * options.num_seeds if options.file is not None else _made_up(options)
    if options.distort is None:
        return traces
    return [distort(trace, options.distort, seed) for seed, trace in enumerate(traces)]


def _logged(options: SimulateOptions) -> Trace:
    assert options.file is not None
    name = options.predictor or "median"
    trace = read_trace(
        options.file,
        lambda limit: make_predictor(name, max_tokens=limit),
        num_rollouts=options.num_rollouts,
        staleness=options.staleness,
        format=options.format,
    )
    return Trace(steps=trace.steps[: options.num_steps], max_tokens=trace.max_tokens)


def _made_up(options: SimulateOptions) -> list[Trace]:
    law = options.lengths or LENGTHS
    num_steps, num_rollouts = options.num_steps or STEPS, options.num_rollouts or ROLLOUTS
    if options.stability is None:
        noise = NOISE if options.noise is None else options.noise
        return [
            synthetic_trace(law, num_steps=num_steps, num_rollouts=num_rollouts, noise=noise, seed=seed)
            for seed in range(options.num_seeds)
        ]
    group_size = options.group_size or GROUP_SIZE
    if options.crossed is None:
        spread, early = sigma_for_stability(law, options.stability, group_size=group_size), 0.0
    else:
        spread, early = noise_for_stability(law, options.stability, options.crossed, group_size=group_size)
    return [
        stable_trace(
            law,
            num_steps=num_steps,
            num_rollouts=num_rollouts,
            group_size=group_size,
            spread=spread,
            early=early,
            seed=seed,
        )
        for seed in range(options.num_seeds)
    ]
