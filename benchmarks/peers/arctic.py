"""Arctic's suffix decoding replayed over recorded rollouts; runs in `.venv-peers`, without treering.

Usage: python -I arctic.py REPLAY.npz ANSWER.json CONFIG.json

REPLAY.npz holds rollouts one after another (`tokens`, `is_sampled`, `offsets`; `starts`, where each one's first sampled
token stands), which of them are replayed (`order`), in which wave (`waves`) and in which cache (`caches`), and
which of the others that cache gains and loses before each (`gained`, `gained_ends`, `lost`, `lost_ends`). Rollouts of a
wave take a step each in turn, as an engine's rows do, so that those of one cache see what the others have written so
far; they leave it with the wave. CONFIG.json holds Arctic's own arguments.
"""

import json
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from arctic_inference.suffix_decoding import SuffixDecodingCache

ROOT = -1
"""What the parents of a draft's first tokens are."""


@dataclass(slots=True, kw_only=True)
class Totals:
    """What all steps together did."""

    num_steps: int = 0
    num_emitted: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    propose_s: list[float] = field(default_factory=list)
    append_s: float = 0.0
    num_appended: int = 0
    index_bytes: int = 0
    index_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class Request:
    """A rollout that runs, as far as it was replayed."""

    cache: SuffixDecodingCache
    rollout: int
    tokens: np.ndarray
    is_sampled: np.ndarray
    at: int

    @property
    def has_ended(self) -> bool:
        """Whether all of it was replayed."""
        return self.at >= self.tokens.size


class Replay:
    """One configuration over all rollouts."""

    def __init__(self, arrays: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        self._arrays = arrays
        self._config = config
        self._depth = int(config["depth"])
        self._caches: dict[int, SuffixDecodingCache] = {}
        self._gained = np.split(arrays["gained"], arrays["gained_ends"][:-1])
        self._lost = np.split(arrays["lost"], arrays["lost_ends"][:-1])
        self.totals = Totals()

    def run(self) -> None:
        """Replays every rollout of `order`, wave by wave, its cache as it is to be."""
        firsts = np.flatnonzero(np.diff(self._arrays["waves"])) + 1
        for wave in np.split(np.arange(self._arrays["order"].size), firsts):
            self._run_wave(wave.tolist())
        self._measure_bytes()

    def _run_wave(self, wave: list[int]) -> None:
        for number in wave:
            self._change_cache(number)
        requests = [self._start(number) for number in wave]
        running = [request for request in requests if not request.has_ended]
        while running:
            for request in running:
                self._advance(request)
            running = [request for request in running if not request.has_ended]
        for request in requests:
            request.cache.stop_request(request.rollout)
            request.cache.evict_cached_response(request.rollout)

    def _change_cache(self, number: int) -> None:
        cache = self._cache(int(self._arrays["caches"][number]))
        for other in self._lost[number].tolist():
            cache.evict_cached_response(other)
        for other in self._gained[number].tolist():
            self._load(cache, other)

    def _cache(self, number: int) -> SuffixDecodingCache:
        if number not in self._caches:
            self._caches[number] = SuffixDecodingCache(max_tree_depth=self._depth, max_cached_requests=-1)
        return self._caches[number]

    def _load(self, cache: SuffixDecodingCache, rollout: int) -> None:
        tokens, _, start = self._rollout(rollout)
        cache.start_request(rollout, [])
        cache.add_active_response(rollout, tokens[start:])
        cache.stop_request(rollout)

    def _start(self, number: int) -> Request:
        rollout = int(self._arrays["order"][number])
        cache = self._cache(int(self._arrays["caches"][number]))
        tokens, is_sampled, at = self._rollout(rollout)
        cache.start_request(rollout, tokens[:at])
        return Request(cache=cache, rollout=rollout, tokens=tokens, is_sampled=is_sampled, at=at)

    def _advance(self, request: Request) -> None:
        """One step, and the tokens given after it."""
        tokens, is_sampled, at = request.tokens, request.is_sampled, request.at
        end = at + (self._step(request) if is_sampled[at] else 1)
        while end < tokens.size and not is_sampled[end]:
            end += 1
        began = time.thread_time()
        request.cache.add_active_response(request.rollout, tokens[at:end])
        self.totals.append_s += time.thread_time() - began
        self.totals.num_appended += end - at
        request.at = end

    def _step(self, request: Request) -> int:
        """Drafts, and returns the number of emitted tokens: those that agree with the recording, and one more."""
        tokens, is_sampled, at = request.tokens, request.is_sampled, request.at
        context = tokens[max(0, at - self._depth) : at]
        began = time.thread_time()
        draft = request.cache.speculate(request.rollout, context, **self._config["arguments"])
        drafted, parents = draft.token_ids, draft.parents
        self.totals.propose_s.append(time.thread_time() - began)
        num_accepted = _agreement(drafted, parents, tokens, is_sampled, at)
        end = at + num_accepted
        num_emitted = num_accepted + int(end < tokens.size and bool(is_sampled[end]))
        self.totals.num_steps += 1
        self.totals.num_emitted += num_emitted
        self.totals.num_drafted += len(drafted)
        self.totals.num_accepted += num_accepted
        return num_emitted

    def _rollout(self, rollout: int) -> tuple[np.ndarray, np.ndarray, int]:
        begin, end = self._arrays["offsets"][rollout : rollout + 2]
        start = int(self._arrays["starts"][rollout] - begin)
        return self._arrays["tokens"][begin:end], self._arrays["is_sampled"][begin:end], start

    def _measure_bytes(self) -> None:
        """What the caches hold in the end, in the bytes that they count themselves."""
        lengths = self._arrays["offsets"][1:] - self._arrays["starts"]
        for cache in self._caches.values():
            self.totals.index_tokens += int(lengths[list(cache.cached_requests)].sum()) if cache.cached_requests else 0
            self.totals.index_bytes += cache._global_tree.estimate_memory() if cache.cached_requests else 0


def _agreement(drafted: list[int], parents: list[int], tokens: np.ndarray, is_sampled: np.ndarray, at: int) -> int:
    """Tokens of the drafted path that equals the recording, within the run of sampled tokens."""
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, drafted, strict=True))}
    node, count = ROOT, 0
    while at + count < tokens.size and is_sampled[at + count]:
        child = children.get((node, int(tokens[at + count])))
        if child is None:
            break
        node, count = child, count + 1
    return count


def main(given: Path, answer: Path, config: Path) -> None:
    """Replays and writes the totals."""
    with np.load(given) as arrays:
        replay = Replay(dict(arrays), json.loads(config.read_text(encoding="utf-8")))
    replay.run()
    totals = replay.totals
    report = {
        "tokens_per_step": totals.num_emitted / totals.num_steps,
        "drafted_per_step": totals.num_drafted / totals.num_steps,
        "precision": totals.num_accepted / max(totals.num_drafted, 1),
        "us_per_row": 1e6 * float(np.median(totals.propose_s)),
        "us_per_row_p95": 1e6 * float(np.percentile(totals.propose_s, 95)),
        "append_us_per_token": 1e6 * totals.append_s / totals.num_appended,
        "bytes_per_token": totals.index_bytes / max(totals.index_tokens, 1),
        "version": version("arctic_inference"),
    }
    answer.write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
