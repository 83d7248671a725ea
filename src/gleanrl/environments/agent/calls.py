"""The interface of a dialect: how requests and responses of one API become model calls and answers, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from gleanrl.rollout.calls import ModelAnswer, ModelCall, RefusalKind, Refused, answer_message, message_key

__all__ = ["Dialect", "ModelAnswer", "ModelCall", "RefusalKind", "Refused", "answer_message", "message_key"]


class Dialect(Protocol):
    """The API that an agent's client speaks."""

    path: str
    """Path of the API's requests, such as "/v1/chat/completions"."""

    def read(self, body: Mapping[str, Any]) -> ModelCall:
        """Convert the body of a request to a model call.

        Raises:
            Refused: the body is malformed, or it asks for something that the policy cannot do.
        """
        ...

    def write(self, answer: ModelAnswer, call: ModelCall, model: str) -> dict[str, Any]:
        """Return the body of the response. ``model`` is the name of the model that the response states."""
        ...

    def stream(self, answer: ModelAnswer, call: ModelCall, model: str) -> Iterator[str]:
        """Yield the response as server-sent events, each with the empty line that ends it."""
        ...

    def error(self, refused: Refused) -> dict[str, Any]:
        """Return the body of the response to a call that is refused."""
        ...
