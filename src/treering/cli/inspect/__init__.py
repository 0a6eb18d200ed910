"""`treering inspect`: report what trajectory files share, and what drafting from earlier rollouts would save."""
