"""Small environments of every tree shape, and an engine that samples for them."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tests.models import build_float64
from treering.engine.protocol import Sampling
from treering.engine.torch_engine import TorchEngine
from treering.rl.collect import Collected
from treering.rl.environments.chat import BYTES_FOLDER, ChatTokens
from treering.rl.environments.collect_episodes import collect_episodes
from treering.rl.environments.environment import Environment, EnvironmentTask, EnvTask, EpisodeOptions, Outcome
from treering.rl.environments.policy_calls import Call, Policy, Session

VOCAB = 258
TURN_END = 257
TASKS = [EnvTask(id=f"t{i}", data=i) for i in range(4)]


def user(text: str) -> Mapping[str, Any]:
    return {"role": "user", "content": text}


class World(Environment):
    """Environment that rewards what was said, so that rewards differ within a group."""

    tasks = TASKS

    def reward(self, texts: Sequence[str]) -> float:
        return sum(map(len, texts)) % 5 / 4


class Linear(World):
    """Environment with four turns of one chat."""

    async def run(self, task: EnvTask, policy: Policy) -> float:
        messages, texts = [user(f"task {task.data}")], []
        for turn in range(4):
            reply = await policy.chat(messages)
            messages += [reply.message, user(f"and {turn}")]
            texts.append(reply.text)
        return self.reward(texts)


class Rerendered(World):
    """Environment of four turns, each of which shows the earlier ones differently, such as without their thoughts."""

    async def run(self, task: EnvTask, policy: Policy) -> float:
        history, texts = [user(f"task {task.data}, at some length, as prompts are")], []
        for turn in range(4):
            reply = await policy.chat(history)
            history += [{"role": "assistant", "content": f"answer {turn}"}, user(f"and then, after turn {turn}?")]
            texts.append(reply.text)
        return self.reward(texts)


class Compacting(World):
    """Environment of two turns, then a summary in place of the history, and two more turns."""

    async def run(self, task: EnvTask, policy: Policy) -> float:
        messages, texts = [user(f"task {task.data}, which is long enough to be shared")], []
        for turn in range(4):
            reply = await policy.chat(messages)
            texts.append(reply.text)
            messages += [reply.message, user(f"go on {turn}")]
            if turn == 1:
                messages = [user(f"task {task.data}, which is long enough to be shared, so far {len(texts[0])}")]
        return self.reward(texts)


class SubAgents(World):
    """Environment of three sub-agents at the same time, from one question, then an answer; they end in any order."""

    order: Sequence[int] = (0, 0, 0)

    async def run(self, task: EnvTask, policy: Policy) -> float:
        question = user(f"task {task.data}, to be split among you three, each with a part of it")

        async def one(number: int) -> str:
            for _ in range(self.order[number]):
                await asyncio.sleep(0)
            reply = await policy.chat([question, user(f"part {number}")])
            return reply.text

        texts = await asyncio.gather(*(one(number) for number in range(3)))
        last = await policy.chat([question, *(user(text) for text in texts)])
        return self.reward([*texts, last.text])


class TwoSeats(World):
    """Environment of two trained players and a judge that is not trained."""

    async def run(self, task: EnvTask, policy: Policy) -> Outcome:
        seats = {name: policy.agent(name) for name in ("first", "second")}
        judge = policy.agent("judge", trainable=False)
        said = []
        for turn in range(2):
            for name, seat in seats.items():
                reply = await seat.chat([user(f"You are {name}, card {task.data}."), user(f"{turn} {len(said)}")])
                said.append(reply.text)
        verdict = await judge.chat([user("Who won?"), user(" ".join(map(str, map(len, said))))])
        return Outcome(reward=self.reward(said), rewards={"second": 1 - self.reward([verdict.text])})


class Resampling(World):
    """Environment that asks the same question again and again, as tokens."""

    async def run(self, task: EnvTask, policy: Policy) -> float:
        context = policy.encode(f"task {task.data}")
        found = [await policy.sample(context, max_tokens=2, stop=[65]) for _ in range(6)]
        return self.reward([policy.decode(each.tokens) for each in found])


class Tools(World):
    """Environment of a chat with a tool's observation after each turn, whatever the turn says."""

    async def run(self, task: EnvTask, policy: Policy) -> float:
        messages, texts = [user(f"task {task.data}")], []
        for turn in range(3):
            reply = await policy.chat(messages, tools=[SCHEMA])
            messages += [reply.message, {"role": "tool", "content": f"found {len(reply.text)}"}]
            texts.append(f"{turn}{reply.text}")
        return self.reward(texts)


SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

WORLDS: dict[str, type[World]] = {
    world.__name__: world for world in (Linear, Tools, Rerendered, Compacting, SubAgents, TwoSeats, Resampling)
}


def model_of() -> PreTrainedModel:
    return build_float64("qwen3", vocab_size=VOCAB).eval()


def task_of(environment: Environment, tokenizer: Path = BYTES_FOLDER, **options: Any) -> EnvironmentTask:
    given = {"max_rows": 8, "max_turn_tokens": 8, **options}
    return EnvironmentTask(environment, ChatTokens(tokenizer), EpisodeOptions(**given))


def engine_of(model: PreTrainedModel, **options: Any) -> TorchEngine:
    return TorchEngine(model, **{"max_batch": 8, "max_tokens": 20000, "max_prefill": 4096, **options})


class Watched:
    """Environment that records the calls of every session with their answers."""

    def __init__(self, monkeypatch: Any) -> None:
        self.calls: dict[tuple[Any, ...], list[Call]] = {}
        ask = Session.ask

        async def watched(session: Session, agent: str, context: Any, sampling: Sampling) -> Call:
            call = await ask(session, agent, context, sampling)
            key = (session.prompt_id, session.sample, agent, session.trainable[agent])
            self.calls.setdefault(key, []).append(call)
            return call

        monkeypatch.setattr(Session, "ask", watched)


def collect(engine: TorchEngine, task: EnvironmentTask, num_tasks: int = 1, group_size: int = 8) -> Collected:
    return collect_episodes(
        engine,
        task,
        task.prompts[:num_tasks],
        {},
        group_size=group_size,
        sampling=Sampling(max_tokens=500, stop_tokens=(TURN_END,)),
    )
