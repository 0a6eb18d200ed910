"""The ablation: which variants are replayed, and that drafts are equal."""

import json
from pathlib import Path

from benchmarks.draft.ablation import VARIANTS, main

from tests.benchmarks.draft.drafting import write


def test_every_policy_and_shape_drafts_no_more_than_the_tree_by_frequency_does(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    main([str(write(tmp_path, epochs=4)), "--out", str(out)])
    found = json.loads(out.read_text())["rows"]
    rows = {(row["drafter"], row["shape"], row["drafts"]): row for row in found}
    assert list(rows) == [(*variant, drafts) for variant in VARIANTS for drafts in ("shipped", "equal")]
    reference = rows["treering_frequency", "tree", "shipped"]
    # Its own drafts are equal as they are.
    assert rows["treering_frequency", "tree", "equal"] == reference | {"drafts": "equal", "ratio_to_frequency": 1.0}
    for (*_, drafts), row in rows.items():
        assert (row["recording"], row["history"]) == ("rollouts", "recent")
        if drafts == "equal":
            assert row["drafted_per_step"] <= reference["drafted_per_step"]
            assert row["ratio_to_frequency"] == row["tokens_per_step"] / reference["tokens_per_step"]
    tree, chain = (rows["treering", shape, "shipped"] for shape in ("tree", "chain"))
    assert tree["drafted_per_step"] > chain["drafted_per_step"]
