"""The option by which a subcommand speaks to machines, alike everywhere."""

from typing import Annotated

import typer

JsonOutput = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout instead of tables.")]
