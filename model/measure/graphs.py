"""The time until a service has recorded the graphs of its steps, and its parts."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.driver import execute
from urdir.driver.parallel import completed
from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.warm_up import MOST_GRAPHS, collect_no_graphs, likely_shapes
from urdir.model.engine.step import KnownLayers, building

if TYPE_CHECKING:
    from urdir.model.engine.session import Session
    from urdir.model.families.synthetic import SyntheticModel

#: A part's name, its seconds and a note.
Part = tuple[str, float, str]


def time_graphs(
    source: str | SyntheticModel | None, device_name: str, users: int
) -> Iterator[Part]:
    """Open a model for ``users`` twice, with an empty cache of kernels and with what the first time
    left in it, and time the recording of its graphs from there on; then the parts alone, as soon as
    each is known.

    The driver's own cache (``CUDA_CACHE_PATH``) has kernels that hand over registers: it is the
    caller's to empty.
    """
    with tempfile.TemporaryDirectory() as folder:
        for state in ("cold", "warm"):
            start = time.perf_counter()
            with Engine.opening(
                source,
                device=device_name,
                cache_folder=Path(folder),
                sequences=users,
                memory_share=0.9,
            ) as loading:
                opened = time.perf_counter() - start
                yield f"opened, {state}", opened, "weights are being loaded"
                loading.device.begin_compilers()
                collect_no_graphs(loading.session.steps)
                warm_up = loading.warm_up()
                wanted = warm_up.left
                warm_up.run(0.0)
                yield f"graphs of a first request, {state}", time.perf_counter() - start, ""
                warm_up.run(float("inf"))
                note = f"{warm_up.recorded} of {wanted} graphs"
                yield f"graphs of {users} users, {state}", time.perf_counter() - start, note
                if state == "warm":
                    with Engine(loading) as engine:
                        yield from _time_parts(engine.session)


def _time_parts(session: Session) -> Iterator[Part]:
    """Plans, edges and nodes, and instances of all graphs, whose kernels are loaded."""
    known, parts = KnownLayers(), session.parts
    shapes = [*islice(dict.fromkeys(likely_shapes(session.shapes)), MOST_GRAPHS)]
    start = time.perf_counter()
    plans = [completed(building(parts, shape, known=known)) for shape in shapes]
    planned = time.perf_counter()
    yield "planned", planned - start, f"{len(plans)} steps, {sum(map(len, plans))} launches"
    start = time.perf_counter()
    bound = [execute.bind(plan, parts.device) for plan in plans]
    yield "kernels found", time.perf_counter() - start, ""
    instances = 0.0
    start = time.perf_counter()
    for plan in bound:
        work = execute.recording(plan, parts.device)
        job = next(each for each in work if each is not None)
        begun = time.perf_counter()
        job.run()
        instances += time.perf_counter() - begun
        completed(work).close()
    recorded = time.perf_counter() - start
    yield "edges and nodes", recorded - instances, ""
    yield "instantiated", instances, ""
