"""Two seats, both trained: one sees a letter and says one byte, the other hears the byte and says the letter."""

from treering.rl.environments import Environment, EnvTask, Outcome


class TwoSeats(Environment):
    """The closer the second seat's byte is to the letter, the better for both; the first is paid for clarity too."""

    tasks = tuple(EnvTask(id=letter, data=ord(letter)) for letter in "aemquy")

    async def run(self, task, policy):
        speaker, listener = policy.agent("speaker"), policy.agent("listener")
        said = await speaker.sample(policy.encode(f"speaker {task.id}:"), max_tokens=1)
        heard = await listener.sample([*policy.encode("listener "), said.tokens[0], *policy.encode(":")], max_tokens=1)
        close = 1 - abs(int(heard.tokens[0]) - task.data) / 258
        clear = 1 - abs(int(said.tokens[0]) - task.data) / 258
        return Outcome(reward=close, rewards={"speaker": (close + clear) / 2}, numbers={"close": close})
