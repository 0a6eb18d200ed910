"""`treering serve`: samples from a model or a checkpoint over HTTP, drafts from a history, until it is ended."""

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from torch import nn
from transformers.utils import logging as transformers_logging

from treering.cli.eval.command import find_weights
from treering.cli.models import choose_device, load_checkpoint
from treering.cli.serve.options import ServeOptions
from treering.engine.host import EngineHost
from treering.engine.torch_engine import TorchEngine
from treering.errors import ConfigError
from treering.history.draft.drafter import Drafter
from treering.history.store.reader import HistoryReader
from treering.model.positions import max_positions
from treering.rl.environments.chat import ChatTokens
from treering.rl.tasks.text_tokens import TextTokens
from treering.serving import HostSampler, Server, ServerSettings

KEY_VARIABLE = "TREERING_API_KEY"


def run(options: ServeOptions) -> None:
    """Serves until a signal ends the process.

    Raises:
        ConfigError, InputError, StateError, UnsupportedError: see the parts that raise them.
    """
    transformers_logging.disable_progress_bar()
    console = Console(stderr=True, highlight=False)
    with opened(options) as server:
        console.print(f"serving {server.model} at {server.url} (Ctrl-C ends)", soft_wrap=True)
        threading.Event().wait()


@contextmanager
def opened(options: ServeOptions) -> Iterator[Server]:
    """A server of the options' model, until the block ends."""
    settings = ServerSettings(host=options.host, port=options.port, api_key=os.environ.get(KEY_VARIABLE) or None)
    weights = find_weights(options.name, options.step)
    model = _load(weights, options)
    texts = TextTokens(weights) if (weights / "tokenizer.json").is_file() else None
    drafter = None if options.history is None else Drafter(HistoryReader(options.history))
    engine = TorchEngine(
        model,
        drafter,
        max_batch=options.max_batch,
        max_tokens=options.max_tokens,
        decode=None if texts is None else texts.decode,
    )
    engine.refresh_history()
    num_positions = min(max_positions(model) or options.max_tokens, options.max_tokens)
    with (
        EngineHost(engine) as host,
        Server(
            HostSampler(host),
            model=options.served_name or options.name,
            num_positions=num_positions,
            texts=texts,
            chat=None if texts is None else _chat_tokens(weights),
            settings=settings,
        ) as server,
    ):
        yield server


def _chat_tokens(folder: Path) -> ChatTokens | None:
    try:
        return ChatTokens(folder)
    except ConfigError as error:
        warnings.warn(f"chats are refused: {error}", stacklevel=2)
        return None


def _load(weights: Path, options: ServeOptions) -> nn.Module:
    model = load_checkpoint(weights).to(choose_device(options.device), getattr(torch, options.dtype))
    return model.eval().requires_grad_(False)
