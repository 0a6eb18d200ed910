"""`python -m treering`: the command line, with the current folder on the import path."""

from treering.cli.start import main

main()
