"""Options of `treering inspect` and their help; other files of this folder do the work."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from treering.cli.options import ChatTemplate, Format, JsonOutput, NoCache
from treering.data import Renderer
from treering.errors import ConfigError
from treering.types import DEFAULT_SHAPE

_SHARING = "Sharing in trees"
_SHOW = "Trained tokens"
_ROLLOUTS = "Drafts from earlier rollouts"


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions:
    """Files to read, and which of three reports to make."""

    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILES...",
            help="Trajectories: JSON Lines, JSON or Parquet files, plain, gzip or zstandard; folders of them, each "
            "read as one set; or quoted patterns of such names.",
        ),
    ]
    tokenizer: Annotated[
        str | None, typer.Option(metavar="DIR", help="Hugging Face tokenizer folder or hub id; needed for messages.")
    ] = None
    model_shape: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Model whose FLOPs are counted; {DEFAULT_SHAPE}.", rich_help_panel=_SHARING),
    ] = None
    template: ChatTemplate = "auto"
    more: Annotated[
        bool,
        typer.Option(
            "--more", help="Show every figure: bounds, other cuts of the data, branching.", rich_help_panel=_SHARING
        ),
    ] = False
    why: Annotated[
        bool,
        typer.Option(
            "--why",
            help="Show where trajectories diverge although the same text follows.",
            rich_help_panel=_SHARING,
        ),
    ] = False
    show: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Print the first N trajectories as they will be trained: text with special tokens, which tokens the "
            "loss covers, and which are shared.",
            rich_help_panel=_SHOW,
        ),
    ] = None
    task: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Print trajectories of one task, all without --show.", rich_help_panel=_SHOW),
    ] = None
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html", help="Write them to a page instead; default: 3 a file.", rich_help_panel=_SHOW
        ),
    ] = None
    drafts: Annotated[
        bool,
        typer.Option(
            "--drafts",
            help="Replay the rollouts through the drafter instead, and predict the speedup of decoding. Earlier "
            "rollouts of a prompt are its history: by epoch if every line has one, else in file order. Rehearsals are "
            "not replayed, because a file does not hold their noise.",
            rich_help_panel=_ROLLOUTS,
        ),
    ] = False
    verify_cost: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            min=0.001,
            max=1,
            help="drafts: cost of verifying a drafted token, as a share of a decoding step. Default: the run's "
            "setting, or the drafter's; on CPU try 0.4.",
            rich_help_panel=_ROLLOUTS,
        ),
    ] = None
    max_rollouts: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="drafts: replay about N rollouts, a sample of whole prompts.",
            rich_help_panel=_ROLLOUTS,
        ),
    ] = None
    format: Format = "auto"
    no_cache: NoCache = False
    json_output: JsonOutput = False

    @property
    def shows(self) -> bool:
        """Whether trajectories are shown, instead of counted."""
        return self.show is not None or self.task is not None or self.html is not None

    def check(self) -> None:
        """Refuse options of several reports, and options that the chosen report does not use.

        Raises:
            ConfigError: names them.
        """
        if (self.why or self.more) + self.drafts + self.shows > 1:
            raise ConfigError(
                "--why with --more, --show with --task and --html, and --drafts are three reports; ask for one"
            )
        if (self.drafts or self.shows) and self.model_shape is not None:
            raise ConfigError("--model-shape is for the report on sharing; remove it, or the other report's options")
        if self.verify_cost is not None and not self.drafts:
            raise ConfigError("--verify-cost needs --drafts; add --drafts, or remove it")
        if self.max_rollouts is not None and not self.drafts:
            raise ConfigError("--max-rollouts needs --drafts; add --drafts, or remove it")

    @property
    def tokenizer_dir(self) -> Path | None:
        """Folder of the tokenizer, also for a hub id."""
        from treering.cli.hub import tokenizer_folder

        return None if self.tokenizer is None else tokenizer_folder(self.tokenizer)

    def renderer(self) -> Renderer:
        """Return the renderer that turns records into tokens and masks."""
        return Renderer(tokenizer=self.tokenizer_dir, template=self.template)
