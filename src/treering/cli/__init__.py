"""The command line `treering`: `main` declares it, one file beside it per subcommand."""
