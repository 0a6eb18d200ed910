"""Where the encoded bytes of a picture are: in the record itself, or in a file beside the data."""

import base64
import binascii
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from treering.errors import InputError

MAX_BYTES = 1 << 26
"""Of an encoded picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureSource:
    """An encoded picture: its bytes, or a file that is read when they are needed.

    Example: `PictureSource(content=Path("a.png").read_bytes()).read()` gives these bytes.
    """

    content: bytes | memoryview | None = None
    """The bytes of a PNG, JPEG or other file; None for a file."""
    folder: Path | None = None
    """Of the data file, inside of which `file` must be."""
    file: str | None = None
    """Its path as the record says it; None with `content`."""
    where: str = field(default="", compare=False)
    """The place of the record, such as FILE:LINE, for errors."""

    def read(self) -> bytes:
        """The encoded bytes.

        Raises:
            InputError: more than `MAX_BYTES`, no bytes, or a file that is missing, irregular or outside of the folder.
        """
        content = self._of_file() if self.content is None else bytes(self.content)
        if not content:
            raise self.refusal("a picture is empty; remove its record or repair it")
        if len(content) > MAX_BYTES:
            raise self.refusal(f"a picture has at most {MAX_BYTES:,} bytes, got {len(content):,}; make it smaller")
        return content

    def refusal(self, rule: str) -> InputError:
        """An error that begins with the place of the picture."""
        name = "" if self.file is None else f"{self.file}: "
        return InputError(f"{self.where}: {name}{rule}" if self.where else f"{name}{rule}")

    def _of_file(self) -> bytes:
        path = self._path()
        try:
            # A pipe would wait for its writer.
            found = os.stat(path)
            if not stat.S_ISREG(found.st_mode):
                raise self.refusal("a picture is a regular file, and this is a folder, pipe or device; correct it")
            with open(path, "rb") as stream:
                return stream.read(MAX_BYTES + 1)
        except OSError as error:
            raise self.refusal(f"a picture cannot be read ({error.strerror or error}); check the path") from error

    def _path(self) -> Path:
        """The file, once links are followed: a data file of a stranger must not read what lies elsewhere."""
        assert self.folder is not None, "a file has a folder"
        assert self.file is not None, "a picture has bytes or a file"
        if "\0" in self.file:
            raise self.refusal("a path has no null character; correct it")
        folder = self.folder.resolve()
        try:
            path = (folder / self.file).resolve()
        except (OSError, RuntimeError) as error:
            raise self.refusal(f"a picture cannot be read ({error}); check the path") from error
        if not path.is_relative_to(folder):
            raise self.refusal(
                f"pictures lie inside of the folder of the data file, {self.folder}, also once links are followed, and "
                "this one does not; copy it there"
            )
        return path


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePicture:
    """A picture of a message.

    Example: of the parts "Here:", a picture and "What is it?", it is at 5 of the text "Here:What is it?".
    """

    at: int
    """Characters of the message's text before it."""
    source: PictureSource
    """Where its bytes are."""


def named_source(name: str, folder: Path, where: str) -> PictureSource:
    """The picture of a data URI, or of the path of a local file, relative to the folder of the data file.

    Raises:
        InputError: an address of the network, a URI that is not base64, or no name.

    Example: `named_source("a.png", Path("set"), "set/a.jsonl:1").read()` reads set/a.png.
    """
    scheme = name.partition(":")[0].lower()
    if scheme == "data":
        return PictureSource(content=_of_uri(name, where), where=where)
    if scheme == "file":
        parts = urlsplit(name)
        if parts.netloc not in ("", "localhost"):
            raise InputError(f"{where}: a file of this machine is read, got {name!r:.80}; name a local file")
        return PictureSource(folder=folder, file=unquote(parts.path), where=where)
    if "://" in name[:32]:
        raise InputError(
            f"{where}: pictures of the network are not fetched, got {name!r:.80}; download it beside the data file, "
            "and give its path"
        )
    if not name.strip():
        raise InputError(f"{where}: a picture has a path, a data URI or bytes, got {name!r}; add it")
    return PictureSource(folder=folder, file=name, where=where)


def base64_source(text: str, where: str) -> PictureSource:
    """The picture of a text in base64.

    Raises:
        InputError: the text is no base64, or too long.
    """
    if len(text) > MAX_BYTES * 3 // 2:
        raise InputError(f"{where}: a picture has at most {MAX_BYTES:,} bytes, and this text has more; make it smaller")
    try:
        content = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{where}: a picture in a text is base64, and this one is not ({error}); repair it") from error
    return PictureSource(content=content, where=where)


def _of_uri(uri: str, where: str) -> bytes:
    head, comma, body = uri.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InputError(
            f"{where}: a picture as a data URI is data:image/png;base64,..., got {uri[:40]!r}; write its bytes in "
            "base64"
        )
    kind = head[len("data:") :].lower()
    if not kind.startswith(("image", ";")):
        raise InputError(f"{where}: a picture's data URI begins with data:image, got {head[:40]!r}; correct it")
    content = base64_source(body, where).content
    assert isinstance(content, bytes), "base64 gives bytes"
    return content
