"""Exact verification of drafts in vLLM's worker: each token is drawn as if there were no drafts.

Written for the V1 runner's rejection sampler; its signatures are checked.

    B rows   D draft tokens of all rows   K most draft tokens of a row   V vocabulary
"""

import inspect
from dataclasses import replace
from typing import Any

_FORWARD = ("self", "metadata", "draft_probs", "logits", "sampling_metadata")
_LOGPROBS = ("max_num_logprobs", "metadata", "logits", "target_logits", "bonus_logits", "sampled_token_ids")
_CUT = ("logits", "k", "p")


def install(runner: Any, verification: str) -> str | None:
    """Set how a model runner verifies drafts; return None, or why it cannot.

    Example: "rejection" restores a runner's own sampler, and returns the problem if that samples wrongly.
    """
    sampler: Any = getattr(runner, "rejection_sampler", None)
    if sampler is None:
        return "this worker has no rejection sampler"
    if verification == "rejection":
        sampler.__dict__.pop("forward", None)
        return _problem_of_rejection()
    problem = _problem_of_exact(runner, sampler)
    if problem is None:
        # An instance attribute takes precedence over the method of its class.
        sampler.forward = lambda *args: exact_forward(sampler, *args)
    return problem


def _problem_of_rejection() -> str | None:
    """Return the problem of vLLM's CPU build: a kernel that spreads temperatures writes nothing (vllm #55005)."""
    import torch
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    values, ends = torch.tensor([0.7, 1.3]), torch.tensor([2, 5], dtype=torch.int32)
    found = [expand_batch_to_tokens(values.to(dtype), ends, 5) for dtype in (torch.float32, torch.int32)]
    if all(f.tolist() == values.to(f.dtype).repeat_interleave(torch.tensor([2, 3])).tolist() for f in found):
        return None
    return "this build of vLLM samples drafted positions at temperatures other than those requested (vllm #55005)"


def _problem_of_exact(runner: Any, sampler: Any) -> str | None:
    problem = _problem_of_device(runner.device.type)
    if problem is not None:
        return problem
    from vllm.v1.sample import rejection_sampler as module

    expected = {
        "RejectionSampler.forward": (getattr(type(sampler), "forward", None), _FORWARD),
        "RejectionSampler._get_logprobs_tensors": (getattr(sampler, "_get_logprobs_tensors", None), _LOGPROBS),
        "apply_top_k_top_p": (getattr(module, "apply_top_k_top_p", None), _CUT),
    }
    for name, (function, parameters) in expected.items():
        found = None if function is None else tuple(inspect.signature(function).parameters)
        if found != parameters:
            return f"this vLLM's {name} takes {found}, expected {parameters}"
    if sampler.synthetic_mode or not sampler.is_processed_logprobs_mode:
        return "it needs processed log-probs and no synthetic acceptance"
    return None


def _problem_of_device(device: str) -> str | None:
    """Return why tokens of a device would differ with the batch; None on a CPU, and on CUDA in batch-invariant mode."""
    if device == "cpu":
        return None
    if device != "cuda":
        return f"on {device} a token's logits depend on the batch, so tokens would differ anyway"
    from vllm import envs

    if envs.VLLM_BATCH_INVARIANT:
        return None
    return "on cuda a token's logits depend on the batch; set VLLM_BATCH_INVARIANT=1 where vLLM starts"


def exact_forward(sampler: Any, metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: Any) -> Any:
    """Draw each row's tokens position by position, and stop after the first that differs from its draft.

    Args:
        sampler: vLLM's `RejectionSampler`.
        metadata: vLLM's `SpecDecodeMetadata`.
        draft_probs: not read; no drawn token depends on the drafts.
        logits: [D + B, V].
        sampling_metadata: vLLM's `SamplingMetadata`.

    Returns:
        A `SamplerOutput` with int32 [B, K + 1] on the device of the logits, -1 after a row's last token.
    """
    import torch
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID

    target = logits[metadata.target_logits_indices].to(torch.float32)
    target = sampler.apply_logits_processors(target, sampling_metadata, metadata)
    target = _as_sampled(target, metadata.num_draft_tokens, sampling_metadata)
    drawn, complete = _draw_drafted(sampler, metadata, target, sampling_metadata)
    # vLLM's own sampler draws a row's last token; only rows whose drafts were all accepted use their generator.
    generators = {row: sampling_metadata.generators[row] for row in complete if row in sampling_metadata.generators}
    bonus = sampler.sampler(
        logits=logits[metadata.bonus_logits_indices],
        sampling_metadata=replace(sampling_metadata, max_num_logprobs=-1, generators=generators),
        predict_bonus_token=True,
        logprobs_mode_override="processed_logits",
    )
    last = bonus.sampled_token_ids[:, 0].tolist()
    for row in complete:
        drawn[row].append(last[row])
    width = metadata.max_spec_len + 1
    padded = [own + [PLACEHOLDER_TOKEN_ID] * (width - len(own)) for own in drawn]
    tokens = torch.tensor(padded, dtype=torch.int32, device=logits.device)
    logprobs = None
    if sampling_metadata.max_num_logprobs is not None:
        logprobs = sampler._get_logprobs_tensors(
            sampling_metadata.max_num_logprobs, metadata, logits, target, bonus.logprobs_tensors.logprobs, tokens
        )
    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)


def _as_sampled(logits: Any, num_drafted: list[int], sampling_metadata: Any) -> Any:
    """Return the logits [D, V] of drafted positions after each row's temperature, top-k and top-p."""
    if sampling_metadata.all_greedy:
        return logits
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    counts = torch.tensor(num_drafted, device=logits.device)
    # Greedy rows have temperature 0.
    temperature = sampling_metadata.temperature.masked_fill(sampling_metadata.temperature == 0, 1.0)
    cuts = [
        None if cut is None else cut.repeat_interleave(counts)
        for cut in (sampling_metadata.top_k, sampling_metadata.top_p)
    ]
    return apply_top_k_top_p(logits.div_(temperature.repeat_interleave(counts)[:, None]), *cuts)


def _draw_drafted(
    sampler: Any, metadata: Any, target: Any, sampling_metadata: Any
) -> tuple[list[list[int]], list[int]]:
    """Return each row's tokens at drafted positions, to the first that differs, and the rows whose drafts all match."""
    first = [0, *metadata.cu_num_draft_tokens.tolist()[:-1]]
    drafts = metadata.draft_token_ids.tolist()
    drawn: list[list[int]] = [[] for _ in first]
    active = list(range(len(first)))
    for position in range(metadata.max_spec_len):
        rows = [row for row in active if position < metadata.num_draft_tokens[row]]
        if not rows:
            break
        indices = [first[row] + position for row in rows]
        found = _draw(sampler, target[indices], rows, sampling_metadata)
        for row, index, token in zip(rows, indices, found, strict=True):
            drawn[row].append(token)
            if token != drafts[index]:
                active.remove(row)
    return drawn, active


def _draw(sampler: Any, logits: Any, rows: list[int], sampling_metadata: Any) -> list[int]:
    """Return one token per row, drawn from processed logits."""
    likeliest: list[int] = logits.argmax(-1).tolist()
    if sampling_metadata.all_greedy:
        return likeliest
    own = sampling_metadata.generators
    generators = {index: own[row] for index, row in enumerate(rows) if row in own}
    drawn = sampler.sampler.topk_topp_sampler(logits, generators, None, None)[0].tolist()
    is_greedy = (sampling_metadata.temperature[rows] == 0).tolist()
    return [best if greedy else token for best, greedy, token in zip(likeliest, is_greedy, drawn, strict=True)]
