"""The model that most tests of the engine sample from; none of them changes it."""

import pytest
from transformers import PreTrainedModel

from tests.models import build_float64


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return build_float64("qwen3").eval()
