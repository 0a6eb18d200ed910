"""The options of `treering simulate` and their help; other files of this folder do the work."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from treering.cli.options import JsonOutput, one_of

_FROM_LAWS = "Synthetic rollouts"
_FROM_LOGS = "Rollouts of a log"
_CLUSTER = "Workers and times"
_CONTROLS = "Controls"
_OUTPUT = "Output"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """What is simulated; None for an option that was not given.

    Example: `SimulateOptions(num_workers=4, lengths="constant:100")` leaves the rest at the defaults.
    """

    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help='A log, JSON Lines, plain or .gz: {"prompt", "epoch", "length"} and, if known, "step" and '
            '"prompt_tokens"; or the folder of a `treering train` run; or trajectories with token ids of any format. '
            "Without it, rollouts are synthetic.",
        ),
    ] = None
    num_workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, help="Rollout workers.", rich_help_panel=_CLUSTER)
    ] = 32
    num_slots: Annotated[
        int,
        typer.Option(
            "--slots", metavar="N", min=1, help="Rollouts that a worker decodes at once.", rich_help_panel=_CLUSTER
        ),
    ] = 128
    num_rollouts: Annotated[
        int | None,
        typer.Option(
            "--rollouts", metavar="N", min=1, help="Rollouts of a step: 4096. Of a log without steps: a whole epoch."
        ),
    ] = None
    num_steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", min=1, help="Steps: 12. Of a log: the first N instead of all.")
    ] = None
    staleness: Annotated[
        int, typer.Option(metavar="N", min=0, help="Most updates between the sampling weights and the trainer's.")
    ] = 1
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="LAW",
            help="lognormal:MU,SIGMA[,MAX] with the median exp(MU); exponential:MEAN[,MAX]; "
            "bimodal:SHORT,LONG,SHARE[,SPREAD[,MAX]]; constant:N. Default: lognormal:8.2,0.8,16384.",
            rich_help_panel=_FROM_LAWS,
        ),
    ] = None
    noise: Annotated[
        float | None,
        typer.Option(
            metavar="SIGMA", min=0, help="Error of the log of each prediction: 0.25.", rich_help_panel=_FROM_LAWS
        ),
    ] = None
    stability: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Instead of noise: each group is predicted by its last median, and lengths vary so much that this "
            "share moves to a longer one of 8 rank groups. RhymeRL reports 0.16 for maths and 0.28 for code.",
            rich_help_panel=_FROM_LAWS,
        ),
    ] = None
    crossed: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="With --stability: the share that moves up by one rank group only, into its shorter half, because "
            "rollouts end early. RhymeRL reports 0.13 for maths, which spread alone gives, and 0.24 for code.",
            rich_help_panel=_FROM_LAWS,
        ),
    ] = None
    waits: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE[,SIGMA[,TURNS]]",
            help="Rollouts wait between their turns, as for tools: this share of the mean span, with a log-normal "
            "SIGMA of 1 whatever the length, in 8 TURNS. A run of an environment has logged its own.",
            rich_help_panel=_FROM_LAWS,
        ),
    ] = None
    num_seeds: Annotated[
        int,
        typer.Option(
            "--seeds",
            metavar="N",
            min=1,
            help="Report the mean over N seeds, and the worst.",
            rich_help_panel=_FROM_LAWS,
        ),
    ] = 1
    predictor: Annotated[
        Literal["median", "ema", "quantile"] | None,
        typer.Option(
            parser=one_of("median", "ema", "quantile"),
            metavar="median|ema|quantile",
            help="How lengths are predicted from earlier steps: median.",
            rich_help_panel=_FROM_LOGS,
        ),
    ] = None
    distort: Annotated[
        Literal["reversed", "constant", "random"] | None,
        typer.Option(
            parser=one_of("reversed", "constant", "random"),
            metavar="reversed|constant|random",
            help="Deliberately wrong predictions.",
            rich_help_panel=_CONTROLS,
        ),
    ] = None
    decode: Annotated[
        str,
        typer.Option(
            metavar="STEP,ROW", help="Milliseconds of a decode step and of each row in it.", rich_help_panel=_CLUSTER
        ),
    ] = "20,0.05"
    training: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            min=0,
            help="Time of an update, as a share of a step's decoding time on all workers at their best batch.",
            rich_help_panel=_CLUSTER,
        ),
    ] = 0.07
    prefill_ms: Annotated[
        float,
        typer.Option(
            "--prefill",
            metavar="MS",
            min=0,
            help="Milliseconds of prefill, for a token of a prompt.",
            rich_help_panel=_CLUSTER,
        ),
    ] = 0.0
    load_s: Annotated[
        float,
        typer.Option(
            "--load", metavar="SECONDS", min=0, help="Loading new weights into a worker.", rich_help_panel=_CLUSTER
        ),
    ] = 0.0
    believed_latency: Annotated[
        float,
        typer.Option(
            metavar="FACTOR",
            help="Policies plan with decode times that are off by this factor.",
            rich_help_panel=_CONTROLS,
        ),
    ] = 1.0
    policies: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Only these, such as histopipe,fifo; sync always runs.", rich_help_panel=_OUTPUT
        ),
    ] = None
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Draw a timeline of the first seed.", rich_help_panel=_OUTPUT),
    ] = None
    json_output: JsonOutput = False
