import sys, time, numpy as np
from urdir.driver import Device, run_kernel
from urdir.driver.harness import check_kernel
from urdir.ptxgen.kernels.linear.products.gemm_chain import GemmChain
ex=GemmChain.examples()
where=sys.argv[1] if len(sys.argv)>1 else "emulator"
from urdir.driver import bindings
from urdir.driver.emulator.api import Api
api=Api(target="sm_90a",sm_count=32,sanitize=len(sys.argv)>2) if where=="emulator" else None
with Device.open("emulator:sm_90a" if api else where, api=api) as d:
    for title,s in ex.items():
      print(title)
      for seed in range(1 if where=="emulator" else 3):
          rng=np.random.default_rng(seed); inputs=s.make_inputs(rng)
          t=time.time(); got=run_kernel(d,s,inputs); print("ran",time.time()-t)
          ref=s.reference(**inputs)
          for n,v in ref.items():
              a=np.asarray(got[n],np.float64); b=np.asarray(v,np.float64)
              err=np.abs(a-b).max()/max(np.abs(b).max(),1e-30)
              print(n,a.shape,"max",np.abs(b).max(),"err/max",err, "tol", s.tolerance.rtol)
