"""`TreeEngine`: verl's FSDP engine of language models that computes each distinct token of a micro-batch once.

Only the plugin imports this file, because it needs verl. Tree code is imported with the first batch, so that processes
that only sample never load it.
"""

import pickle
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.seqlen_balancing import restore_dynamic_batch
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import detach_tree, postprocess_batch_func

from treering.arrays import Int32Array, Int64Array
from treering.errors import UnsupportedError
from treering.integrations.verl.verl_settings import OPTIONS, check_batch, check_rows, check_settings, grouping

if TYPE_CHECKING:
    from treering.tree.forest import Forest


class RowExchange:
    """Exchange that sends rows to their ranks, and outputs back.

    Every rank owns the same number of rows, in order, and knows the rank of every row. All ranks call each method
    together.
    """

    def __init__(self, rank_of_row: Int64Array, group: dist.ProcessGroup, device: Any) -> None:
        """Set up with `rank_of_row`, int64 [B] over the rows of all ranks; send bytes over `device`."""
        self._group, self._device = group, device
        size, own = dist.get_world_size(group), dist.get_rank(group)
        by_owner = rank_of_row.reshape(size, -1)
        self._sent = [np.flatnonzero(by_owner[own] == rank).tolist() for rank in range(size)]
        """Own rows that each rank computes."""
        self._num_received = (by_owner == own).sum(1).tolist()
        """Number of each rank's rows that this one computes."""

    def there(self, data: Any) -> Any:
        """Send this rank's rows; return those that it computes, by owner, as a TensorDict."""
        data = data.to("cpu")
        parts = [tu.index_select_tensor_dict(data, rows) if rows else None for rows in self._sent]
        return tu.concat_tensordict([part for part in self._swapped(parts) if part is not None])

    def back(self, outputs: dict[str, Any]) -> dict[str, Any]:
        """Send computed outputs back; return those of the rows that this rank owns, in order, as nested tensors."""
        ends = np.cumsum(self._num_received)
        rows = {name: [row.cpu() for row in value.unbind()] for name, value in outputs.items()}
        parts = [
            {name: values[end - count : end] for name, values in rows.items()}
            for count, end in zip(self._num_received, ends, strict=True)
        ]
        order = np.argsort(np.concatenate(self._sent))
        received = self._swapped(parts)
        joined = {name: [row for part in received for row in part[name]] for name in outputs}
        return {
            name: torch.nested.as_nested_tensor([values[i] for i in order], layout=torch.jagged)
            for name, values in joined.items()
        }

    def _swapped(self, parts: Sequence[Any]) -> list[Any]:
        """Send `parts[rank]` to each rank, and return what each rank sends to this one."""
        blobs = [torch.frombuffer(bytearray(pickle.dumps(part)), dtype=torch.uint8) for part in parts]
        sizes = torch.tensor([blob.numel() for blob in blobs], device=self._device)
        incoming = torch.empty_like(sizes)
        dist.all_to_all_single(incoming, sizes, group=self._group)
        counts = incoming.tolist()
        received = torch.empty(sum(counts), dtype=torch.uint8, device=self._device)
        dist.all_to_all_single(received, torch.cat(blobs).to(self._device), counts, sizes.tolist(), group=self._group)
        return [pickle.loads(blob.numpy().tobytes()) for blob in torch.split(received.cpu(), counts)]


def make_exchange(
    own: tuple[Sequence[Int32Array], Sequence[Hashable]] | None, group: dist.ProcessGroup, device: Any
) -> RowExchange | None:
    """Return the exchange that makes groups whole, the same on all ranks; None if every row stays.

    Args:
        own: token ids and group of each row of this rank; None keeps all rows of all ranks in place.
        group: of the ranks, which all call this together.
        device: device that the group can send from.
    """
    from treering.integrations.verl.row_groups import dealt_rows, share_rows
    from treering.tree.forest import Forest

    size = dist.get_world_size(group)
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, own, group=group)
    if None in gathered or len({len(rows) for rows, _ in gathered}) > 1:
        return None
    rows, groups = ([each for part in parts for each in part] for parts in zip(*gathered, strict=True))
    rank_of_row = share_rows(Forest.from_sequences(rows), groups, size)
    if (rank_of_row == dealt_rows(len(rows), size)).all():
        return None
    return RowExchange(rank_of_row, group, device)


def prompts_of(data: Any) -> list[Hashable]:
    """Return the group of each row: its prompt's tokens, or in supervised training the row itself."""
    prompts = data.get("prompts", None)
    if prompts is None:
        return list(range(len(data)))
    return [row.cpu().numpy().tobytes() for row in prompts.unbind()]


class TreeEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """Engine that trains as verl's own FSDP2 engine does, with the same gradients but fewer computed tokens.

    verl's loss functions get log-probabilities and entropies in their usual layout. Micro-batches are planned by
    distinct tokens, with rows of a prompt together: `ppo_max_token_len_per_gpu` counts distinct tokens. If verl dealt a
    group to several ranks, they first swap rows, unless `TREERING_VERL_GROUPS=as_dealt`.

    Raises:
        UnsupportedError: a setting or model that would not be exact; names it and what to set.
        ConfigError: an unknown value of `TREERING_VERL_GROUPS`.
    """

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        """Create verl's engine; refuse unsupported settings before anything is loaded."""
        if get_device_name() not in ("cuda", "cpu"):
            raise UnsupportedError(
                f"the tree engine has no attention for {get_device_name()} devices: unset VERL_ENGINE_VENDOR"
            )
        check_settings(model_config, engine_config)
        self._keeps_groups = grouping() != "as_dealt"
        super().__init__(model_config, engine_config, *args, **kwargs)

    def initialize(self) -> None:
        """Build the model as verl does, and refuse one that would not be exact."""
        from treering.model.context import tree_attention

        super().initialize()
        self.module.train(not self.engine_config.forward_only)
        with tree_attention(self.module):
            pass

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """Run a batch by verl's contract: return outputs in the order of rows, and losses and metrics."""
        names = (*OPTIONS, "global_batch_size")
        check_batch({name: tu.get_non_tensor_data(data, key=name, default=None) for name in names}, loss_function)
        check_rows(data["position_ids"], tu.get(data, "multi_modal_inputs"))
        exchange = self._exchange(data)
        if exchange is not None:
            data = exchange.there(data)
        keeps_outputs = forward_only or tu.get_non_tensor_data(data, key="return_model_output", default=False)
        self._assign_totals(data)
        micro_batches = self._micro_batches(data)
        outputs = []
        for number, rows in enumerate(micro_batches):
            is_last = number == len(micro_batches) - 1
            with self._around(forward_only, is_last):
                output = self._run(tu.index_select_tensor_dict(data, rows), loss_function, forward_only)
            if not keeps_outputs:
                output.pop("model_output")
            outputs.append(output)
        output = _in_order(
            postprocess_batch_func(output_lst=outputs, indices=micro_batches, data=data), micro_batches, data
        )
        if exchange is not None and keeps_outputs:
            output["model_output"] = exchange.back(output["model_output"])
        return output

    def forward_step(self, micro_batch: Any, loss_function: Callable[..., Any] | None, forward_only: bool) -> Any:
        """Run a micro-batch by verl's contract: return its loss, outputs and metrics."""
        micro_batch = micro_batch.to(get_device_id())
        with self._autocast():
            model_output, ratio = self._tree_outputs(micro_batch)
            if loss_function is None:
                loss, metrics = torch.tensor(1.0, device=get_device_name()), {}
            else:
                group = self.get_data_parallel_group()
                loss, metrics = loss_function(model_output=model_output, data=micro_batch, dp_group=group)
        if not forward_only:
            metrics = {**metrics, "tree/token_ratio": ratio}
        return loss, {"model_output": detach_tree(model_output), "loss": loss.detach().item(), "metrics": metrics}

    def _run(self, micro_batch: Any, loss_function: Callable[..., Any] | None, forward_only: bool) -> dict[str, Any]:
        loss, output = self.forward_step(micro_batch, loss_function=loss_function, forward_only=forward_only)
        if not forward_only:
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return output  # type: ignore[no-any-return]

    def _around(self, forward_only: bool, is_last: bool) -> AbstractContextManager[Any]:
        """Return a context without gradients, or one that reduces them over ranks by verl's settings."""
        if forward_only:
            return torch.no_grad()
        return self._gradient_sync_context(is_last_micro_batch=is_last)  # type: ignore[no-any-return]

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self._autocast_dtype
        return nullcontext() if dtype == torch.float32 else torch.autocast(get_device_name(), dtype)

    def _assign_totals(self, data: Any) -> None:
        """Set the batch's token count over all ranks, and the number of ranks, by which FSDP averages, for the loss."""
        num_tokens = data["loss_mask"].sum().to(get_device_id())
        dist.all_reduce(num_tokens, group=self.get_data_parallel_group())
        tu.assign_non_tensor(data, batch_num_tokens=num_tokens.item(), dp_size=self.get_data_parallel_size())

    def _exchange(self, data: Any) -> RowExchange | None:
        """Return the exchange that makes groups whole; None if all rows stay."""
        group = self.get_data_parallel_group()
        if dist.get_world_size(group) == 1:
            return None
        is_wanted = self._keeps_groups and data.get("prompts", None) is not None
        return make_exchange((_rows(data), prompts_of(data)) if is_wanted else None, group, get_device_id())

    def _micro_batches(self, data: Any) -> list[list[int]]:
        """Return the rows of each micro-batch; every rank gets the same number of micro-batches."""
        from treering.integrations.verl.row_groups import plan_rows, split_rows

        is_dynamic = tu.get_non_tensor_data(data, key="use_dynamic_bsz", default=True)
        limit = data["max_token_len_per_gpu" if is_dynamic else "micro_batch_size_per_gpu"]
        limits = {"max_tokens" if is_dynamic else "max_rows": int(limit)}
        planned = plan_rows(self._forest(data), prompts_of(data), **limits)
        most = torch.tensor(len(planned), device=get_device_id())
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.get_data_parallel_group())
        return split_rows(planned, int(most))

    def _tree_outputs(self, micro_batch: Any) -> tuple[dict[str, Any], float]:
        """Return log-probabilities and requested entropies as nested tensors, and flat tokens per computed token."""
        from treering.integrations.verl.row_scoring import score_rows_once

        forest = self._forest(micro_batch)
        has_entropy = tu.get_non_tensor_data(micro_batch, key="calculate_entropy", default=False)
        scores = score_rows_once(
            self.module, forest, _temperatures(micro_batch), entropy_of="all" if has_entropy else "none"
        )
        offsets = micro_batch["input_ids"].offsets()
        outputs = {"log_probs": torch.nested.nested_tensor_from_jagged(scores.logprobs, offsets)}
        if has_entropy:
            outputs["entropy"] = torch.nested.nested_tensor_from_jagged(scores.entropy, offsets)
        return outputs, forest.num_branch_tokens / forest.num_tokens

    def _forest(self, data: Any) -> "Forest":
        """Merge the rows; the actor replays the experts that the rollout's server returned, a reference its own."""
        from treering.tree.forest import Forest

        return Forest.from_sequences(
            _rows(data), routed_experts=None if self.engine_config.forward_only else routes_of(data)
        )


def routes_of(data: Any) -> list[NDArray[np.int64]] | None:
    """Return the routed experts of each row, integers [tokens, layers, experts per token]; None without a replay.

    verl writes zeros where the server returned no route, such as at the last token; such a token has -1 here.

    Raises:
        UnsupportedError: a replay is asked for, and the rollout has no routes.
    """
    routes = data.get("routed_experts", None)
    is_wanted = tu.get_non_tensor_data(data, key="enable_routing_replay", default=None)
    if routes is None and is_wanted:
        raise UnsupportedError(
            "the tree engine replays routes of the rollout, and the batch has no routed_experts: set "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
        )
    if routes is None or is_wanted is False:
        return None
    rows = [row.cpu().numpy().astype(np.int64) for row in routes.unbind()]
    for row in rows:
        # Only with one expert per token can zeros be a route.
        row[(row == 0).all((1, 2)) & (row.shape[2] > 1)] = -1
    return rows


def _rows(data: Any) -> list[Int32Array]:
    return [row.cpu().numpy().astype(np.int32) for row in data["input_ids"].unbind()]


def _temperatures(data: Any) -> list[float]:
    """Return the temperature of each row, at least 1e-8 as in verl."""
    temperature = data["temperature"]
    given = temperature.tolist() if isinstance(temperature, torch.Tensor) else [float(temperature)] * len(data)
    return [max(value, 1e-8) for value in given]


def _in_order(output: dict[str, Any], micro_batches: Sequence[Sequence[int]], data: Any) -> dict[str, Any]:
    """Return outputs in the order of the batch's rows; verl itself restores it only for dynamic batching."""
    if tu.get_non_tensor_data(data, key="use_dynamic_bsz", default=True):
        return output
    restored = {name: restore_dynamic_batch(values, micro_batches) for name, values in output["model_output"].items()}
    return {**output, "model_output": restored}
