"""Turns the options of `treering simulate` into traces, from a log or from a length law, and workers."""

from math import isfinite

from treering.cli.simulate.options import SimulateOptions
from treering.errors import ConfigError, InputError
from treering.schedule.cluster import Cluster
from treering.schedule.compare import with_decode_scaled
from treering.schedule.latency import Latency, linear_latency
from treering.schedule.predict.lengths import make_predictor
from treering.schedule.simulator.bounds import with_training
from treering.schedule.traces.distort import distort
from treering.schedule.traces.replay import read_trace
from treering.schedule.traces.stability import noise_for_stability, sigma_for_stability, stable_trace
from treering.schedule.traces.synthetic import synthetic_trace
from treering.schedule.traces.trace import Trace
from treering.schedule.traces.waits import parse_waits, with_waits

LENGTHS = "lognormal:8.2,0.8,16384"
NOISE = 0.25
ROLLOUTS = 4096
STEPS = 12
"""Defaults of options that are None unless given."""
GROUP_SIZE = 16
"""Rollouts of a prompt, with a stability."""


Case = tuple[Trace, Cluster, Cluster]
"""A trace, its workers, and the workers as the policies see them."""

_OF_LAWS = ("lengths", "noise", "stability", "crossed", "waits")


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
    made_up = [f"--{name}" for name in _OF_LAWS if getattr(options, name) is not None]
    if options.file is not None and made_up:
        raise ConfigError(f"FILE has its own rollouts, and {', '.join(made_up)} makes some up; leave one of them out")
    if options.file is None and options.predictor is not None:
        raise ConfigError("--predictor predicts the rollouts of a FILE, got none; name one, or see --noise")
    if options.noise is not None and options.stability is not None:
        raise ConfigError("--noise and --stability are two ways to make predictions wrong; leave one of them out")
    if options.crossed is not None and options.stability is None:
        raise ConfigError("--crossed says how much of --stability only crosses a boundary; add that, or drop this")
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
    if options.crossed is None:
        spread, early = sigma_for_stability(law, options.stability, group_size=GROUP_SIZE), 0.0
    else:
        spread, early = noise_for_stability(law, options.stability, options.crossed, group_size=GROUP_SIZE)
    return [
        stable_trace(
            law,
            num_steps=num_steps,
            num_rollouts=num_rollouts,
            group_size=GROUP_SIZE,
            spread=spread,
            early=early,
            seed=seed,
        )
        for seed in range(options.num_seeds)
    ]
