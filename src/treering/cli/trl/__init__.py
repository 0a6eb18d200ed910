"""`treering trl`: TRL's own command line, with shared prefixes."""
