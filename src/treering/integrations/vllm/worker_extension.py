"""What a loop may ask of the drafter in each vLLM worker, by `llm.collective_rpc(NAME)`."""

from typing import Any

from treering.errors import StateError
from treering.integrations.vllm.array_bytes import packed, unpacked
from treering.integrations.vllm.exact_sampling import install
from treering.integrations.vllm.proposer import HistoryProposer


class WorkerExtension:
    """Methods for vLLM's `worker_extension_cls`; results are such that vLLM can send them between processes.

    Example: `LLM(model, worker_extension_cls="treering.integrations.vllm.WorkerExtension", ...)`, and after a publish
    `llm.collective_rpc("treering_refresh")`.
    """

    model_runner: Any

    def treering_refresh(self) -> bool:
        """Reads the newest publish of the history now; returns whether there was a newer one.

        Raises:
            StateError: another drafter runs here.
        """
        history = self._treering_proposer().session.history
        return False if history is None else history.refresh()

    def treering_state(self) -> bytes:
        """What the drafter has learnt, for a checkpoint: arrays as the bytes of an .npz file.

        Raises:
            StateError: another drafter runs here.
        """
        return packed(self._treering_proposer().session.requests.drafter.state())

    def treering_load_state(self, state: bytes) -> None:
        """Continues from a `treering_state`; running rows are forgotten.

        Raises:
            StateError: another drafter runs here.
            InputError: a state of another kind.
        """
        session = self._treering_proposer().session
        session.requests.drafter.load_state(unpacked(state))
        session.requests.forget()

    def treering_stats(self) -> dict[str, Any]:
        """Counts so far: steps, rows, seconds of drafting, tokens drafted and accepted, prompts, failed steps.

        "history" is the folder of the history, None without one.

        Raises:
            StateError: another drafter runs here.
        """
        proposer = self._treering_proposer()
        session = proposer.session
        return {
            "num_steps": session.num_steps,
            "num_rows": session.num_rows,
            "propose_s": session.propose_s,
            "num_drafted": session.requests.num_drafted,
            "num_accepted": session.requests.num_accepted,
            "num_prompts": session.num_prompts,
            "num_failures": proposer.num_failures,
            "has_identity": proposer.has_identity,
            "history": None if session.folder is None else str(session.folder),
        }

    def treering_verify(self, verification: str) -> str | None:
        """Sets how drafts are verified, see `Verification`; returns why it cannot, or None."""
        return install(self.model_runner, verification)

    def _treering_proposer(self) -> HistoryProposer:
        drafter = getattr(self.model_runner, "drafter", None)
        if not isinstance(drafter, HistoryProposer):
            raise StateError(
                f"this worker drafts with {type(drafter).__name__}; set speculative_config's model to "
                "treering.integrations.vllm.HistoryProposer"
            )
        return drafter
