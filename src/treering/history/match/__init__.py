"""Where a row's context occurs in history, in running rollouts and in other prompts."""
