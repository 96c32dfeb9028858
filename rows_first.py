# ruff: noqa
"""The first requests of a service, in this process. Temporary."""

import sys
import threading
import time
from functools import partial
from pathlib import Path

start = time.perf_counter()
sys.setswitchinterval(0.0005)
from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.request import Request
from urdir.model.engine.requests.service import Service
from urdir.model.engine.sampling_settings import GREEDY, SamplingSettings
from urdir.model.families.synthetic import SyntheticModel
import gc
import numpy as np

model = SyntheticModel("llama-3.1-8b", "q4_k_m")
more = dict(sequences=None, memory_share=0.9, context=None, cache_folder=Path(sys.argv[1]))
with Engine.opening(model, **more) as loading:
    warm_up = loading.warm_up(gc.freeze)
    opened = time.perf_counter()
    warm_up.run(2.0)
    engine = Engine(loading)
ready = time.perf_counter()
print(f"opening {opened - start:.2f} ready {ready - start:.2f} s, recorded {warm_up.recorded} of {warm_up.recorded + warm_up.left}", flush=True)
rng = np.random.default_rng(1)
with engine, Service(engine, None, warm_up=warm_up) as service:
    for number in range(40):
        done, times = threading.Event(), []
        settings = GREEDY if number % 2 else SamplingSettings()
        tokens = tuple(int(t) for t in rng.integers(0, 100000, 128))

        def deliver(item):
            times.append(time.perf_counter())
            if type(item).__name__ == "Ending" or isinstance(item, Exception):
                done.set()
                if isinstance(item, Exception):
                    print(repr(item))

        begin = time.perf_counter()
        service.submit(Request(prompt=tokens, settings=settings, limit=32), deliver)
        done.wait(30)
        if number < 8 or times[0] - begin > 0.012:
            m = service.metrics()
            print(f"{number}: first {1e3 * (times[0] - begin):.1f} ms, all {1e3 * (times[-1] - begin):.1f} ms; graphs {m.graphs_recorded} of {m.graphs_wanted}", flush=True)
    while (m := service.metrics()).graphs_recorded < m.graphs_wanted and time.perf_counter() - start < 70:
        time.sleep(0.2)
    print(f"all graphs: {m.graphs_recorded} of {m.graphs_wanted} at {time.perf_counter() - start:.1f} s", flush=True)
