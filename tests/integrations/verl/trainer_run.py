"""verl's own trainer on CPU: `VERL_USE_EXTERNAL_MODULES` loads this file in each of the trainer's processes.

Torch's backend is gloo, CPU counts as a device, and a scripted server replaces the rollout engine. The trainer, its
queue, agent loops, rewards and workers are verl's.
"""

import os
from pathlib import Path
from typing import Any

import ray
import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from verl.plugin.platform import set_platform
from verl.workers.rollout import base, replica

from tests.integrations.verl.cpu import CpuPlatform
from tests.integrations.verl.script import ScriptedServer

FOLDER = "TREERING_TEST_FOLDER"
"""Variable that names the folder in which ranks save their results."""


class ScriptedReplica(replica.RolloutReplica):
    async def launch_servers(self) -> None:
        self._server_address = "script"
        self._server_handle = ray.remote(num_cpus=0)(ScriptedServer).remote()
        self.servers = [self._server_handle]


class ScriptedRollout(base.BaseRollout):
    """Rollout of a worker, a client of the scripted server, that saves the weights of each step to a file."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, global_steps: int = 0, **options: Any) -> None:
        kept = {name: weight.clone() for name, weight in weights}
        rank = torch.distributed.get_rank()
        saved = {"weights": kept, "tokens": _embedded.copy()}
        torch.save(saved, Path(os.environ[FOLDER]) / f"step{global_steps}-rank{rank}.pt")
        _embedded.clear()


_embedded: list[int] = []
"""Tokens of each call of this process's embeddings."""


def reward_of(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    """Return the share of even words."""
    words = [int(word[1:]) for word in solution_str.split() if word.startswith("w")]
    return sum(word % 2 == 0 for word in words) / max(1, len(words))


def _prepare() -> None:
    set_platform(CpuPlatform())
    stock_group, stock_embed = torch.distributed.init_process_group, torch.nn.Embedding.forward

    def init_process_group(backend: str | None = None, **options: Any) -> None:
        """Patch a worker; only workers call this, before they make their engines."""
        from verl.workers.engine import EngineRegistry
        from verl.workers.engine.fsdp import transformer_impl

        # References are offloaded to memory that torch pins for a device, but there is no device.
        transformer_impl.CPUOffloadPolicy = lambda pin_memory: CPUOffloadPolicy(pin_memory=False)
        stock = transformer_impl.FSDPEngineWithLMHead
        EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")(stock)
        stock_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **options)

    def embed(self: torch.nn.Embedding, tokens: torch.Tensor) -> torch.Tensor:
        _embedded.append(tokens.numel())
        return stock_embed(self, tokens)

    torch.distributed.init_process_group = init_process_group
    torch.nn.Embedding.forward = embed
    replica.RolloutReplicaRegistry.register("scripted", lambda: ScriptedReplica)
    base._ROLLOUT_REGISTRY["scripted", "async"] = f"{__name__}.{ScriptedRollout.__name__}"


_prepare()
