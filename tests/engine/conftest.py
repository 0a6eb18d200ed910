"""Shared model of the engine tests; no test changes it."""

import pytest
from transformers import PreTrainedModel

from tests.models import build_float64


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return build_float64("qwen3").eval()
