"""The open answers of a service, and the items to deliver for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from urdir.driver.errors import loses_device
from urdir.model.engine.adapters import AdapterPlace, Adapters
from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.request import Finish, Item, Piece
from urdir.model.engine.requests.scheduler import Scheduler


class OpenAnswers:
    """The answers that have not ended, by the number of their request in ``scheduler``.

    Items are collected until `take_items`; consecutive pieces are merged.
    """

    def __init__(self, scheduler: Scheduler, adapters: Adapters | None = None) -> None:
        self._scheduler = scheduler
        self._adapters = adapters
        self._answers: dict[int, Answer] = {}
        self._items: dict[Answer, list[Item]] = {}
        #: Those that have no token yet.
        self.awaited: set[Answer] = set()

    def __len__(self) -> int:
        """The number of open answers."""
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
        """Queue its request; on rejection only the error is delivered."""
        try:
            if self._adapters is not None:
                answer.place = self._adapters.take(answer.adapters)
            answer.number = self._scheduler.add(answer.request)
        except Exception as error:
            self._give_back(answer)
            self.tell(answer, error)
            return
        self._answers[answer.number] = answer
        self.awaited.add(answer)
        if (free := answer.free) is not None:
            self._scheduler.hold(answer.number, free)

    def tell(self, answer: Answer, item: Item) -> None:
        """Collect an item for delivery."""
        if not isinstance(item, Piece) or item.choices:
            self.awaited.discard(answer)
        items = self._items.setdefault(answer, [])
        if isinstance(item, Piece) and items and isinstance(last := items[-1], Piece):
            items[-1] = last.then(item)
        else:
            items.append(item)

    def ended(self, answer: Answer) -> None:
        """Remove an answer whose request the scheduler has removed."""
        del self._answers[answer.number]
        self.awaited.discard(answer)
        self._give_back(answer)

    def _give_back(self, answer: Answer) -> None:
        """Others may have the place of its adapters."""
        place, answer.place = answer.place, AdapterPlace()
        if self._adapters is not None:
            self._adapters.give_back(place)

    @contextmanager
    def alone(self, number: int) -> Iterator[None]:
        """A context whose errors end one request only. Raises an error that loses the device."""
        try:
            yield
        except Exception as error:
            self.fail_alone(number, error)

    def fail_alone(self, number: int, error: Exception) -> None:
        """End one request by an error that was caught. Raises one that loses the device."""
        if loses_device(error):
            raise error
        self.fail(self._answers[number], error)

    def fail(self, answer: Answer, error: Exception) -> None:
        """End one request with an error."""
        self.ended(answer)
        self._scheduler.cancel(answer.number)
        self.tell(answer, error)

    def fail_all(self, error: Exception) -> None:
        """End all requests with an error."""
        for answer in list(self._answers.values()):
            self.fail(answer, error)

    def fail_begun(self, error: Exception) -> None:
        """End the requests that may be part of a step; the others wait for the next one."""
        for answer in self.named(self._scheduler.begun):
            self.fail(answer, error)

    def fail_dropped(self) -> None:
        """End the requests that the scheduler dropped. Raises an error that loses the device."""
        for number, error in self._scheduler.dropped().items():
            if loses_device(error):
                raise error
            if (answer := self._answers.get(number)) is not None:
                self.ended(answer)
                self.tell(answer, error)

    def cancel(self, answer: Answer) -> None:
        """End a request that has not ended; nothing more is delivered for it."""
        if self._answers.get(answer.number) is answer:
            self.ended(answer)
            self._scheduler.cancel(answer.number)
        self._items.pop(answer, None)

    def stop(self, answer: Answer) -> None:
        """End a request that has not ended because its text has a stop string. One that the
        scheduler dropped is left to `fail_dropped`."""
        if self._answers.get(answer.number) is not answer:
            return
        if (ending := self._scheduler.cancel(answer.number, Finish.STOP)) is not None:
            self.ended(answer)
            self.tell(answer, ending)

    def cancel_all(self) -> None:
        """End all requests without delivering anything."""
        for answer in list(self._answers.values()):
            self.cancel(answer)

    def take_items(self) -> dict[Answer, list[Item]]:
        """The collected items, which are removed here."""
        items, self._items = self._items, {}
        return items
