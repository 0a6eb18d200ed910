"""The worker's protocol without verifiers: episodes sample over HTTP and return traces, as their settings ask."""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request

OUT = os.fdopen(os.dup(1), "wb")
LOCK = threading.Lock()


def send(record):
    with LOCK:
        OUT.write(json.dumps(record).encode() + b"\n")
        OUT.flush()


class Agent:
    """Trace that records its samples."""

    def __init__(self, served, salt, name, trace_id, trainable=True):
        self.served, self.salt, self.id = served, salt, trace_id
        self.record = {
            "id": trace_id,
            "task": {"key": salt.split("|")[0]},
            "agent": {"name": name, "trainable": trainable},
            "nodes": [],
            "ok": True,
            "metrics": {"num_turns": 2.0},
        }

    def ask(self, context, parent, keep=0, **params):
        """Sample after a context, whose first `keep` ids are those of the parents."""
        params = {"max_tokens": 4, "stop_token_ids": [257], "logprobs": 1, **self.served["sampling"], **params}
        body = {"model": self.served["model"], "token_ids": context, "cache_salt": self.salt, "sampling_params": params}
        request = urllib.request.Request(
            f"{self.served['base_url']}/inference/v1/generate",
            json.dumps(body).encode(),
            {"X-Session-ID": self.id, "Content-Type": "application/json"},
        )
        ids = json.loads(urllib.request.urlopen(request, timeout=60).read())["choices"][0]["token_ids"]
        new = context[keep:]
        self.record["nodes"] += [
            {"parent": parent, "token_ids": new, "mask": [False] * len(new), "sampled": False},
            {"parent": len(self.record["nodes"]), "token_ids": ids, "mask": [True] * len(ids), "sampled": True},
        ]
        return [*context, *ids]

    def trace(self):
        total = sum(sum(node["token_ids"]) for node in self.record["nodes"])
        self.record["rewards"] = {"sum": {"score": total % 5 / 4, "weight": 1.0}}
        return {"id": self.id, "is_truncated": False, "record": self.record}


def episode(mode, served, key, salt, number):
    question = list(f"task {key}, at some length".encode())
    agent = Agent(served, salt, "agent", f"{os.urandom(8).hex()}")
    if mode == "seats":
        seats = [
            Agent(served, salt, name, f"{name}-{os.urandom(8).hex()}", name != "judge")
            for name in ("first", "second", "judge")
        ]
        for seat in seats:
            seat.ask(question, None)
        return [seat.trace() for seat in seats]
    path = agent.ask(question, None)
    if mode == "rerendered":
        agent.ask([*question, 65, 66], None)
        return [agent.trace()]
    agent.ask([*path, 65, 66], 1, keep=len(path))
    nodes = agent.record["nodes"]
    if mode == "altered":
        nodes[3]["token_ids"][0] ^= 1
    if mode == "lost":
        del nodes[2:]
    if mode == "invented":
        nodes.append({"parent": 3, "token_ids": [7], "mask": [True], "sampled": True})
    if mode == "rejected":
        nodes[3]["semantic_parents"] = [{"node": 1, "type": "compaction_attempt"}]
    if mode == "abandoned":
        Agent(served, salt, "agent", "abandoned").ask(question, None)
    if mode == "cold":
        agent.ask(question, None, temperature=0.5)
    found = agent.trace()
    if mode == "unrewarded":
        del found["record"]["rewards"]
    return [found]


def run(mode, served, record, number):
    name = record["episode"]
    if mode == "dies" and record["salt"].startswith("b"):
        os._exit(7)
    if mode == "hangs" and record["salt"].startswith("b"):
        return
    try:
        traces = episode(mode, served, record["key"], record["salt"], number)
    except Exception as error:
        text = error.read().decode() if hasattr(error, "read") else str(error)
        send(
            {
                "type": "result",
                "episode": name,
                "ok": False,
                "errors": [f"{type(error).__name__}: {text}"],
                "traces": [],
            }
        )
        return
    if mode == "raises" and record["salt"].startswith("b"):
        send({"type": "result", "episode": name, "ok": False, "errors": ["TaskError: planted"], "traces": traces})
        return
    send({"type": "result", "episode": name, "ok": True, "errors": [], "traces": traces})


def main():
    mode, served = "linear", {}
    print("a print of an environment", file=sys.stderr)
    for number, line in enumerate(sys.stdin):
        record = json.loads(line)
        if record["type"] == "start":
            mode = record["settings"].get("mode", mode)
            if mode == "refuses":
                send({"type": "refused", "error": "no taskset 'x'"})
                continue
            if mode == "leaves":
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
                with open(record["settings"]["file"], "w") as file:
                    file.write(str(child.pid))
            send({"type": "tasks", "tasks": [{"key": key, "hash": key} for key in "abc"]})
        elif record["type"] == "serve":
            served = record
        elif record["type"] == "run":
            threading.Thread(target=run, args=(mode, served, record, number), daemon=True).start()
    while mode == "leaves":
        time.sleep(1)


main()
