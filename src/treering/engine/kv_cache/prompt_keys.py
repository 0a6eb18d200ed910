"""By which tokens the keys and values of a prompt are known: those of pictures name what the picture shows."""

from treering.engine.request import Request
from treering.types import TokenIds


class PromptKeys:
    """Numbers the pictures of an engine.

    Example: the prompts 5 9 9 6 with two pictures at 9 9 have the keys 5 -1 -1 6 and 5 -2 -2 6; that of text is itself.
    """

    def __init__(self) -> None:
        """Without a picture; each that comes takes the memory of its digest for good."""
        self._numbers: dict[bytes, int] = {}

    def of(self, request: Request) -> TokenIds:
        """The prompt of a request with negative tokens in place of its pictures, int32."""
        if not request.pictures:
            return request.prompt
        tokens = request.prompt.copy()
        for one in request.pictures:
            tokens[one.start : one.stop] = -1 - self._numbers.setdefault(one.picture.digest, len(self._numbers))
        return tokens
