"""Each family's additions to attention and heads, omitted or done wrong on purpose: law 2's check must fail."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.forests import SHAPES
from tests.models import FAMILIES, assert_gradients_equal, build_float64, take_gradients
from tests.partitions import random_partitions
from tests.train.flat import Batch, flat_loss
from tests.train.gradient.test_backward import assert_step_is_exact, batch_of
from tests.train.gradient.test_partitioned import cut_by
from treering.attention import Form, backends, layout, segments
from treering.model import context
from treering.model.families import ModelParts, find_parts
from treering.train.gradient import partitioned, scoring
from treering.train.gradient.backward import backward
from treering.train.objectives import sft
from treering.tree.forest import Forest
from treering.tree.plan.fragment import Sight

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
BATCH = batch_of([[[*PROMPT, 5, 8, 9, 7, 9], [*PROMPT, 3, 2, 3, 8, 4, 6, 2], [*PROMPT, 3, 2, 3, 8, 6]]])
BATCH = Batch(
    groups=BATCH.groups,
    masks=[[1] * len(sequence) for sequence in BATCH.sequences],
    advantages=BATCH.advantages,
    old_logprobs=BATCH.old_logprobs,
)

pytestmark = pytest.mark.usefixtures("no_self_check")


def count_a_window_in_packed_order(patch: pytest.MonkeyPatch) -> None:
    """A token sees the packed tokens before it that are in its window by index, siblings' tokens counted."""
    honest = Sight.within

    def packed(forest: Forest, *, sees_whole_pictures: bool = False) -> Sight:
        return honest(forest, sees_whole_pictures=sees_whole_pictures)._replace(position=np.arange(forest.num_tokens))

    patch.setattr(layout.Sight, "within", staticmethod(packed))


def forget_the_window(patch: pytest.MonkeyPatch) -> None:
    change_the_form(patch, window=None)


def count_a_window_one_too_far(patch: pytest.MonkeyPatch) -> None:
    honest = Form

    def wider(**given: Any) -> Form:
        return honest(**{**given, "window": given["window"] and given["window"] + 1})

    patch.setattr(context, "Form", wider)


def forget_the_softcap_of_scores(patch: pytest.MonkeyPatch) -> None:
    change_the_form(patch, softcap=None)


def change_the_form(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    honest = Form
    patch.setattr(context, "Form", lambda **given: replace(honest(**given), **changes))


def forget_the_softcap_of_logits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scoring.Scorer, "scores", _with_parts(scoring.Scorer.scores, softcap=None))


def forget_the_scale_of_logits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scoring.Scorer, "scores", _with_parts(scoring.Scorer.scores, logit_divisor=1.0))


def _with_parts(honest: Callable[..., Any], **changes: Any) -> Callable[..., Any]:
    def scores(scorer: Any, *args: Any) -> Any:
        return honest(replace(scorer, parts=replace(scorer.parts, **changes)), *args)

    return scores


def forget_the_scale_of_scores(patch: pytest.MonkeyPatch) -> None:
    """Scores over the root of the head size, as in most families."""
    change_the_form(patch, scale=8**-0.5)


def rotate_by_packed_index(patch: pytest.MonkeyPatch) -> None:
    """Positions count packed tokens, siblings' included; layers without rotations do not notice."""
    honest = find_parts

    def packed(model: Any) -> ModelParts:
        parts = honest(model)

        def run(**given: Any) -> Any:
            return parts.run(**given | {"position_ids": torch.arange(given["position_ids"].shape[1])[None]})

        return replace(parts, run=run)

    patch.setattr("treering.train.gradient.backward.find_parts", packed)


def forget_the_sinks(patch: pytest.MonkeyPatch) -> None:
    honest = backends.segment_attention
    patch.setattr(backends, "segment_attention", lambda *args, **given: honest(*args, **{**given, "sinks": None}))


def lose_the_gradient_of_sinks(patch: pytest.MonkeyPatch) -> None:
    honest = segments._sink_gradient
    patch.setattr(segments, "_sink_gradient", lambda *args: 0 * honest(*args))


TRAPS: list[tuple[str, Callable[[pytest.MonkeyPatch], None]]] = [
    ("mistral window", count_a_window_in_packed_order),
    ("mistral window", forget_the_window),
    ("qwen2 window", count_a_window_in_packed_order),
    ("qwen2 window", count_a_window_one_too_far),
    ("gemma2", count_a_window_in_packed_order),
    ("gemma2", forget_the_softcap_of_scores),
    ("gemma2", forget_the_softcap_of_logits),
    ("gemma3", count_a_window_in_packed_order),
    ("gemma3", forget_the_window),
    ("gpt_oss", forget_the_sinks),
    ("gpt_oss", lose_the_gradient_of_sinks),
    ("gpt_oss", count_a_window_in_packed_order),
    ("phi3", count_a_window_in_packed_order),
    ("granite", forget_the_scale_of_logits),
    ("granite", forget_the_scale_of_scores),
    ("smollm3", count_a_window_in_packed_order),
    *((family, rotate_by_packed_index) for family in ("phi3", "olmo2", "smollm3", "glm4")),
]


@pytest.mark.parametrize(("family", "trap"), TRAPS, ids=lambda value: getattr(value, "__name__", value))
def test_each_trap_of_a_family_breaks_law_2(
    family: str, trap: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_float64(family)
    assert_step_is_exact(model, BATCH, "grpo", "token_mean")
    trap(monkeypatch)
    with pytest.raises(AssertionError):
        assert_step_is_exact(model, BATCH, "grpo", "token_mean")


@pytest.mark.parametrize("family", ["mistral window", "gemma2", "gpt_oss"])
def test_a_window_that_restarts_in_every_partition_breaks_law_4(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_float64(family)
    honest = partitioned.sight_of

    def restarted(*args: Any) -> Sight:
        sight = honest(*args)
        return sight._replace(position=sight.position - sight.position.min())

    with cut_by(lambda tree: random_partitions(tree, 4, 5, cut=0.2)):
        assert_step_is_exact(model, BATCH, "sft", "sum")
        monkeypatch.setattr(partitioned, "sight_of", restarted)
        with pytest.raises(AssertionError):
            assert_step_is_exact(model, BATCH, "sft", "sum")


@pytest.mark.parametrize("mode", ["reentrant", "non_reentrant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointed_adapters_of_every_family_are_exact(family: str, mode: str) -> None:
    base = build_float64(family)
    config = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    model = get_peft_model(base, config).double()
    batch = batch_of([SHAPES["long segments"]])
    flat_loss(model, batch, kind="sft", normalizer="token_mean").backward()  # type: ignore[no-untyped-call]
    expected = take_gradients(model)
    enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
    enable({"use_reentrant": mode == "reentrant"})
    backward(model, Forest.from_sequences(batch.groups[0]), sft(batch.masks))
    actual = take_gradients(model)
    assert actual
    assert_gradients_equal(actual, expected, 1e-10)
