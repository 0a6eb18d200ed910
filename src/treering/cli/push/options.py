"""The options of `treering push` and their help; `treering.cli.push.command` does the work."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from treering.cli.options import JsonOutput, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """What is uploaded, and to which repository, which is made if it is not there."""

    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of `train` or `sft`.")]
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="ORGANISATION/NAME on the hub; made if absent.")]
    step: Step = None
    base_model: Annotated[
        str | None, typer.Option(metavar="HUB_ID", help="Base model of a run that began from a folder.")
    ] = None
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be uploaded, and upload nothing.")] = False
    json_output: JsonOutput = False
