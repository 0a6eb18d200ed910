"""Run `treering serve`: sample from a model or checkpoint over HTTP, with drafts from a history, until it is ended."""

import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from treering.cli.display import PlainConsole
from treering.cli.models import base_of, choose_device, load_checkpoint
from treering.cli.options import ServeOptions
from treering.cli.run_eval import find_weights
from treering.engine.host import EngineHost
from treering.engine.torch_engine import TorchEngine
from treering.errors import ConfigError, UnsupportedError
from treering.history.draft.drafter import Drafter
from treering.history.store.history_reader import HistoryReader
from treering.model.checks import max_positions
from treering.rl.environments.chat import ChatTokens
from treering.rl.model_samplers import EngineOptions
from treering.rl.tasks.text_tokens import StopToken, TextTokens, find_stop_tokens
from treering.serving import HostSampler, Server, ServerSettings
from treering.serving.tinker.routes import TinkerOptions, TinkerRoutes
from treering.train.loop.lora_adapters import has_adapter

KEY_VARIABLE = "TREERING_API_KEY"


def run(options: ServeOptions) -> None:
    """Serve until a signal ends the process.

    Raises:
        ConfigError, InputError, StateError, UnsupportedError: bad options, weights or history.
    """
    transformers_logging.disable_progress_bar()
    console = PlainConsole(stderr=True)
    with opened(options) as server:
        console.print(f"serving {server.model} at {server.url} (Ctrl-C ends)")
        threading.Event().wait()


@contextmanager
def opened(options: ServeOptions) -> Iterator[Server]:
    """Run a server of the options' model until the block ends."""
    settings = ServerSettings(host=options.host, port=options.port, api_key=os.environ.get(KEY_VARIABLE) or None)
    weights = find_weights(options.name, options.step)
    model = load_checkpoint(weights).to(choose_device(options.device), getattr(torch, options.dtype))
    model.eval().requires_grad_(False)
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
    chat = None if texts is None else _chat_tokens(weights)
    stops = () if texts is None else _stops(texts, chat, weights)
    num_positions = min(max_positions(model) or options.max_tokens, options.max_tokens)
    with (
        EngineHost(engine) as host,
        Server(
            HostSampler(host),
            model=options.served_name or options.name,
            num_positions=num_positions,
            texts=texts,
            chat=chat,
            stop_tokens=[stop.token_id for stop in stops],
            settings=settings,
            more=None if not options.train else _training(model, weights, options, num_positions, stops, texts, host),
        ) as server,
    ):
        yield server


def _training(
    model: nn.Module,
    weights: Path,
    options: ServeOptions,
    num_positions: int,
    stops: Sequence[StopToken],
    texts: TextTokens | None,
    host: EngineHost,
) -> TinkerRoutes:
    """Return the routes of Tinker's clients.

    Raises:
        UnsupportedError: the model already has adapters.
    """
    if not isinstance(model, PreTrainedModel) or has_adapter(model):
        raise UnsupportedError(f"clients train their own adapters, but {weights} already has some; merge them first")
    engine = EngineOptions(
        max_batch=options.max_batch,
        max_tokens=options.max_tokens,
        drafts=options.drafts == "on",
        decode=None if texts is None else texts.decode,
    )
    return TinkerRoutes(
        model,
        options.served_name or options.name,
        TinkerOptions(
            folder=options.checkpoints,
            num_positions=num_positions,
            engine=engine,
            stop_tokens=tuple(stop.token_id for stop in stops),
            tokenizer=str(weights.resolve()) if texts is not None else None,
            shares=options.sharing == "on",
            log=lambda line: PlainConsole(stderr=True).print(line),
        ),
        host,
    )


def _stops(texts: TextTokens, chat: ChatTokens | None, weights: Path) -> Sequence[StopToken]:
    """Return the stop tokens of a checkpoint; other tools save none with adapters, but their base model has some."""
    renderer = None if chat is None else chat.renderer
    found = [stop for model in (base_of(weights), weights) for stop in find_stop_tokens(texts, renderer, model=model)]
    return list({stop.token_id: stop for stop in found}.values())


def _chat_tokens(folder: Path) -> ChatTokens | None:
    try:
        return ChatTokens(folder)
    except ConfigError as error:
        warnings.warn(f"chats are refused: {error}", stacklevel=2)
        return None
