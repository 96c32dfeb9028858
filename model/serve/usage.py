"""Token usage and times of a response."""

from __future__ import annotations

import time
from collections.abc import Iterator

from urdir.model.engine.requests.request import Ending
from urdir.model.serve.interface import Json


class Usage:
    """Tokens of a response's answers and the times that they took; a prompt counts once, however
    many answers it has."""

    def __init__(self, answers: int, answers_per_prompt: int = 1) -> None:
        self._per_prompt = answers_per_prompt
        self._open = answers
        self._prompts: dict[int, tuple[int, int]] = {}
        self.completion = self.drafted = self.accepted = 0
        self._began = self._first = self._ended = time.perf_counter()
        self._has_first = False
        self._queued: list[float] = []  # seconds of each answer

    def came(self) -> None:
        """Note that tokens came; the first ones end the prompt's time."""
        if not self._has_first:
            self._has_first = True
            self._first = self._ended = time.perf_counter()

    def add(self, index: int, ending: Ending) -> None:
        """Count an answer that has ended."""
        self._open -= 1
        self._prompts.setdefault(
            index // self._per_prompt, (ending.prompt_tokens, ending.cached_tokens)
        )
        self.completion += ending.generated_tokens
        self.drafted += ending.drafted_tokens
        self.accepted += ending.accepted_tokens
        self._queued.append(ending.queue_seconds)
        self.came()
        self._ended = time.perf_counter()

    @property
    def is_complete(self) -> bool:
        """Whether all answers have ended."""
        return not self._open

    @property
    def prompt(self) -> int:
        """Tokens of the prompts."""
        return sum(tokens for tokens, _ in self._prompts.values())

    @property
    def cached(self) -> int:
        """Tokens of the prompts that were in the cache."""
        return sum(cached for _, cached in self._prompts.values())

    @property
    def prompt_seconds(self) -> float:
        """From the request to the first token, with the time in the queue."""
        return self._first - self._began

    @property
    def completion_seconds(self) -> float:
        """From the first token to the end."""
        return self._ended - self._first

    def phases(self, now: float) -> Iterator[tuple[str, float, float]]:
        """Name, start and end of each phase so far, in seconds of `time.perf_counter`, which is at
        ``now``: until the first answer left the queue, until the first token, until the last."""
        begun = self._began + min(self._queued, default=0.0)
        began, *ends = (self._began, min(begun, self._first), self._first, self._ended)
        names = ("queue", "prefill", "decode") if self._has_first else ("queue",)
        for name, end in zip(names, ends if self._has_first else [now], strict=True):
            yield name, began, end
            began = end

    def json(self, reasoning: int = 0) -> Json:
        """OpenAI's object "usage", with tokens of ``reasoning``, and drafts and what became of
        them, where there were any."""
        usage: Json = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        details: Json = {"reasoning_tokens": reasoning} if reasoning else {}
        if self.drafted:
            details["accepted_prediction_tokens"] = self.accepted
            details["rejected_prediction_tokens"] = self.drafted - self.accepted
        return usage | ({"completion_tokens_details": details} if details else {})

    def timings(self) -> Json:
        """llama-server's object "timings"."""
        timings: Json = {"cache_n": self.cached}
        timings |= _pace("prompt", self.prompt - self.cached, self.prompt_seconds)
        timings |= _pace("predicted", self.completion, self.completion_seconds)
        if self.drafted:
            timings |= {"draft_n": self.drafted, "draft_n_accepted": self.accepted}
        return timings


def _pace(name: str, tokens: int, seconds: float) -> Json:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": 1e3 * seconds,
        f"{name}_per_token_ms": 1e3 * seconds / tokens if tokens else 0.0,
        f"{name}_per_second": tokens / seconds if seconds else 0.0,
    }
