"""Opening a model: what runs concurrently.

    the thread that opens                    other threads, and a process
    ---------------------------------------  ------------------------------------------
    import the driver's bindings
    import what reads files                  driver: load it
    open the file, check all of it           template process: start, compile the template
    import the engine                        device: make a context
                                             tokeniser: vocabulary and merges
    check memory, allocate weights           upload: weights, in threads of their own
    make a session, record first graphs

A bad file is refused before a device is opened. Python runs one thread at a time, except for
driver calls and large copies. So these start as early as possible, and a thread that returns from
one soon gets its turn. Any failure ends the opening: threads are stopped or joined, and everything
opened so far is freed in reverse order.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from urdir.driver.parallel import Task, in_threads
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.group import Group
    from urdir.model.files.model_file import ModelFile
    from urdir.model.memory.weights import Weights
    from urdir.model.text.sandbox import TemplateProcess
    from urdir.model.text.tokenizer import Tokenizer


#: The interpreter's switch interval in seconds: threads that upload wait for those that import,
#: tokenise and plan. First token of an 8B model on an H200, set for the whole
#: process, medians of eight runs or more: 1.29 s, against 1.47 s with the usual 0.005 (and 1.49 s
#: with 0.0005, so that some of it may be chance).
_TURN = 1e-4


class _Closes(Protocol):
    def close(self) -> None: ...


_Owned = TypeVar("_Owned", bound=_Closes)
_Result = TypeVar("_Result")


class Opening(Owner):
    """The threads of an opening, and the owners of everything open so far.

    Loading the driver starts at once. Until `hand_over`, ``close`` ends all of it; threads of the
    process take short turns, and the cycle collector is off, since new objects stay alive.
    ``seconds`` has the duration of each part, which overlap.
    """

    def __init__(self, load_driver: Callable[[], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._owners = ExitStack()
        self._usual = ExitStack()
        self._usual.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(_TURN)
        if gc.isenabled():
            self._usual.callback(gc.enable)
            gc.disable()
        self._driver = Task(self._timed("driver", load_driver), "driver")
        self._owners.callback(self._driver.failed)
        self._group: Task[Group] | None = None
        self._upload: Task[None] | None = None

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Note the seconds that pass within."""
        start = time.perf_counter()
        yield
        self.seconds[part] = time.perf_counter() - start

    def own(self, opened: _Owned) -> _Owned:
        """Close ``opened`` if the opening fails, and when the engine is closed."""
        self._owners.callback(opened.close)
        return opened

    def tokenizer(self, file: ModelFile, needed: bool) -> Callable[[], Tokenizer]:
        """A function that returns the file's tokeniser.

        Its vocabulary is checked at once if it is ``needed`` or of a known kind. A needed tokeniser
        is built in a thread, which keeps the file open. Raises what `Tokenizer.checked` raises."""
        from urdir.model.text.tokenizer import Tokenizer

        if not needed and not Tokenizer.is_there(file):
            return lambda: Tokenizer.of(file)
        build = Tokenizer.checked(file)
        if not needed:
            return build
        task = Task(self._timed("tokenizer", build), "tokenizer")
        self._owners.callback(task.failed)
        return task.result

    def template_process(self) -> TemplateProcess:
        """A process for chat templates, which starts now."""
        from urdir.model.text.sandbox import TemplateProcess

        process = self.own(TemplateProcess())
        process.begin()
        return process

    def open_devices(self, open_group: Callable[[], Group]) -> None:
        """Start opening the devices once the driver is loaded."""

        def when_loaded() -> Group:
            self._driver.result()
            return open_group()

        self._group = Task(self._timed("device", when_loaded), "device")
        self._owners.callback(self._close_group)

    def group(self) -> Group:
        """The devices, once they are open."""
        assert self._group is not None
        return self._group.result()

    def upload(
        self, weights: Sequence[tuple[Weights, ModelFile]], stream_dir: Path | None = None
    ) -> None:
        """Start filling weights from their files, already owned, of all ranks at once; some stay in
        files of ``stream_dir``."""
        stop = threading.Event()

        def fill() -> None:
            in_threads(lambda each: each[0].upload(each[1], stop, stream_dir), weights)

        self._upload = task = Task(self._timed("weights", fill), "upload")
        self._owners.callback(task.failed)
        self._owners.callback(stop.set)

    def wait_for_upload(self) -> None:
        """Wait until all weights are uploaded."""
        assert self._upload is not None
        self._upload.result()

    def hand_over(self) -> ExitStack:
        """End the opening; the owners of everything that it opened."""
        self._usual.close()
        return self._owners.pop_all()

    def close(self) -> None:
        """End the threads, free what is open. Idempotent."""
        self._usual.close()
        self._owners.close()

    def _close_group(self) -> None:
        assert self._group is not None
        if not self._group.failed():
            self._group.result().close()

    def _timed(self, part: str, work: Callable[[], _Result]) -> Callable[[], _Result]:
        def run() -> _Result:
            with self.timed(part):
                return work()

        return run
