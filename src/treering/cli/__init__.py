"""Command line `treering`: `main` declares it, and each subcommand has a file or a folder."""
