"""All ways of scoring rows equal log_softmax, with gradients, and hold few logits."""

import pytest
import torch
from torch import Tensor, nn

from treering.model import edges
from treering.model.edges import EdgeScores, score_rows

NUM_ROWS, WIDTH, VOCAB = 11, 6, 9
WAYS = {"at one time": 10**6, "in chunks of 4 rows": 4 * VOCAB, "in chunks of 1 row": 1}


class Adapted(nn.Module):
    """Head that is not a plain linear layer, like an adapter's."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


def make(bias: bool = False) -> tuple[Tensor, nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, VOCAB, bias=bias).double()
    rows = torch.randn(NUM_ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    target_row = torch.tensor([0, 0, 1, 2, 3, 3, 3, 4, 6, 8, 8, 10])
    return rows, linear, torch.randint(0, VOCAB, target_row.shape), target_row


def spelled_out(rows: Tensor, head: nn.Module, targets: Tensor, target_row: Tensor, temperature: float) -> EdgeScores:
    logprobs = (head(rows) / temperature).log_softmax(-1)[target_row]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return EdgeScores(logprobs=logprobs.gather(1, targets[:, None])[:, 0], entropy=entropy)


def gradients(scores: EdgeScores, inputs: list[Tensor], which: str) -> list[Tensor]:
    factors = torch.linspace(-1, 2, scores.logprobs.numel(), dtype=torch.float64)
    parts = {"logprobs": scores.logprobs, "entropy": scores.entropy, "both": scores.logprobs + 0.5 * scores.entropy}
    return list(torch.autograd.grad((parts[which] * factors).sum(), inputs))


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges, "MAX_LOGIT_ENTRIES", {"cpu": WAYS[request.param]})


@pytest.mark.parametrize("which", ["logprobs", "entropy", "both"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", ["linear", "linear with bias", "adapted"])
@pytest.mark.usefixtures("way")
def test_scores_and_gradients_equal_log_softmax(kind: str, temperature: float, which: str) -> None:
    rows, linear, targets, target_row = make(bias=kind == "linear with bias")
    head = Adapted(linear) if kind == "adapted" else linear
    inputs = [rows, *linear.parameters()]
    expected = spelled_out(rows, head, targets, target_row.numpy(), temperature)
    scores = score_rows(
        rows, head, targets, target_row.numpy(), temperature=temperature, entropy_of="all", vocab_size=VOCAB
    )
    for name in ("logprobs", "entropy"):
        got, wanted = getattr(scores, name), getattr(expected, name)
        torch.testing.assert_close(got, wanted, atol=1e-13, rtol=1e-13)
    for got, wanted in zip(gradients(scores, inputs, which), gradients(expected, inputs, which), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("kind", ["linear", "adapted"])
def test_chunks_keep_no_logits_for_the_backward(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges, "MAX_LOGIT_ENTRIES", {"cpu": 4 * 1000})
    linear = nn.Linear(WIDTH, 1000, bias=False)
    head = linear if kind == "linear" else Adapted(linear)
    rows = torch.randn(200, WIDTH, requires_grad=True)
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    targets = torch.arange(200)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        score_rows(rows, head, targets, targets.numpy(), temperature=1.0, entropy_of="all", vocab_size=1000)
    weights = sum(tensor.numel() for tensor in (rows, linear.weight))
    assert sum(saved.values()) / 4 <= weights + 20 * 200 < 200 * 1000


@pytest.mark.usefixtures("way")
def test_a_frozen_head_passes_gradients_only_to_the_rows() -> None:
    rows, linear, targets, target_row = make()
    expected = gradients(spelled_out(rows, linear, targets, target_row, 1.0), [rows], "logprobs")
    linear.requires_grad_(False)
    scores = score_rows(rows, linear, targets, target_row.numpy(), temperature=1.0, entropy_of="none", vocab_size=VOCAB)
    torch.testing.assert_close(gradients(scores, [rows], "logprobs"), expected, atol=1e-13, rtol=1e-13)
    assert scores.entropy.tolist() == [0.0] * targets.numel()


@pytest.mark.usefixtures("way")
def test_autocast_scores_in_bfloat16_and_returns_float32() -> None:
    rows, linear, targets, target_row = make()
    rows, linear = rows.detach().float().requires_grad_(), linear.float()
    expected = spelled_out(rows, linear, targets, target_row, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        scores = score_rows(
            rows, linear, targets, target_row.numpy(), temperature=1.0, entropy_of="all", vocab_size=VOCAB
        )
    assert scores.logprobs.dtype == torch.float32
    torch.testing.assert_close(scores.logprobs, expected.logprobs, atol=0.05, rtol=0.05)
    (scores.logprobs.sum() + scores.entropy.sum()).backward()
    assert rows.grad is not None
    assert linear.weight.grad is not None
    assert (rows.grad.dtype, linear.weight.grad.dtype) == (torch.float32, torch.float32)
    assert float(linear.weight.grad.norm()) > 0


@pytest.mark.usefixtures("way")
def test_a_token_that_cannot_occur_adds_nothing_to_the_entropy() -> None:
    rows, linear, _, _ = make(bias=True)
    with torch.no_grad():
        linear.bias[3] = -torch.inf
    targets, target_row = torch.zeros(NUM_ROWS, dtype=torch.long), torch.arange(NUM_ROWS)
    scores = score_rows(rows, linear, targets, target_row.numpy(), temperature=1.0, entropy_of="all", vocab_size=VOCAB)
    possible = [token for token in range(VOCAB) if token != 3]
    logprobs = linear(rows)[:, possible].log_softmax(-1)
    torch.testing.assert_close(scores.entropy, -(logprobs.exp() * logprobs).sum(-1), atol=1e-13, rtol=1e-13)
    grad = torch.autograd.grad(scores.entropy.sum(), rows)[0]
    assert grad.isfinite().all()
