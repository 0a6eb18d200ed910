"""A patched vision-language model gives stock callers the stock gradients for a padded batch."""

import pytest
import torch
from torch import Tensor, nn

from tests.image_models import FAMILIES, Sequenced, build, image, sequence, stock_inputs
from tests.models import take_gradients
from treering.errors import InputError, UnsupportedError
from treering.model.patch import patch


def rows_of(family: str) -> list[Sequenced]:
    first, second, other = (image(family, i, wide=i == 1) for i in range(3))
    both = (5, 6, 92, first, 93, 7, 92, second, 93, 8)
    return [
        sequence(*both, trained=[10, 11, 12]),
        sequence(*both, trained=[10, 13]),
        sequence(5, 6, 92, other, 93, 7, trained=[14, 15, 16]),
        sequence(5, 9, trained=[17]),
    ]


def padded(model: nn.Module, rows: list[Sequenced], side: str) -> dict[str, Tensor]:
    """Pad the rows like a stock trainer's collator."""
    inputs = [stock_inputs(model, row) for row in rows]
    length = max(len(row.tokens) for row in rows)
    batch = {}
    for name in inputs[0]:
        parts = [one[name] for one in inputs if name in one]
        if parts[0].shape[:2] != inputs[0]["input_ids"].shape or name in ("pixel_values", "image_grid_thw"):
            batch[name] = torch.cat(parts)
            continue
        widths = [(length - part.shape[1], 0) if side == "left" else (0, length - part.shape[1]) for part in parts]
        batch[name] = torch.cat([nn.functional.pad(p, width) for p, width in zip(parts, widths, strict=True)])
    labels = [torch.tensor([[t if m else -100 for t, m in zip(r.tokens, r.mask, strict=True)]]) for r in rows]
    widths = [(length - one.shape[1], 0) if side == "left" else (0, length - one.shape[1]) for one in labels]
    batch["labels"] = torch.cat(
        [nn.functional.pad(one, width, value=-100) for one, width in zip(labels, widths, strict=True)]
    )
    return batch


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_stock_model(family: str, side: str) -> None:
    model = build(family)
    batch = padded(model, rows_of(family), side)
    expected_loss = model(**batch).loss
    expected_loss.backward()
    expected = take_gradients(model)
    patched = patch(model)
    loss = model(**batch).loss
    loss.backward()
    counts = patched.take_counts()
    patched.undo()
    actual = take_gradients(model)
    assert counts.num_tokens < counts.num_flat_tokens
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    largest = max(float(grad.abs().max()) for grad in expected.values())
    worst = max(float((actual[name] - grad).abs().max()) for name, grad in expected.items()) / largest
    assert worst <= 1e-6, f"{worst:.1e} of the largest gradient"
    assert model(**batch).loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mm_token_type_ids": None}, "was not given; pass on what the processor returns"),
        ({"mm_token_type_ids": torch.ones(4, 25, dtype=torch.int64)}, "sequence 0 of the batch differs"),
        ({"image_grid_thw": None}, "image_grid_thw, which was not given"),
        ({"pixel_values_videos": torch.zeros(1, 1)}, "video is not supported"),
        ({"position_ids": torch.zeros(4, 1)}, "positions follow from images"),
        ({"pixel_values": None}, "without an image"),
    ],
)
def test_batches_that_a_forest_cannot_represent_are_refused(change: dict[str, Tensor | None], reason: str) -> None:
    model = build("qwen2_5_vl")
    batch = padded(model, rows_of("qwen2_5_vl"), "right")
    patch(model)
    with pytest.raises((InputError, UnsupportedError), match=reason):
        model(**batch | change)


def test_rows_that_are_cut_are_refused() -> None:
    model = build("qwen2_5_vl")
    batch = padded(model, rows_of("qwen2_5_vl"), "right")
    patch(model)
    with pytest.raises(InputError, match="check if rows were cut"):
        model(
            **{name: each if name in ("pixel_values", "image_grid_thw") else each[:2] for name, each in batch.items()}
        )
