"""Declare the subcommands with their arguments and help.

None of the modules imported here needs torch, and a command imports what it needs when it runs, so `treering --help` is
quick.
"""

from pathlib import Path
from typing import Annotated

import typer

import treering
from treering.cli.cache import cache
from treering.cli.doctor import doctor
from treering.cli.fetch import fetch
from treering.cli.init import init
from treering.cli.inspect.inspect_options import InspectOptions
from treering.cli.options import ConfigFile, EvalArguments, JsonOutput, Overrides, ServeOptions, takes
from treering.cli.settings_help import SettingsCommand
from treering.cli.simulate import simulate
from treering.extras import require

app = typer.Typer(
    name="treering",
    help="""Train language models on trees of trajectories: every shared token is trained once.

    Start with `treering inspect FILES`: it shows what your trajectories share and how much faster trees can train at
    best, and with `--drafts` how much faster rollouts can decode. `treering init FILE --model MODEL` writes a
    configuration for them. Then `treering sft CONFIG` trains on them, and `treering train CONFIG` trains a policy by
    reinforcement learning. `treering demo` compares both with plain training
    on a small model in a few minutes, and `treering simulate` predicts what scheduling rollouts by length would gain.
    `treering doctor` checks the installation or a run.
    """,
    epilog="From Python: `import treering`, then `help(treering.Forest)` and `help(treering.backward)`.",
    invoke_without_command=True,
    add_completion=False,
    # An unexpected exception is our bug, and a bug report needs its plain traceback.
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"treering {treering.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
@takes(InspectOptions)
def inspect(options: InspectOptions) -> None:
    """Measure what trajectories share, and the best speedup that training them as trees can give.

    Tokens are cached, so that the next command on the same files starts at once; see `treering cache`.

    Example: treering inspect runs/*.jsonl.gz --tokenizer models/qwen3

    Example: treering inspect runs/*.jsonl.gz --tokenizer models/qwen3 --show 3

    Example: treering inspect --drafts runs/sums
    """
    options.check()
    if options.drafts:
        from treering.cli.inspect.drafts import run
    elif options.shows:
        from treering.cli.inspect.show import run
    else:
        from treering.cli.inspect.run_inspect import run
    run(options)


app.command()(init)


@app.command(cls=SettingsCommand)
def sft(config: ConfigFile, overrides: Overrides = None, json_output: JsonOutput = False) -> None:
    """Fine-tune a model on trajectories, one tree per task, loss on the assistant's tokens only.

    Example: treering sft config.toml train.num_steps=20 run.dir=runs/try

    On several devices: torchrun --no-python --nproc-per-node 2 treering sft config.toml

    A stopped run resumes from its last checkpoint when it is started again.
    """
    require("treering sft")
    from treering.cli.run_training import run_sft

    run_sft(config_path=config, overrides=overrides or [], json_output=json_output)


@app.command(cls=SettingsCommand)
def train(config: ConfigFile, overrides: Overrides = None, json_output: JsonOutput = False) -> None:
    """Train a policy on the rewards of its own rollouts: drafted from earlier ones, trained as trees.

    Example: treering train config.toml rl.group_size=16 run.dir=runs/try

    On several devices: torchrun --no-python --nproc-per-node 2 treering train config.toml

    A stopped run resumes from its last checkpoint when it is started again.
    """
    require("treering train")
    from treering.cli.run_training import run_train

    run_train(config_path=config, overrides=overrides or [], json_output=json_output)


@app.command("eval")
@takes(EvalArguments)
def evaluate(options: EvalArguments) -> None:
    """Measure a checkpoint or a model on held-out data: loss of trajectories, rewards and pass@k of prompts.

    Example: treering eval runs/sft

    Example: treering eval models/qwen3 --file test.jsonl --reward exact_answer eval.temperature=1 eval.num_samples=8
    """
    require("treering eval")
    from treering.cli.run_eval import run

    run(options)


@app.command()
@takes(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve a model over HTTP: token ids in and out as vLLM's server does, and OpenAI's completions and chats.

    Example: treering serve runs/train --history runs/train/history

    Example: treering serve models/qwen3 --port 8001 --dtype bfloat16

    POST /inference/v1/generate, /v1/completions and /v1/chat/completions, GET /v1/models and /health.
    """
    require("treering serve")
    require("treering serve", "aiohttp")
    from treering.cli.run_serve import run

    run(options)


@app.command()
def demo(
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="New or empty folder for both runs. Default: runs/demo, runs/demo-2, ..."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, order of prompts and noise.")] = 0,
    real: Annotated[
        bool,
        typer.Option("--real", help="Train SmolLM2-135M-Instruct (see `treering fetch`); takes a quarter of an hour."),
    ] = False,
    json_output: JsonOutput = False,
) -> None:
    """Train a small policy by GRPO with the plain loop and with Treering's, from one start, and compare.

    Example: treering demo --out runs/try

    Example: treering demo --real
    """
    require("treering demo")
    if real:
        require("treering demo --real", "gguf")
    from treering.cli.demo import run

    run(out=out, seed=seed, json_output=json_output, real=real)


app.command()(simulate)


app.command()(cache)


app.command()(fetch)


app.command()(doctor)


@app.command()
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Folder of a `train` or `sft` run, or of a demo; several are compared.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html", help="Page to write. Default: report.html in the folder, or comparison.html."
        ),
    ] = None,
    open_page: Annotated[
        bool, typer.Option("--open", help="Show the page in the browser; the page follows a training run.")
    ] = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="Rewrite the page while the run trains.")] = False,
    rollouts: Annotated[
        Path | None,
        typer.Option(metavar="FILE.parquet", help="Also write all rollouts as a table; needs treering[datasets]."),
    ] = None,
    json_output: JsonOutput = False,
) -> None:
    """Make one HTML page of a run: its figures, one forest, and where the tokens of a rollout came from.

    The page is one file and loads nothing from a network. A run that is running, was killed or is damaged also gets a
    page, which names what is missing. The page of several runs has their curves in common charts and their final
    figures in a table.

    Example: treering report runs/demo --open

    Example: treering report runs/a runs/b

    Example: treering report runs/train --refresh

    Example: treering report runs/train --rollouts rollouts.parquet
    """
    from treering.cli.report import run

    run(folders=folders, out=out, open_page=open_page, refresh=refresh, rollouts=rollouts, json_output=json_output)


@app.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
def trl(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="{grpo,sft,dpo} [TRL'S OPTIONS]", help="A script of TRL and its options."),
    ] = None,
) -> None:
    """Train with TRL's own command line, computing every shared prefix once.

    Example: treering trl sft --model_name_or_path models/qwen3 --dataset_name my/data --output_dir runs/sft

    Example: treering trl grpo --help

    In addition to TRL's options: --tree_backend, --group_batches, --verify_first. On several devices: torchrun
    --no-python --nproc-per-node 2 treering trl sft ...
    """
    if not arguments or arguments[0] in ("--help", "-h"):
        print(context.get_help())
        return
    from treering.cli.trl import run

    run(arguments)
