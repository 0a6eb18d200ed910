"""Convert between arrays and the protobuf records of Tinker's protocol, which the client's package defines.

T positions of a datum   K targets of a position
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from treering.arrays import Int32Array, Int64Array
from treering.data.formats.json_fields import show
from treering.errors import InputError, UnsupportedError
from treering.rl.model_samplers import PromptScores, TopTokens
from treering.serving.bodies import Fields, token_ids
from treering.train.loop.trainee import TargetDatum
from treering.train.target_losses import LossKind, Numbers, find_loss
from treering.types import TokenIds

MAX_CELLS = 1 << 24
"""Most numbers in one tensor; sparse tensors count as dense."""
MAX_WAITING_BYTES = 1 << 30
"""Limit of a batch, and of the requests of a model that wait."""


def records() -> Any:
    """Return the module of the client's records."""
    from tinker.proto import tinker_public_pb2

    return tinker_public_pb2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TinkerBatch:
    """Parsed body of `forward_backward`."""

    trains: bool
    data: tuple[TargetDatum, ...]
    num_tokens: int
    """Flat tokens."""
    num_bytes: int


def read_head(raw: bytes) -> Any:
    """Return the record in the body of `forward_backward`, with `model_id` and `seq_id`.

    Raises:
        InputError: the body is not such a record.
    """
    record = records().ForwardBackwardRequest()
    try:
        record.ParseFromString(raw)
    except Exception as error:
        raise InputError(f"the body must be a ForwardBackwardRequest in protobuf ({error})") from None
    return record


def read_batch(record: Any, *, num_positions: int, vocab_size: int) -> TinkerBatch:
    """Read the batch that `forward_backward` is asked to compute.

    Raises:
        InputError: a malformed field.
        UnsupportedError: a loss, an image or audio that this server does not support.
    """
    given = {
        name: getattr(each, each.WhichOneof("value") or "number") for name, each in record.loss_fn_config_v2.items()
    }
    loss, settings = find_loss(record.loss_fn, given or dict(record.loss_fn_config))
    if not record.data:
        raise InputError("data of the body must have at least one datum")
    data, num_bytes = [], 0
    for i, each in enumerate(record.data):
        datum = _datum(each, f"data[{i}]", loss, settings, num_positions=num_positions, vocab_size=vocab_size)
        data.append(datum)
        num_bytes += datum.tokens.nbytes + datum.targets.nbytes + sum(part.nbytes for part in datum.inputs.values())
        if num_bytes > MAX_WAITING_BYTES:
            raise InputError(
                f"data may take {MAX_WAITING_BYTES:,} bytes, and data[:{i + 1}] take more; send less at once"
            )
    num_tokens = sum(datum.tokens.size for datum in data)
    return TinkerBatch(trains=not record.forward_only, data=tuple(data), num_tokens=num_tokens, num_bytes=num_bytes)


def _datum(
    record: Any, where: str, loss: LossKind, settings: Numbers, *, num_positions: int, vocab_size: int
) -> TargetDatum:
    parts = [_chunk(chunk, f"{where}.model_input[{i}]") for i, chunk in enumerate(record.model_input)]
    tokens = np.concatenate([np.zeros(0, np.int32), *parts])
    _check_tokens(tokens, f"{where}.model_input", vocab_size)
    if tokens.size > num_positions:
        raise InputError(
            f"{where}.model_input has {tokens.size} tokens, but the maximum context length is {num_positions}; shorten "
            "it"
        )
    names = record.loss_fn_inputs.keys() - {"target_tokens"}
    missing = [name for name in loss.needs if name not in names]
    unknown = sorted(names.difference(loss.needs, loss.takes))
    if missing or unknown:
        what = f"no {missing[0]}" if missing else f"{unknown[0]}, which this loss does not read"
        raise InputError(f"{where}.loss_fn_inputs has {what}")
    given = {name: _array(each, f"{where}.loss_fn_inputs.{name}") for name, each in record.loss_fn_inputs.items()}
    targets = given.pop("target_tokens", None)
    if targets is None or targets.dtype != np.int64:
        raise InputError(f"{where}.loss_fn_inputs needs target_tokens as int64")
    _check_tokens(targets, f"{where}.loss_fn_inputs.target_tokens", vocab_size)
    if targets.ndim > (2 if not loss.needs else 1) or targets.shape[0] != tokens.size:
        raise InputError(f"{where}: target_tokens needs a row for each of {tokens.size} tokens, got {targets.shape}")
    for name, values in given.items():
        if values.shape != targets.shape or not np.isfinite(values).all():
            raise InputError(
                f"{where}.loss_fn_inputs.{name} must have a finite number for each target, {targets.shape}, got "
                f"{values.shape}"
            )
    inputs = {name: torch.from_numpy(values) for name, values in given.items()}
    return TargetDatum(tokens=tokens, targets=targets, inputs=inputs, loss=loss, settings=settings)


def _chunk(record: Any, where: str) -> Int32Array:
    kind = record.WhichOneof("chunk")
    if kind != "encoded_text":
        raise UnsupportedError(f"{where} is {kind or 'empty'}, but this server reads only token ids; remove it")
    return _numbers(record.encoded_text.tokens, np.dtype(np.int32), where)


def _check_tokens(tokens: NDArray[Any], where: str, vocab_size: int) -> None:
    if tokens.size == 0 or not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        found = "none" if tokens.size == 0 else f"{tokens.min()}..{tokens.max()}"
        raise InputError(f"{where} must have at least one token id, all below {vocab_size}, got {found}")


def _numbers(raw: bytes, dtype: np.dtype[Any], where: str) -> NDArray[Any]:
    if len(raw) % dtype.itemsize:
        raise InputError(f"{where} must have {dtype} numbers, got {len(raw)} bytes")
    return np.frombuffer(raw, dtype).copy()


def _array(record: Any, where: str) -> NDArray[Any]:
    kinds: dict[int, np.dtype[Any]] = {
        records().DTYPE_FLOAT32: np.dtype(np.float32),
        records().DTYPE_INT64: np.dtype(np.int64),
    }
    if record.dtype not in kinds:
        raise InputError(f"{where} must be float32 or int64, got the type {record.dtype}; convert it")
    dtype, shape = kinds[record.dtype], tuple(record.shape)
    if min(shape, default=0) < 0 or prod(shape) > MAX_CELLS:
        raise InputError(f"{where} may have at most {MAX_CELLS} numbers, got the shape {shape}")
    if record.WhichOneof("encoding") != "sparse_csr":
        return _shaped(_numbers(record.dense, dtype, where), shape, where)
    wide = np.dtype(np.int64)
    csr = record.sparse_csr
    return _from_csr(
        _numbers(csr.values, dtype, where),
        _numbers(csr.crow_indices, wide, where),
        _numbers(csr.col_indices, wide, where),
        shape,
        where,
    )


def _shaped(values: NDArray[Any], shape: tuple[int, ...], where: str) -> NDArray[Any]:
    if not shape:
        return values
    if prod(shape) != values.size:
        raise InputError(f"{where} has the shape {shape} but {values.size} numbers")
    return values.reshape(shape)


def _from_csr(
    values: NDArray[Any], starts: Int64Array, columns: Int64Array, shape: tuple[int, ...], where: str, fill: int = 0
) -> NDArray[Any]:
    sizes = np.diff(starts)
    is_right = len(shape) == 2 and starts.size == shape[0] + 1 and starts[0] == 0 and bool((sizes >= 0).all())
    is_right = is_right and starts[-1] == values.size == columns.size
    if not is_right or (columns.size and not 0 <= int(columns.min()) <= int(columns.max()) < shape[1]):
        raise InputError(f"{where} is a sparse matrix (CSR) with indices that do not fit {shape}; correct them")
    dense = np.full(shape, fill, values.dtype)
    dense[np.repeat(np.arange(shape[0]), sizes), columns] = values
    return dense


def forward_backward_answer(logprobs: Sequence[NDArray[np.float64]], metrics: Mapping[str, float]) -> bytes:
    """Return the record of an answer: the log-probs of each datum, grouped by width."""
    answer = records().ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(metrics))
    for trailing, group in groupby(logprobs, lambda each: each.shape[1:]):
        parts = [each.astype(np.float32) for each in group]
        record = answer.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(parts))
        field = record.fields["logprobs"]
        field.data = b"".join(each.tobytes() for each in parts)
        field.offsets = np.cumsum([0, *(each.nbytes for each in parts)], dtype=np.int64).tobytes()
        field.dtype = records().DTYPE_FLOAT32
        field.trailing_shape.extend(trailing)
    answer_bytes: bytes = answer.SerializeToString()
    return answer_bytes


_NOTHING = -99999.0
"""Log-prob of a position without a token."""
Sampled = tuple[TokenIds, Sequence[float], str]
"""Tokens of a sample, their log-probs, and why it ended."""


def sample_answer(
    num_prompt: int,
    samples: Sequence[Sampled],
    scores: PromptScores | None,
    tops: Sequence[TopTokens],
    *,
    has_logprobs: bool,
    last_n: int,
    layout: Mapping[str, Any] | None,
) -> bytes:
    """Return the record of the answer of `asample`.

    Args:
        num_prompt: tokens of the prompt.
        samples: of the prompt.
        scores: of the prompt; None if not requested.
        tops: likeliest tokens of each sample's whole sequence; empty if not requested.
        has_logprobs: whether log-probs of the prompt's tokens are requested.
        last_n: number of tokens at the end of the prompt that get them.
        layout: of the targets; None if not requested.
    """
    answer = records().SampleResponse()
    for number, (tokens, logprobs, reason) in enumerate(samples):
        sequence = answer.sequences.add(tokens=tokens.tobytes(), logprobs=np.array(logprobs, np.float32).tobytes())
        sequence.stop_reason = records().STOP_REASON_STOP if reason == "stop" else records().STOP_REASON_LENGTH
        if tops:
            sequence.topk_sampled_logprobs.CopyFrom(_top(tops[number], num_prompt))
    if scores is None:
        return answer.SerializeToString()  # type: ignore[no-any-return]
    left_out = np.arange(num_prompt) < max(1, num_prompt - last_n)
    if has_logprobs:
        answer.prompt_logprobs = np.where(left_out, np.nan, scores.logprobs).astype(np.float32).tobytes()
    if scores.top is not None:
        top = tuple(
            np.where(left_out[:, None], nothing, each) for each, nothing in zip(scores.top, (0, _NOTHING), strict=True)
        )
        answer.topk_prompt_logprobs.CopyFrom(_top(top, 0))
    if layout is not None and scores.targets is not None:
        found = answer.target_prompt_logprobs
        found.dtype = records().DTYPE_FLOAT32
        found.shape.extend(scores.targets.shape)
        values = scores.targets.astype(np.float32)
        starts, columns = layout.get("sparse_crow_indices"), layout.get("sparse_col_indices")
        if starts is None:
            found.dense = values.tobytes()
        else:
            rows = np.repeat(np.arange(values.shape[0]), np.diff(starts))
            found.sparse_csr.values = values[rows, columns].tobytes()
            found.sparse_csr.crow_indices = np.array(starts, np.int64).tobytes()
            found.sparse_csr.col_indices = np.array(columns, np.int64).tobytes()
    return answer.SerializeToString()  # type: ignore[no-any-return]


def _top(top: tuple[NDArray[Any], ...], first: int) -> Any:
    """Return the likeliest tokens of the positions from `first` on."""
    ids, logprobs = (each[first:] for each in top)
    return records().TopkLogprobs(
        token_ids=ids.astype(np.int32).tobytes(),
        logprobs=logprobs.astype(np.float32).tobytes(),
        k=ids.shape[1],
        length=ids.shape[0],
    )


def take_prompt_chunks(fields: Fields) -> TokenIds:
    """Take the prompt out of the body of `asample`, int32 [N].

    Raises:
        InputError: it is missing or malformed.
        UnsupportedError: it has images or audio.
    """
    prompt = Fields(fields.need("prompt", dict), "prompt")
    tokens: list[object] = []
    for i, chunk in enumerate(prompt.need("chunks", list)):
        part = Fields(chunk, f"prompt.chunks[{i}]")
        if (kind := part.take("type", str, "encoded_text")) != "encoded_text":
            raise UnsupportedError(f"prompt.chunks[{i}] is {kind}, but this server reads only token ids; remove it")
        tokens += part.need("tokens", list)
        part.end()
    prompt.end()
    return token_ids(tokens, "prompt")


def take_matrix(
    fields: Fields, name: str, num_rows: int, vocab_size: int
) -> tuple[Int64Array, Mapping[str, Any]] | None:
    """Take a matrix of token ids [num_rows, K], -1 for an empty cell, and the fields that describe its layout.

    Raises:
        InputError: it is malformed.
    """
    given = fields.take(name, dict, {})
    if not given:
        return None
    try:
        values = np.array(given["data"], np.int64)
        shape = tuple(int(size) for size in given["shape"])
        starts, columns = given.get("sparse_crow_indices"), given.get("sparse_col_indices")
        if len(shape) != 2 or shape[0] != num_rows or prod(shape) > MAX_CELLS:
            raise InputError(f"{name} must have {num_rows} rows, one less than the prompt has tokens, got {shape}")
        if starts is None:
            found = _shaped(values, shape, name)
        else:
            found = _from_csr(values, np.array(starts, np.int64), np.array(columns, np.int64), shape, name, -1)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{name} must be a matrix of token ids (data, shape), got {show(given)}: {error}") from None
    if found.size == 0 or found.max() < 0 or found.min() < -1 or found.max() >= vocab_size:
        raise InputError(f"{name} must have token ids, or -1 for an empty cell, got {show(given)}")
    return found, given
