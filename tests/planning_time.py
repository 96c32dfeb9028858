"""Host time of planning a decode step, once its kernels are chosen, and of measuring the workspace.

    PYTHONPATH=.src python tests/planning_time.py [SHAPE]

Prints milliseconds of one core (the least of 20, and the median): the plan of a decode step of one
row of a published shape (default llama-3.1-8b), how many layers were lowered for it, and the time
that a `SessionBudget` takes for one sequence and for 64. Nothing runs: the device is of paper.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from urdir.model.engine import budget
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.session import Session
from urdir.model.engine.step import build_plan
from urdir.model.families.config import Config
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.lower.repeats import Repeats
from urdir.model.measure.paper_device import paper_device
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights


def milliseconds(work: Callable[[], object], times: int = 20) -> str:
    """The least and the median of several."""
    taken = []
    for _ in range(times):
        start = time.process_time()
        work()
        taken.append(1e3 * (time.process_time() - start))
    return f"{min(taken):.1f} ms (median {statistics.median(taken):.1f})"


def main() -> None:
    """Print the times."""
    model = SyntheticModel(sys.argv[1] if len(sys.argv) > 1 else "llama-3.1-8b")
    config, step = Config.of(model), StepShape(1, 256, Output.GREEDY)
    with (
        paper_device("sm_90a", 132) as device,
        Weights(model, config, device) as weights,
        Session(device, weights, SessionSettings(8192)) as session,
    ):
        build_plan(session.parts, step)
        print("plan of a decode step:", milliseconds(lambda: build_plan(session.parts, step)))
        repeated, begin = 0, Repeats.begin

        def counted(self: Repeats, index: int) -> bool:
            nonlocal repeated
            found = begin(self, index)
            repeated += found
            return found

        Repeats.begin = counted  # type: ignore[method-assign]
        build_plan(session.parts, step)
        print(f"layers lowered: {config.n_layers - repeated} of {config.n_layers}")

        def measure(sequences: int) -> None:
            budget._measured.clear()
            budget.SessionBudget.of(weights, SessionSettings(8192, sequences=sequences))

        for sequences in (1, 64):
            measure(sequences)
            taken = milliseconds(lambda n=sequences: measure(n), 5)  # type: ignore[misc]
            print(f"budget of a session of {sequences}:", taken)


if __name__ == "__main__":
    main()
