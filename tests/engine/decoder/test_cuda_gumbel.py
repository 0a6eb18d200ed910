"""Gumbel-max sampling on the device equals the reference at every position."""

import pytest
import torch

from tests.engine.decoder.cuda_cases import INTERPRETED_ONLY
from treering.engine.sampling.noise import row_key
from treering.engine.sampling.reference import sample

gumbel_module = pytest.importorskip("treering.engine.decoder.cuda.gumbel")
pytestmark = INTERPRETED_ONLY


def keys_of(num: int) -> torch.Tensor:
    return torch.tensor([row_key(3, f"p{index}", 0, index) for index in range(num)])


def everything(num: int) -> dict[str, torch.Tensor]:
    return {"top_k": torch.zeros(num, dtype=torch.int64), "top_p": torch.ones(num, dtype=torch.float64)}


@pytest.mark.parametrize("vocabulary", [5, 2600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_and_logprobs_are_those_of_the_specification(vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (3 * torch.randn(12, vocabulary, generator=generator)).to(dtype)
    logits[:, 1::7] = -torch.inf
    logits[5, :1024] = -torch.inf if vocabulary > 1024 else 0.0
    keys, positions = keys_of(12), torch.arange(12) * 1_000_003
    temperature = torch.linspace(0.05, 2.5, 12, dtype=torch.float64)
    samples = gumbel_module.gumbel_max(logits, keys, positions, temperature)
    expected = sample(logits, keys=keys, positions=positions, temperature=temperature, **everything(12))
    assert samples.tokens.tolist() == expected.tokens.tolist()
    assert torch.allclose(samples.logprobs, expected.logprobs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_invalid_logits_give_no_token_and_do_not_affect_other_rows(bad: float) -> None:
    logits = torch.zeros(3, 1500)
    logits[1] = bad if bad == -torch.inf else 0.0
    logits[1, 1400] = bad
    ones = torch.ones(3, dtype=torch.float64)
    samples = gumbel_module.gumbel_max(logits, keys_of(3), torch.arange(3), ones)
    assert (samples.tokens >= 0).tolist() == [True, False, True]
    assert torch.allclose(samples.logprobs[::2], -torch.tensor(1500.0, dtype=torch.float64).log())
