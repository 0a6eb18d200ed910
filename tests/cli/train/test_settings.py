"""How settings of `treering train` become engines."""

from types import SimpleNamespace
from typing import Any

import pytest

from treering.cli.train.settings import engine_factory
from treering.errors import UnsupportedError


def test_prompts_with_pictures_are_refused_before_vllm_starts() -> None:
    config: Any = SimpleNamespace(engine=SimpleNamespace(kind="vllm"))
    source: Any = SimpleNamespace(has_pictures=True)
    model: Any = None
    with pytest.raises(UnsupportedError, match=r'got engine\.kind = "vllm", set "torch"'):
        engine_factory(config, model, source)
