import tempfile
from collections.abc import Sequence
from pathlib import Path

from treering.data import RenderedTrajectory
from treering.data.cache.dataset import ArrayWriter, DatasetFacts, TokenDataset


def dataset_of(rows: Sequence[RenderedTrajectory], *, source: str = "set.jsonl") -> TokenDataset:
    """Return the rows as a dataset whose files are already deleted."""
    num_trajectories = max(row.index for row in rows) + 1
    facts = DatasetFacts(
        source=source, num_trajectories=num_trajectories, num_rejected=0, warnings=(), notes=(), form=None,
        tokenizer=None,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        with ArrayWriter(Path(folder)) as writer:
            writer.add(rows)
        return TokenDataset(Path(folder), facts)
