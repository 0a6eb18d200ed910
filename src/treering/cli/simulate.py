"""Options of `treering simulate`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from treering.cli.options import JsonOutput, takes

_of_laws = partial(typer.Option, rich_help_panel="Synthetic rollouts")
_of_cluster = partial(typer.Option, rich_help_panel="Workers and times")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Simulation to run; None for an option that was not given.

    Example: `SimulateOptions(num_workers=4, num_rollouts=64)` leaves the rest at the defaults.
    """

    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help='A log, JSON Lines, plain or .gz: {"prompt", "epoch", "length"} and, if known, "step" and '
            '"prompt_tokens"; or the folder of a `treering train` run; or trajectories with token ids in any format. '
            "Without it, rollouts are synthetic.",
        ),
    ] = None
    num_workers: Annotated[int, _of_cluster("--workers", metavar="N", min=1, help="Rollout workers.")] = 32
    num_slots: Annotated[
        int, _of_cluster("--slots", metavar="N", min=1, help="Rollouts that a worker decodes at once.")
    ] = 128
    num_rollouts: Annotated[
        int | None,
        typer.Option(
            "--rollouts",
            metavar="N",
            min=1,
            help="Rollouts per step. Default: 4096; an epoch of a log without steps.",
        ),
    ] = None
    num_steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", min=1, help="Steps. Default: 12; all steps for a log.")
    ] = None
    staleness: Annotated[
        int, typer.Option(metavar="N", min=0, help="Most updates between the sampling weights and the trainer's.")
    ] = 1
    lengths: Annotated[
        str | None,
        _of_laws(
            metavar="LAW",
            help="lognormal:MU,SIGMA[,MAX], median exp(MU). Default: lognormal:8.2,0.8,16384.",
        ),
    ] = None
    noise: Annotated[
        float | None, _of_laws(metavar="SIGMA", min=0, help="Error of each prediction's logarithm. Default: 0.25.")
    ] = None
    num_seeds: Annotated[
        int | None, _of_laws("--seeds", metavar="N", min=1, help="Report mean and worst over N seeds. Default: 1.")
    ] = None
    decode: Annotated[
        str, _of_cluster(metavar="STEP,ROW", help="Milliseconds of a decode step and of each row in it.")
    ] = "20,0.05"
    training: Annotated[
        float,
        _of_cluster(
            metavar="SHARE",
            min=0,
            help="Time of an update, as a share of a step's decoding time, all workers at their best batch.",
        ),
    ] = 0.07
    prefill_ms: Annotated[
        float,
        _of_cluster("--prefill", metavar="MS", min=0, help="Milliseconds of prefill per prompt token."),
    ] = 0.0
    load_s: Annotated[
        float, _of_cluster("--load", metavar="SECONDS", min=0, help="Seconds to load new weights into a worker.")
    ] = 0.0
    rehearse: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            min=0,
            max=1,
            help="Add a synchronous loop whose idle rows sample the next step early, each token of which changes with "
            "this chance, one update later.",
        ),
    ] = None
    json_output: JsonOutput = False


@takes(SimulateOptions)
def simulate(options: SimulateOptions) -> None:
    """Simulate how long rollouts and training take under each scheduling policy, and what HistoPipe would gain.

    Time is virtual: continuous batching on every worker, weight loading, training. Three rows matter most: `sync` is
    the plain loop, `fifo` samples a step ahead of training, and `histopipe` also places rollouts by predicted length.

    Example: treering simulate runs/train --workers 4 --slots 16 --decode 25,0.1

    Example: treering simulate --rollouts 16384 --slots 64

    Example: treering simulate --rehearse 2e-5 --prefill 0.02
    """
    # The simulation loads numba, which takes a second.
    from treering.cli.simulation import run

    run(options)
