"""A patched model returns the stock model's results for a padded batch and computes each distinct token once."""

from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treering
from tests.models import VOCAB, assert_gradients_equal, build_float64, take_gradients
from treering.errors import InputError, StateError, UnsupportedError
from treering.model import patch as patch_module

PAD, IGNORED = 0, -100
PROMPT, ANSWERS = [5, 6, 7, 8], [[1, 2, 3], [1, 2, 4, 5], [9], [1, 2, 3]]


def padded(rows: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
    """Return token ids and mask of rows with padding on one side, or on both."""
    width = max(map(len, rows)) + (1 if side == "both" else 0)
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        start = {"right": 0, "left": width - len(row), "both": min(1, width - len(row))}[side]
        ids[i, start : start + len(row)] = torch.tensor(row)
        mask[i, start : start + len(row)] = 1
    return ids, mask


def labelled(ids: Tensor, mask: Tensor) -> Tensor:
    """Return labels that ignore the prompt and padding."""
    real = mask.cumsum(1)
    return ids.where((mask == 1) & (real > len(PROMPT)), IGNORED)


@dataclass(kw_only=True)
class FusedOutput:
    """Output of a trainer's fused head."""

    loss: Tensor
    log_probs: Tensor
    entropy: Tensor
    label_mask: Tensor


def add_fused_head(model: Any) -> None:
    """Add a fused head by TRL's contract: per-token values for labels that are not ignored, 0 elsewhere."""
    stock = model.forward

    def forward(self, *args, fused_lm_head=False, labels=None, shift_labels=None, num_items_in_batch=None, **kwargs):
        if not fused_lm_head:
            return stock(*args, labels=labels, **kwargs)
        hidden = self.base_model(*args, use_cache=False, **kwargs).last_hidden_state
        if shift_labels is None:
            hidden, shift_labels = hidden[:, :-1], labels[:, 1:]
        mask = shift_labels != IGNORED
        logps = self.lm_head(hidden).log_softmax(-1)
        picked = logps.gather(-1, shift_labels.clamp(min=0)[..., None])[..., 0].masked_fill(~mask, 0)
        entropy = -(logps.exp() * logps).sum(-1).masked_fill(~mask, 0)
        loss = -picked.sum() / (mask.sum() if num_items_in_batch is None else num_items_in_batch)
        return FusedOutput(loss=loss, log_probs=picked, entropy=entropy, label_mask=mask)

    model.forward = MethodType(forward, model)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return take_gradients(model)


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("family", ["qwen3", "mistral window", "gemma2", "gpt_oss"])
def test_logits_and_gradients_of_a_padded_batch_are_the_stock_models(family, side):
    model = build_float64(family).train()
    ids, mask = padded([PROMPT + answer for answer in ANSWERS], side)
    labels = labelled(ids, mask)
    expected = model(input_ids=ids, attention_mask=mask, labels=labels)
    wanted = gradients(model, expected.loss)
    patched = treering.patch(model)
    output = model(input_ids=ids, attention_mask=mask, labels=labels)
    assert output.logits.shape == expected.logits.shape
    difference = (output.logits - expected.logits)[labels.roll(-1, 1) != IGNORED]
    assert difference.abs().max() < 1e-12
    assert_gradients_equal(gradients(model, output.loss), wanted, 1e-10)
    counts = patched.take_counts()
    assert (counts.num_flat_tokens, counts.num_tokens) == (27, 4 + 3 + 2 + 1)
    assert patched.take_counts().token_ratio == 1.0


@pytest.mark.parametrize(("num_items", "num_logits"), [(None, 2**23), (7, 2**23), (None, 2 * VOCAB), (7, VOCAB)])
def test_a_fused_head_scores_each_distinct_label_once_and_gives_the_batch_its_values(
    num_items, num_logits, monkeypatch
):
    monkeypatch.setattr(patch_module, "MAX_CPU_LOGITS", num_logits)
    model = build_float64("qwen3").train()
    add_fused_head(model)
    ids, mask = padded([PROMPT + answer for answer in ANSWERS], "left")
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labelled(ids, mask)}
    inputs |= {"fused_lm_head": True, "num_items_in_batch": num_items}
    expected = model(**inputs)
    weights = torch.arange(1.0, expected.log_probs.numel() + 1, dtype=torch.float64).view_as(expected.log_probs)
    wanted = gradients(model, (expected.log_probs * weights).sum() + expected.entropy.sum() + expected.loss)
    scored = []
    handle = model.lm_head.register_forward_hook(lambda module, args, output: scored.append(args[0].shape[:-1].numel()))
    treering.patch(model)
    output = model(**inputs)
    handle.remove()
    for name in ("loss", "log_probs", "entropy"):
        assert (getattr(output, name) - getattr(expected, name)).abs().max() < 1e-12, name
    assert output.label_mask.equal(expected.label_mask)
    loss = (output.log_probs * weights).sum() + output.entropy.sum() + output.loss
    assert_gradients_equal(gradients(model, loss), wanted, 1e-10)
    # Edges: from the prompt's end to 1 and 9, from 1 to 2, from 2 to 3 and 4, from 4 to 5.
    assert scored == [min(6, num_logits // VOCAB)] * (6 * VOCAB // min(6 * VOCAB, num_logits))


@pytest.mark.parametrize("factor", [None, 2.0])
def test_hooks_of_the_causal_lm_run_as_without_the_patch(factor):
    model = build_float64("qwen3").train()
    seen = []

    def hook(_module, _args, output):
        seen.append(output.logits.shape)
        return None if factor is None else output.__class__(logits=factor * output.logits)

    model.register_forward_hook(hook)
    model.register_forward_pre_hook(lambda _module, _args: seen.append("before"))
    ids, mask = padded([PROMPT + answer for answer in ANSWERS], "right")
    expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    patched = treering.patch(model)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert ((logits - expected)[mask.bool()]).abs().max() < 1e-12
    assert seen[:2] == seen[2:]
    assert patched.take_counts().num_calls == 1


def test_a_packed_row_is_split_where_its_positions_restart():
    model = build_float64("llama").train()
    rows = [PROMPT + answer for answer in ANSWERS]
    ids = torch.tensor([[token for row in rows for token in row]])
    positions = torch.tensor([[i for row in rows for i in range(len(row))]])
    expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    patched = treering.patch(model)
    assert (model(input_ids=ids, position_ids=positions, use_cache=False).logits - expected).abs().max() < 1e-12
    assert patched.take_counts().num_tokens == 10


@pytest.mark.parametrize("positions", [None, torch.arange(8)[None]])
def test_bounds_of_packed_sequences_that_positions_do_not_repeat_are_refused(positions):
    model = build_float64("llama").train()
    treering.patch(model)
    packed = {"input_ids": torch.tensor([PROMPT + PROMPT]), "cu_seq_lens_q": torch.tensor([0, 4, 8, 8])}
    model(**packed, position_ids=torch.arange(4).repeat(2)[None])
    with pytest.raises(InputError, match="cu_seq_lens_q has 2 sequences, and position_ids have 1"):
        model(**packed, position_ids=positions)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_recomputes_on_the_forest(reentrant):
    model = build_float64("qwen3").train()
    ids, mask = padded([PROMPT + answer for answer in ANSWERS], "right")
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labelled(ids, mask)}
    wanted = gradients(model, model(**inputs).loss)
    treering.patch(model)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    assert_gradients_equal(gradients(model, model(**inputs).loss), wanted, 1e-10)


def test_evaluation_and_generation_stay_flat_and_undo_restores_the_model():
    model = build_float64("qwen3")
    before = model.forward.__func__, model.model.forward.__func__
    ids, mask = padded([PROMPT], "right")
    patched = treering.patch(model)
    model.eval()(input_ids=ids, attention_mask=mask)
    model.train().generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
    assert patched.take_counts().num_calls == 0
    always = replace(patched.take_counts(), num_calls=1)
    patched.undo()
    patched.undo()
    assert (model.forward.__func__, model.model.forward.__func__) == before
    patched = treering.patch(model, when="always")
    model.eval()(input_ids=ids, attention_mask=mask)
    assert patched.take_counts().num_calls == always.num_calls


@pytest.mark.parametrize(
    ("inputs", "rule"),
    [
        ({"output_hidden_states": True}, "does not support output_hidden_states"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "accepts only a padding mask"),
        ({"token_type_ids": torch.zeros(1, 4)}, "does not support token_type_ids"),
    ],
)
def test_a_call_that_trees_cannot_serve_is_refused(inputs, rule):
    model = build_float64("qwen3").train()
    treering.patch(model)
    with pytest.raises(UnsupportedError, match=rule):
        model.model(input_ids=torch.tensor([PROMPT]), **inputs)


def test_a_second_patch_and_active_dropout_are_refused():
    model = build_float64("qwen3")
    treering.patch(model)
    with pytest.raises(StateError, match="undo that patch"):
        treering.patch(model)


def test_a_label_after_padding_is_refused_and_without_it_left_padding_is_exact() -> None:
    ids = torch.tensor([[0, 0, 3, 4, 5], [3, 4, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    labels = ids.masked_fill(mask == 0, -100)
    model = build_float64()
    patched = treering.patch(model)
    with pytest.raises(InputError, match=r"labels\[0, 2\] follows padding.*set it to -100"):
        model(input_ids=ids, attention_mask=mask, labels=labels)
    labels[0, 2] = -100
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    patched.undo()
    alone = [model(input_ids=row[None]).logits[0, :-1].log_softmax(-1) for row in (ids[0, 2:], ids[1])]
    scored = [each.gather(1, row[1:, None]) for each, row in zip(alone, (ids[0, 2:], ids[1]), strict=True)]
    torch.testing.assert_close(loss.double(), -torch.cat(scored).mean(), rtol=1e-6, atol=0)
