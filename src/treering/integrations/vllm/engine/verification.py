"""How vLLM verifies drafts: by its own rejection sampling, or by drawing each token as if there were no drafts."""

from typing import Any, Literal, get_args

from treering.errors import ConfigError, UnsupportedError
from treering.integrations.vllm.engine.llm_requirements import EXTENSION, has_extension

Verification = Literal["rejection", "exact"]
"""rejection: vLLM's own; the distribution is right, and other drafts give other tokens. exact: a drafted position draws
from its row's generator, as a pass without drafts would, and drafts stay while they equal what is drawn; so tokens do
not depend on drafts. Only with vLLM's V1 runner on CPU, whose released builds
have no right rejection sampling above temperature 0."""


def set_verification(llm: Any, verification: str) -> None:
    """Makes the workers of an LLM verify drafts so; does nothing without drafts.

    Raises:
        ConfigError: an unknown verification, or "exact" for workers that do not answer.
        UnsupportedError: "exact" on another device or with another vLLM, or "rejection" where vLLM's own is wrong.
    """
    if verification not in get_args(Verification):
        raise ConfigError(f"verification is one of {', '.join(get_args(Verification))}, got {verification!r}")
    config = llm.llm_engine.vllm_config
    if config.speculative_config is None:
        return
    if has_extension(config):
        problems = [problem for problem in llm.collective_rpc("treering_verify", args=(verification,)) if problem]
        if problems:
            other = "exact" if verification == "rejection" else "rejection"
            raise UnsupportedError(f'verification="{verification}" is wrong here: {problems[0]}; set "{other}"')
    elif verification == "exact":
        raise ConfigError(
            'verification="exact" is installed by the LLM\'s workers; make the LLM with '
            f'LLM(..., worker_extension_cls="{EXTENSION}")'
        )
