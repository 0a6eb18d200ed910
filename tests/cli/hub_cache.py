"""A Hugging Face cache and a local hub, with a tiny model of 32 token ids."""

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

ID = "org/tiny"
FIRST, SECOND = "a" * 40, "b" * 40


def save_model(folder: Path, *, seed: int = 0, tied: bool = True, **options: Any) -> Path:
    """Save a tiny model of 32 ids; `options` are passed to `save_pretrained`."""
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=16,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder, **options)
    return folder


def save_tokenizer(folder: Path, words: Sequence[str] = tuple(map(str, range(32)))) -> Path:
    """Add a tokenizer of words, the first of which stands for unknown words."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def add_to_cache(cache: Path, model: Path, *, commit: str, ref: str = "main") -> None:
    """Add a commit of `ID` in the layout of the hub's client: links to blobs, and a file for each ref."""
    repo = cache / f"models--{ID.replace('/', '--')}"
    snapshot = repo / "snapshots" / commit
    for folder in (snapshot, repo / "blobs", repo / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        blob = hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copyfile(file, repo / "blobs" / blob)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob))
    (repo / "refs" / ref).write_text(commit)


@contextmanager
def local_hub(model: Path, commit: str) -> Iterator[tuple[str, list[str]]]:
    """Return the address of a hub that serves one commit of `ID`, and the list of paths it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            asked.append(path)
            content = self._content(path)
            self.send_response(404 if content is None else 200)
            if content is None:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", str(len(content or b"")))
            self.send_header("ETag", f'"{hashlib.sha256(content or b"").hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
            self.end_headers()
            if with_body and content is not None:
                self.wfile.write(content)

        def _content(self, path: str) -> bytes | None:
            files = {file.name: file.read_bytes() for file in model.iterdir()}
            if path.startswith(f"/api/models/{ID}/tree/"):
                return json.dumps(
                    [
                        {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                        for name, data in files.items()
                    ]
                ).encode()
            if path.startswith(f"/api/models/{ID}"):
                return json.dumps(
                    {"id": ID, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
                ).encode()
            return files.get(path.removeprefix(f"/{ID}/resolve/{commit}/"))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
