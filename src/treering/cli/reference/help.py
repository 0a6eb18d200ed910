"""`treering sft --help` and `train --help`: after the command's own options a table of the settings of each section."""

from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

if TYPE_CHECKING:
    from treering.cli.reference.settings import Section

_HEAD = "Settings of CONFIG, a TOML file: key, default, what it sets. As an override: SECTION.KEY=VALUE."


class SettingsCommand(TyperCommand):
    """A subcommand whose help ends with the settings of its configuration file.

    The configuration is imported when help is asked for, so that no other command waits for it.
    """

    config_name: str
    """Of a class in `treering.config`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints the command's own help, then the sections."""
        super().format_help(ctx, formatter)
        import treering.config
        from treering.cli.reference.settings import sections_of

        console = Console(highlight=False)
        console.print(_HEAD, markup=False)
        for section in sections_of(getattr(treering.config, self.config_name)):
            console.print(_section(section))


class SftCommand(SettingsCommand):
    """`treering sft`."""

    config_name = "SftConfig"


class TrainCommand(SettingsCommand):
    """`treering train`."""

    config_name = "RlConfig"


def _section(section: "Section") -> Group:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(max_width=14, overflow="fold")
    table.add_column()
    for setting in section.settings:
        # As `Text`, so that brackets are no markup.
        words = Text.assemble(setting.description, (f" ({setting.kind})", "dim"))
        default = Text("unset", "dim") if setting.default is None else Text(setting.default)
        table.add_row(f"  {setting.key}", default, words)
    return Group("", Text.assemble((section.title, "bold cyan"), f"  {section.description}"), table)
