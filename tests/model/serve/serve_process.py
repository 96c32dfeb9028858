"""`urdir serve` in a process of its own, with a toy in place of the engine."""

from __future__ import annotations

import re
import resource
import signal
import subprocess
from pathlib import Path

from tests.processes import beginning, end_of, start_python

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}
#: The command with the toy of conftest.py in place of the engine.
SCRIPT = """
import importlib.util, sys
from pathlib import Path
from urdir.model import demo_model
from urdir.model.cli import main
from urdir.model.commands import serve_opening
from urdir.model.engine.requests.device_lost import DeviceLostError
from urdir.model.files.gguf import Gguf
from urdir.model.text.chat import ChatTemplate
from urdir.model.text.tokenizer import Tokenizer

spec = importlib.util.spec_from_file_location("conftest", sys.argv[1])
toys = sys.modules["conftest"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(toys)
delay, repeat, lost = float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
gguf = Gguf(demo_model())
tokenizer = Tokenizer.of(gguf)
with ChatTemplate.of(gguf, tokenizer) as template:
    lost = DeviceLostError(lost) if lost else None
    service = toys.ToyService(
        toys.ToyModel(tokenizer, template), delay=delay, repeat=repeat, lost=lost
    )
    serve_opening.open_service = lambda args, template: service
    code = main(["serve", "--port", "0", "--api-workers", "0", *sys.argv[5:]])
print(code, *service.ended, service.cancelled)
"""


class Process:
    """A server in a process of its own."""

    def __init__(
        self, *flags: str, delay: float = 0.0, repeat: int = 1, lost: str = "", files: int = 0
    ) -> None:
        """Its answers are the toy's, ``repeat`` times, with a ``delay`` before each token. Its
        device is ``lost``; it may open so many ``files``."""

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

        conftest = Path(__file__).with_name("conftest.py")
        pipe = subprocess.PIPE
        self.process = start_python(
            *("-c", SCRIPT, str(conftest), str(delay), str(repeat), lost, *flags),
            stdout=pipe,
            stderr=pipe,
            preexec_fn=limit if files else None,
        )
        assert self.process.stderr is not None
        with beginning(self.process):
            self.greeting = self.process.stderr.readline()
            found = re.search(r"https?://\S+", self.greeting)
            assert found is not None, self.greeting + self.process.stderr.read()
        self.url = found[0]

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> tuple[str, str]:
        return end_of(self.process)[1:]
