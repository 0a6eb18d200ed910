"""Drafts across turns: what earlier episodes of a task said after the same observation, and not a token more."""

import pytest
from transformers import PreTrainedModel

from tests.rl.environments.worlds import TURN_END, WORLDS, engine_of, model_of, task_of
from treering.engine.protocol import EngineStats, Sampling
from treering.rl.drafting import Drafting
from treering.rl.environments.collect_episodes import collect_episodes

# Nearly greedy, so that a policy that does not move repeats itself.
SAMPLING = Sampling(max_tokens=500, stop_tokens=(TURN_END,), temperature=0.05)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return model_of()


def epochs(
    model: PreTrainedModel, name: str, drafting: Drafting | None, max_turn_tokens: int
) -> list[tuple[list[list[int]], EngineStats]]:
    """Return the tokens and the work of two epochs of two tasks in groups of two."""
    task = task_of(WORLDS[name](), max_turn_tokens=max_turn_tokens)
    engine = engine_of(model, drafter=None if drafting is None else drafting.drafter, costs="none")
    found = []
    for draw in range(2):
        before = engine.stats
        collected = collect_episodes(
            engine,
            task,
            task.prompts[:2],
            {prompt.prompt_id: draw for prompt in task.prompts},
            group_size=2,
            sampling=SAMPLING,
            on_finished=None if drafting is None else drafting.add,
        )
        if drafting is not None:
            drafting.publish()
            engine.refresh_history()
        tokens = [rollout.tokens.tolist() for group in collected.groups for rollout in group.rollouts]
        found.append((tokens, engine.stats.since(before)))
    return found


@pytest.mark.parametrize("name", ["Rerendered", "TwoSeats"])
def test_the_second_epoch_drafts_turns_from_their_first_token_and_samples_the_same(
    model: PreTrainedModel, name: str
) -> None:
    plain, drafted = (epochs(model, name, drafting, max_turn_tokens=2) for drafting in (None, Drafting()))
    assert [tokens for tokens, _ in drafted] == [tokens for tokens, _ in plain]
    # In a turn of two tokens, no draft may be longer than one.
    assert drafted[1][1].tokens_per_forward >= 1.5
    assert plain[1][1].tokens_per_forward == 1.0
