"""Logits of a model with and without chains."""
import os, sys, time
import numpy as np
from tests.model.stepping import stepping
from urdir.driver import Device
from urdir.driver.emulator.api import Api
from urdir.model.families.config import Config
from urdir.model.families.shapes import SHAPES, Shape
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.lower import step, chains
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
SMALL = bool(os.environ.get("SMALL"))
shape = Shape("llama", 3, 512, 4, 2, 128, 1792, 500, False) if SMALL else Shape("llama", 4, 4096, 32, 8, 128, 14336, 2000, False)
api = Api(target="sm_90a", sm_count=32, sanitize=len(sys.argv) > 1) if SMALL else None
joined = []
real = step.join_chains
def counted(at, sheet, first):
    real(at, sheet, first)
    joined.extend(l.label for l in sheet.launches if l.label.endswith("chain"))
with Device.open("emulator:sm_90a" if SMALL else "cuda", api=api) as device:
    model = SyntheticModel("x", "q4_k_m", shape)
    with Weights.load(model, Config.of(model), device) as weights:
        found = {}
        for name, join in (("with", counted), ("without", lambda *a: None)):
            step.join_chains = join
            t = time.time()
            with stepping(device, weights, SessionSettings(64, "f16", sequences=16)) as eager:
                rng = np.random.default_rng(0)
                for s in range(12):
                    eager.feed([int(t) for t in rng.integers(0, 400, s % 4 + 2)], s)
                rows = []
                for turn in range(2 if SMALL else 4):
                    rows.append(np.stack(eager.logits(tuple(range(12)))))
                    for s in range(12):
                        eager.feed([int(rows[-1][s].argmax()) % 400], s)
            found[name] = np.stack(rows)
            print(name, found[name].shape, np.isfinite(found[name]).all(), len(joined), time.time() - t, flush=True)
        a, b = found["with"], found["without"]
        print("apart by", np.sqrt(((a - b) ** 2).mean() / (b**2).mean()), np.abs(a - b).max(), np.abs(b).max(), joined[:3])
