"""The list of settings, from the typed sections themselves: for `--help`, and for docs/settings.md."""
