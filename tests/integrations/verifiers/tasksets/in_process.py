"""A harness that samples from the environment's process, instead of launching a script."""

import httpx
import verifiers.v1 as vf

_CLIENT = None


def client():
    global _CLIENT
    _CLIENT = _CLIENT or httpx.AsyncClient(timeout=600)
    return _CLIENT


class Chat:
    """Chat that samples its next turn."""

    def __init__(self, ctx, endpoint, secret, tools=()):
        self.model, self.url, self.secret, self.tools = ctx.model, f"{endpoint}/chat/completions", secret, list(tools)

    async def ask(self, messages):
        body = {"model": self.model, "messages": messages}
        if self.tools:
            body["tools"] = self.tools
        answer = await client().post(self.url, json=body, headers={"Authorization": f"Bearer {self.secret}"})
        answer.raise_for_status()
        return answer.json()["choices"][0]["message"]


class InProcess(vf.Harness[vf.HarnessConfig]):
    """Harness that runs `play(chat, data)` in this process."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    TOOLS = ()

    async def play(self, chat, data):
        raise NotImplementedError

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        await self.play(Chat(ctx, endpoint, secret, self.TOOLS), data)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
