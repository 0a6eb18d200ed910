"""The arguments of `treering bench` and their help.

Knows words. What they mean is known to `treering.cli.bench`, which is imported when it runs.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from treering.cli.json_output import JsonOutput


def bench(
    name: Annotated[
        Literal["tree", "draft", "engine", "pipe", "loop"],
        typer.Argument(
            help="tree: the tree step against separate flat sequences. draft: recorded rollouts replayed with every "
            "drafter. engine: rollouts with drafts, without, and by generate. pipe: every policy on worker processes "
            "beside the simulator's prediction. loop: the plain loop, each part alone, and all together."
        ),
    ],
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="draft: recorded rollouts, JSON Lines, plain or .gz.")
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="tree, engine: timed runs per case; 5, and 1 to 3 for sets. pipe, loop: 3. Medians are reported.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as JSON to this file too.")] = None,
    only: Annotated[
        str | None, typer.Option(metavar="NAMES", help="tree: these cases and sets only, such as star,toolbench.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="tree: all tasks of every set instead of a sample; takes hours.")
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="tree: another tokenizer than that of the real-data folder. draft: to render messages."
        ),
    ] = None,
    drafters: Annotated[
        str | None, typer.Option(metavar="NAMES", help="draft: these drafters only, such as naive,treering_recency.")
    ] = None,
    max_draft: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="draft: tokens per draft at most, for all drafters alike.")
    ] = None,
    limit_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="draft: whole tasks of N sampled tokens; 60000. 0 replays everything."),
    ] = None,
    siblings: Annotated[
        Literal["before", "others"] | None,
        typer.Option(help="draft: a sample sees those of its task that ran before (the default), or all others."),
    ] = None,
    cost: Annotated[
        Path | None,
        typer.Option(
            metavar="CURVE",
            help="draft: JSON of num_tokens and seconds of a pass, or what `bench engine --out` wrote, to predict "
            "speedups by.",
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="draft: rows that speedups are predicted for; 8.")
    ] = None,
    match_drafts: Annotated[
        float | None,
        typer.Option(
            metavar="N", help="draft: treering drafts at most N tokens a step, in place of what Arctic's best row does."
        ),
    ] = None,
    json_output: JsonOutput = False,
) -> None:
    """Measure a claim on this machine, with its baseline beside it.

    Example: treering bench draft rollouts.jsonl.gz --tokenizer qwen3 --json
    """
    from treering.cli.bench import run

    run(
        name=name,
        json_output=json_output,
        out=out,
        runs=runs,
        only=only,
        full=full,
        tokenizer=tokenizer,
        file=file,
        drafters=drafters,
        max_draft=max_draft,
        limit_tokens=limit_tokens,
        siblings=siblings,
        cost=cost,
        batch=batch,
        match_drafts=match_drafts,
    )
