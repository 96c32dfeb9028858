"""The answers that a service is giving, and what those who asked are to be told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from urdir.driver.errors import loses_device
from urdir.model.engine.requests.answer import Answer, Item
from urdir.model.engine.requests.request import Piece
from urdir.model.engine.requests.scheduler import Scheduler


class OpenAnswers:
    """The answers that have not ended, by the numbers that ``scheduler`` has for their requests.

    Items are collected until they are taken, together; pieces that follow one another become one.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._answers: dict[int, Answer] = {}
        self._items: dict[Answer, list[Item]] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._answers)

    def __contains__(self, number: object) -> bool:
        return number in self._answers

    def __getitem__(self, number: int) -> Answer:
        return self._answers[number]

    def get(self, number: int) -> Answer | None:
        """One of them; None where it has ended."""
        return self._answers.get(number)

    def named(self, numbers: Sequence[int]) -> list[Answer]:
        """Some of them, in this order."""
        return [self._answers[number] for number in numbers]

    def add(self, answer: Answer) -> None:
        """Queue its request; where it is not taken, the error is all that is told."""
        try:
            answer.number = self._scheduler.add(answer.request)
        except Exception as error:
            self.tell(answer, error)
            return
        self._answers[answer.number] = answer

    def tell(self, answer: Answer, item: Item) -> None:
        """An item is to be delivered."""
        items = self._items.setdefault(answer, [])
        if isinstance(item, Piece) and items and isinstance(last := items[-1], Piece):
            items[-1] = Piece(last.text + item.text, last.choices + item.choices)
        else:
            items.append(item)

    def ended(self, answer: Answer) -> None:
        """The scheduler has forgotten its request."""
        del self._answers[answer.number]

    @contextmanager
    def alone(self, number: int) -> Iterator[None]:
        """Do something for one request: an error ends it and no other. Raises what loses the
        device."""
        try:
            yield
        except Exception as error:
            if loses_device(error):
                raise
            self.fail(self._answers[number], error)

    def fail(self, answer: Answer, error: Exception) -> None:
        """A request fails by itself."""
        self.ended(answer)
        self._scheduler.cancel(answer.number)
        self.tell(answer, error)

    def fail_all(self, error: Exception) -> None:
        """All of them fail."""
        for answer in list(self._answers.values()):
            self.fail(answer, error)

    def fail_begun(self, error: Exception) -> None:
        """Those fail that a step may have been of; the others wait for the next."""
        for answer in self.named(self._scheduler.begun):
            self.fail(answer, error)

    def fail_dropped(self) -> None:
        """Those fail that the scheduler has ended by itself. Raises what loses the device."""
        for number, error in self._scheduler.dropped().items():
            if loses_device(error):
                raise error
            if (answer := self._answers.pop(number, None)) is not None:
                self.tell(answer, error)

    def cancel(self, answer: Answer) -> None:
        """End a request, if it has not ended: nothing more of it is delivered."""
        if self._answers.get(answer.number) is answer:
            self.ended(answer)
            self._scheduler.cancel(answer.number)
        self._items.pop(answer, None)

    def cancel_all(self) -> None:
        """End all requests: nobody waits for them."""
        for answer in list(self._answers.values()):
            self.cancel(answer)

    def take_items(self) -> dict[Answer, list[Item]]:
        """What is to be delivered, which is forgotten here."""
        items, self._items = self._items, {}
        return items
