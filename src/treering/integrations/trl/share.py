"""`share_prefixes`: make a TRL trainer compute each shared prefix once, from its next training step on."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from treering.integrations.trl.grouping import Batching, keep_together
from treering.integrations.trl.trl_trainers import (
    Overrides,
    check_comparable,
    check_no_dropout,
    check_trainer,
    compiler_options,
    kind_of,
    models_of,
    without_host,
)
from treering.integrations.trl.verification import Difference, FirstMicroBatch
from treering.model.context import tree_attention
from treering.model.patch import TreePatch, patch

_MARK = "_treering_shared_prefixes"


class SharedPrefixes:
    """Handle of a trainer that shares prefixes; `undo` restores the trainer."""

    def __init__(self, trainer: Any, *, backend: str, group_batches: bool | None, verify_first: bool) -> None:
        """Patch the trainer with the options of `share_prefixes`."""
        kind = kind_of(trainer)
        check_trainer(trainer)
        if verify_first:
            check_comparable(trainer)
        check_no_dropout(trainer.model, "policy")
        models = models_of(trainer)
        with tree_attention(trainer.model, backend) as chosen:
            self._backend = chosen
        self._trainer = trainer
        self._totals = [0, 0]
        self._overrides = Overrides(trainer)
        with ExitStack() as on_error:
            on_error.callback(self.undo)
            self._patches: list[TreePatch] = []
            for model in models.values():
                patched = patch(without_host(model), backend=backend, mode_of=trainer.model)
                self._patches.append(patched)
                if trainer.args.torch_compile:
                    patched.compile_layers(**compiler_options(trainer))
            self._first = FirstMicroBatch(trainer, self._patches) if verify_first else None
            self._batching = keep_together(trainer, kind, self._overrides, is_on=group_batches)
            self._overrides.replace("compute_loss", self._compute_loss)
            self._overrides.replace("log", self._log)
            setattr(trainer, _MARK, self)
            on_error.pop_all()
        trainer.accelerator.print(self.summary(list(models)))

    @property
    def difference(self) -> Difference | None:
        """Result of `verify_first`; None without it, or before the first micro-batch with a gradient."""
        return self._first.difference if self._first else None

    @property
    def batching(self) -> Batching:
        """Grouping of rows into micro-batches, and the resulting bound if it is known."""
        return self._batching

    def summary(self, roles: list[str]) -> str:
        """Return one line: what is shared, the backend, the order of rows, and the bound on this data."""
        shared = " and ".join(roles)
        return (
            f"treering: {type(self._trainer).__name__} shares prefixes of its {shared} on backend "
            f"{self._backend.backend} ({self._backend.reason}); {self._batching.words}"
        )

    def undo(self) -> None:
        """Restore the trainer and its models; a second call does nothing."""
        self._overrides.undo()
        for patched in self._patches:
            patched.undo()
        self._trainer.__dict__.pop(_MARK, None)

    def _compute_loss(self, original: Callable[..., Tensor], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._trainer.model.training:
            return original(model, inputs, *args, **kwargs)
        if self._first is not None:
            self._first.check(original, inputs, kwargs.get("num_items_in_batch"))
        loss = original(model, inputs, *args, **kwargs)
        counts = [patched.take_counts() for patched in self._patches]
        mine = [sum(c.num_flat_tokens for c in counts), sum(c.num_tokens for c in counts)]
        accelerator = self._trainer.accelerator
        if accelerator.num_processes > 1:
            mine = accelerator.reduce(torch.tensor(mine, device=accelerator.device), reduction="sum").tolist()
        self._totals = [total + new for total, new in zip(self._totals, mine, strict=True)]
        return loss

    def _log(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self._trainer.model.training and self._totals[1]:
            num_flat, num_tokens = self._totals
            metrics = self._trainer._metrics["train"]
            metrics["tree/token_ratio"] = [num_flat / num_tokens]
            metrics["tree/sharing"] = [1 - num_tokens / num_flat]
            metrics["tree/tokens_computed"] = [float(num_tokens)]
            self._totals = [0, 0]
        original(*args, **kwargs)


def share_prefixes(
    trainer: Any, *, backend: str = "auto", group_batches: bool | None = None, verify_first: bool = True
) -> SharedPrefixes:
    """Make a TRL trainer compute each shared prefix once, forward and backward, in its policy and its reference.

    Call it before `trainer.train()`. Losses, gradients and logged metrics equal the trainer's up to rounding;
    evaluation and generation run as before. The trainer logs `tree/token_ratio` (the stock path's tokens per computed
    token), `tree/sharing` (1 - its inverse) and `tree/tokens_computed`, summed over ranks since its last log.

    Args:
        trainer: a GRPOTrainer, RLOOTrainer, SFTTrainer, DPOTrainer, KTOTrainer or DistillationTrainer of TRL.
        backend: backend of `treering.tree_attention`.
        group_batches: put rollouts of a prompt (GRPO, RLOO) or rows of a task (SFT, DPO, KTO without KL) into the same
            micro-batch. None: group unless that would change gradients of rollouts, as with bnpo, an entropy quantile
            or bonus, router losses, or generations for several steps. Grouping changes logged means of micro-batches,
            and in SFT, DPO and KTO which rows an optimizer step sees; the printed line names the changes.
        verify_first: compare the first micro-batch's gradients with the stock path's; costs three more passes, once.

    Returns:
        Handle whose `undo()` restores the trainer.

    Raises:
        UnsupportedError: a trainer, model or setting with which results would not be exact; names it and the fix.
        StateError: the trainer already shares prefixes, or its model is wrapped. In training: gradients of the first
            micro-batch differ by more than rounding.
        ConfigError: `group_batches` without tokens to group by.

    Example:
        >>> trainer = GRPOTrainer(...)                                      # doctest: +SKIP
        >>> share_prefixes(trainer)                                         # doctest: +SKIP
        >>> trainer.train()                                                 # doctest: +SKIP
    """
    return SharedPrefixes(trainer, backend=backend, group_batches=group_batches, verify_first=verify_first)
