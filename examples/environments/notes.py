"""A history that is rewritten: the policy reads numbers one by one, and keeps nothing but its own last note."""

from treering.rl.environments import Environment, EnvTask


class Notes(Environment):
    """Each turn shows the note and the next number; the last note should be near the largest number."""

    tasks = tuple(EnvTask(id=text, data=text.split()) for text in ("1 5 2", "9 3 4", "2 2 7", "6 8 0"))

    async def run(self, task, policy):
        note = "-"
        for number in task.data:
            reply = await policy.chat([{"role": "user", "content": f"note {note}, number {number}"}], max_tokens=1)
            note = reply.text or "-"
        return max(0.0, 1 - abs(ord(note[0]) - ord(max(task.data))) / 64)
