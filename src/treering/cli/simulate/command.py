"""The arguments of `treering simulate` and their help; `treering.cli.simulate.run` does the work."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from treering.cli.options import Format, JsonOutput, one_of

_FROM_LAWS = "Synthetic rollouts"
_FROM_LOGS = "Rollouts of a log"
_CLUSTER = "Workers and times"
_CONTROLS = "Controls"
_OUTPUT = "Output"


def simulate(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help='A log, JSON Lines, plain or .gz: {"prompt", "epoch", "length"} and, if known, "step" and '
            '"prompt_tokens"; or the folder of a `treering train` run; or trajectories with token ids of any format. '
            "Without it, rollouts are synthetic.",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Rollout workers.", rich_help_panel=_CLUSTER)] = 32,
    slots: Annotated[
        int, typer.Option(metavar="N", min=1, help="Rollouts that a worker decodes at once.", rich_help_panel=_CLUSTER)
    ] = 128,
    rollouts: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Rollouts of a step: 4096. Of a log without steps: a whole epoch."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Steps: 12. Of a log: the first N instead of all.")
    ] = None,
    staleness: Annotated[
        int, typer.Option(metavar="N", min=0, help="Most updates between the sampling weights and the trainer's.")
    ] = 1,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="LAW",
            help="lognormal:MU,SIGMA[,MAX] with the median exp(MU); exponential:MEAN[,MAX]; "
            "bimodal:SHORT,LONG,SHARE[,SPREAD[,MAX]]; constant:N. Default: lognormal:8.2,0.8,16384.",
            rich_help_panel=_FROM_LAWS,
        ),
    ] = None,
    noise: Annotated[
        float | None,
        typer.Option(
            metavar="SIGMA", min=0, help="Error of the log of each prediction: 0.25.", rich_help_panel=_FROM_LAWS
        ),
    ] = None,
    stability: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Instead of noise: each group is predicted by its last median, and lengths vary so much that this "
            "share moves to a longer one of 8 rank groups. RhymeRL reports 0.16 for maths and 0.28 for code.",
            rich_help_panel=_FROM_LAWS,
        ),
    ] = None,
    crossed: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="With --stability: the share that moves up by one rank group only, into its shorter half, because "
            "rollouts end early. RhymeRL reports 0.13 for maths, which spread alone gives, and 0.24 for code.",
            rich_help_panel=_FROM_LAWS,
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="With --stability, rollouts of a prompt: 16.", rich_help_panel=_FROM_LAWS
        ),
    ] = None,
    waits: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE[,SIGMA[,TURNS]]",
            help="Rollouts wait between their turns, as for tools: this share of the mean span, with a log-normal "
            "SIGMA of 1 whatever the length, in 8 TURNS. A run of an environment has logged its own.",
            rich_help_panel=_FROM_LAWS,
        ),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Report the mean over N seeds, and the worst.", rich_help_panel=_FROM_LAWS
        ),
    ] = 1,
    predictor: Annotated[
        Literal["median", "ema", "quantile"] | None,
        typer.Option(
            parser=one_of("median", "ema", "quantile"),
            metavar="median|ema|quantile",
            help="How lengths are predicted from earlier steps: median.",
            rich_help_panel=_FROM_LOGS,
        ),
    ] = None,
    distort: Annotated[
        Literal["reversed", "constant", "random"] | None,
        typer.Option(
            parser=one_of("reversed", "constant", "random"),
            metavar="reversed|constant|random",
            help="Deliberately wrong predictions.",
            rich_help_panel=_CONTROLS,
        ),
    ] = None,
    decode: Annotated[
        str,
        typer.Option(
            metavar="STEP,ROW", help="Milliseconds of a decode step and of each row in it.", rich_help_panel=_CLUSTER
        ),
    ] = "20,0.05",
    training: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            min=0,
            help="Time of an update, as a share of a step's decoding time on all workers at their best batch.",
            rich_help_panel=_CLUSTER,
        ),
    ] = 0.07,
    prefill: Annotated[
        float,
        typer.Option(
            metavar="MS", min=0, help="Milliseconds of prefill, for a token of a prompt.", rich_help_panel=_CLUSTER
        ),
    ] = 0.0,
    load: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="Loading new weights into a worker.", rich_help_panel=_CLUSTER),
    ] = 0.0,
    believed_latency: Annotated[
        float,
        typer.Option(
            metavar="FACTOR",
            help="Policies plan with decode times that are off by this factor.",
            rich_help_panel=_CONTROLS,
        ),
    ] = 1.0,
    policies: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Only these, such as histopipe,fifo; sync always runs.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Draw a timeline of the first seed.", rich_help_panel=_OUTPUT),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the result as JSON to this file too.", rich_help_panel=_OUTPUT),
    ] = None,
    format: Format = "auto",
    json_output: JsonOutput = False,
) -> None:
    """Simulate how long rollouts and training take with each scheduling policy, and what ours would gain.

    Time is virtual: continuous batching on every worker, weight loading, training. Three rows say most: `sync` is the
    plain loop, `fifo` samples a step ahead of training, and `histopipe` also places rollouts by their predicted length.

    Example: treering simulate runs/train --workers 4 --slots 16 --decode 25,0.1

    Example: treering simulate --rollouts 16384 --timeline pipe.html
    """
    from treering.cli.simulate.cases import SimulateOptions
    from treering.cli.simulate.run import run

    options = SimulateOptions(
        file=file,
        format=format,
        num_workers=workers,
        num_slots=slots,
        num_rollouts=rollouts,
        num_steps=steps,
        staleness=staleness,
        lengths=lengths,
        noise=noise,
        stability=stability,
        crossed=crossed,
        group_size=group_size,
        num_seeds=seeds,
        waits=waits,
        predictor=predictor,
        distort=distort,
        decode=decode,
        training=training,
        prefill_ms=prefill,
        load_s=load,
        believed_latency=believed_latency,
    )
    run(options=options, policies=policies, timeline=timeline, out=out, json_output=json_output)
