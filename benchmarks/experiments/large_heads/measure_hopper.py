"""Compile and check every variant in processes of their own, then time the right ones. python gpu1.py OUT"""
import json, os, sys, time, random, statistics, multiprocessing as mp, traceback
OUT = sys.argv[1] if len(sys.argv) > 1 else "/tmp"
T0 = time.time()

def tk(R, C, w, s, tma=1): return dict(rows=R, columns=C, warps=w, stages=s, tma=bool(tma), together=4)
JOBS = []
def job(kind, D, DV, **kw):
    JOBS.append(dict(kind=kind, D=D, DV=DV, **kw))
# hopper: forward configs (BN, NS, W, REGS, maxnreg, share)
H = lambda *a: a
FINAL = [(64,64),(80,80),(96,96),(112,112),(128,128),(160,160),(192,128),(192,192),(256,256)]
for d, v in FINAL: job("hop", d, v, f=None, b=None, final=1)
job("hop",64,64,f=None,b=H(128,2,240,168,1)); job("hop",80,80,f=None,b=H(64,3,240,168,1)); job("hop",96,96,f=None,b=H(64,2,240,168,1)); job("hop",112,112,f=None,b=H(64,2,240,168,1)); job("hop",128,128,f=None,b=H(64,2,240,168,1))
job("hop",72,128,f=None,b=None,untimed=1); job("hop",200,136,f=None,b=None,untimed=1)
def name(j):
    if j["kind"] == "tri":
        b = j["blocks"]; return f"{j['D']}/{j['DV']} triton {j['which']} {b['rows']}x{b['columns']} w{b['warps']} s{b['stages']} {'tma' if b['tma'] else 'ptr'}"
    if j["kind"] == "triw": return f"{j['D']}/{j['DV']} triton whole " + " ".join(f"{n}:{b['rows']}x{b['columns']}w{b['warps']}s{b['stages']}" for n in ("queries","keys","values") if (b:=j[n]))
    return f"{j['D']}/{j['DV']} hopper{'-fwd' if j['kind']=='hopf' else ''} {j.get('f') or ''} {j.get('tag','')}{j.get('b') or ''}{j.get('a') or ''}{'vs' if j.get('vs') else ''}{j.get('vs') or ''}{j.get('dtype','')}"

def problem(B, Sq, Sk, H, K, D, DV, seed=0, dtype="bfloat16"):
    import torch
    g = torch.Generator("cuda").manual_seed(seed)
    r = lambda s, h, d: torch.randn(B, s, h, d, device="cuda", generator=g, dtype=getattr(torch,dtype))
    return dict(q=r(Sq,H,D), k=r(Sk,K,D), v=r(Sk,K,DV), dout=r(Sq,H,DV))

def tiles_of(mask, Sq, Sk):
    from burst_portable.layout import Segment
    from burst_portable.mask import Mask
    from burst_portable.planning.tiles import find_tiles
    return find_tiles(Mask.parse(mask, max(Sq, Sk)), (Segment(0, Sq),), (Segment(0, Sk),))

def make(j):
    """kernel object of a job"""
    from burst_portable.backends.cuda.hopper import configs
    if j["kind"] in ("hop", "hopf"):
        from burst_portable.backends.cuda.hopper.kernel import HopperKernel
        class Own(HopperKernel):
            def __getattribute__(self, n):
                if n in ("attend", "attend_whole", "gradients", "attend_backward"):
                    configs.OVERRIDE["f"] = configs.ForwardConfig(*j["f"]) if j.get("f") else None
                    configs.OVERRIDE["b"] = configs.BackwardConfig(*j["b"]) if j.get("b") else None
                    configs.OVERRIDE["a"] = tuple(configs.ApartConfig(*c) for c in j["a"]) if j.get("a") else None
                return super().__getattribute__(n)
        return Own()
    from burst_portable.kernels.triton.triton_kernel import TritonKernel
    from burst_portable.kernels.triton.tuning import Blocks, Tuning
    if j["kind"] == "triw":
        k, q, v = ((Blocks(**j[n]),) if j[n] else () for n in ("keys","queries","values"))
        return TritonKernel({"*": {256: Tuning((Blocks(128,64,8,2,tma=True),), k, q, (), v)}})
    b = (Blocks(**j["blocks"]),)
    return TritonKernel({"*": {256: Tuning(b, b, b, (), b if j["which"] in ("dv", "dk") else ())}})

def run_part(kernel, j, p, tiles, opt, out, lse, delta):
    """what a triton job times"""
    import torch
    from burst_portable.kernels.triton import backward as bw
    if j["which"] == "forward": return dict(zip(("out",), kernel.attend_whole(p["q"],p["k"],p["v"],tiles,opt)))
    if "dq" not in p:
        for n in "qkv": p["d"+n] = torch.empty_like(p[n])
    a = (p["dout"],p["q"],p["k"],p["v"],lse,delta,tiles,opt,(p["dq"],p["dk"],p["dv"]))
    if j["which"] == "queries": kernel.only_queries(*a, add=False); return dict(dq=p["dq"])
    w = {"both": bw.BOTH, "dv": bw.ONLY_DV, "dk": bw.ONLY_DK}[j["which"]]
    kernel._some_keys((p["q"],p["k"],p["v"],p["dout"],lse,delta,p["dk"],p["dv"]), tiles, opt, w, add=False)
    return {"both": dict(dk=p["dk"],dv=p["dv"]), "dv": dict(dv=p["dv"]), "dk": dict(dk=p["dk"])}[j["which"]]

def reference(p, tiles, opt):
    import torch
    from burst_portable.kernels.reference import ReferenceKernel
    from burst_portable.numerics import finished, row_delta
    q,k,v,dout = (p[n].double() for n in ("q","k","v","dout"))
    out, lse = finished(ReferenceKernel().attend(q,k,v,tiles,opt), torch.float64)
    into = tuple(torch.zeros_like(x) for x in (q,k,v))
    ReferenceKernel().attend_backward(dout,q,k,v,lse,tiles,opt,out=out,into=into)
    return dict(out=out, lse=lse, delta=row_delta(dout,out), dq=into[0], dk=into[1], dv=into[2])

def check(j):
    import torch
    from burst_portable.kernels.base import Options
    kernel = make(j); worst = {}
    err = lambda a, b: float((a.double()-b).norm()/b.norm())
    for mask, B, Sq, Sk, H, K in (("causal",2,600,600,4,2),("full",1,333,517,2,2),("window:100",1,700,700,2,1),("documents:0,200,333,800",1,800,800,2,2)):
        p = problem(B,Sq,Sk,H,K,j["D"],j["DV"],dtype=j.get("dtype","bfloat16")); t = tiles_of(mask,Sq,Sk); opt = Options(j["D"]**-0.5, deterministic=False)
        r = reference(p,t,opt)
        got = {}
        if j["kind"] == "tri":
            got = run_part(kernel,j,p,t,opt,None,r["lse"].float(),r["delta"].float())
        else:
            out,lse = kernel.attend_whole(p["q"],p["k"],p["v"],t,opt); got["out"]=out
            worst["lse"]=max(worst.get("lse",0),float((lse.double()-r["lse"]).abs().max()))
            o32,l32 = kernel.attend(p["q"],p["k"],p["v"],t,opt); worst["out32"]=max(worst.get("out32",0),err(o32,r["out"]))
            st=(o32.clone(),l32.clone()); o2,l2 = kernel.attend(p["q"],p["k"],p["v"],t,opt,state=st)
            worst["merged"]=max(worst.get("merged",0),err(o2,r["out"])); worst["mlse"]=max(worst.get("mlse",0),float((l2.double()-r["lse"]-0.6931471805599453).abs().max()))
            if j["kind"] in ("hop", "triw"):
                got["dq"],got["dk"],got["dv"] = kernel.gradients(p["dout"],p["q"],p["k"],p["v"],out,lse,t,opt)
                into=tuple(torch.zeros_like(p[n],dtype=torch.float32) for n in "qkv")
                kernel.attend_backward(p["dout"],p["q"],p["k"],p["v"],lse,t,opt,out=out,into=into)
                for n,x in zip(("dq","dk","dv"),into): worst["add "+n]=max(worst.get("add "+n,0),err(x,r[n]))
        torch.cuda.synchronize()
        for n,x in got.items():
            e = err(x,r[n]); worst[n] = max(worst.get(n,0), e if e==e else 9e9)
    return worst

def child(j, q):
    try:
        t=time.time(); w = check(j); q.put((name(j), w, time.time()-t, ""))
    except BaseException as e:
        q.put((name(j), {}, 0, traceback.format_exc()[-900:]))

def bad(w): return any(not (v < (2e-3 if n in ("lse","mlse") else 1.2e-2)) for n,v in w.items())

def main():
    ctx = mp.get_context("spawn"); q = ctx.Queue(); todo = list(JOBS); running = []; got = {}
    todo.sort(key=lambda j: 0 if j["kind"]!="tri" else 1)
    while todo or running:
        while todo and len(running) < 15:
            j = todo.pop(0); pr = ctx.Process(target=child, args=(j,q)); pr.start(); running.append((pr,j,time.time()))
        while not q.empty():
            n,w,s,e = q.get(); got[n]=(w,s,e)
        still=[]
        for pr,j,t in running:
            if not pr.is_alive():
                if name(j) not in got:
                    time.sleep(0.2)
                    while not q.empty():
                        n,w,s,e = q.get(); got[n]=(w,s,e)
                    if name(j) not in got: got[name(j)] = ({},0,f"died {pr.exitcode}")
            elif time.time()-t > 170: pr.kill(); got[name(j)] = ({},0,"HANG")
            else: still.append((pr,j,t))
        running = still; time.sleep(0.1)
    good=[]
    for j in JOBS:
        w,s,e = got[name(j)]
        state = "FAILED" if e else "WRONG" if bad(w) else "ok"
        print(f"{state:6} {name(j)} {s:.0f}s", {n: float(f'{v:.1e}') for n,v in w.items()} if state!='ok' or j['kind']!='tri' else '', e if state=='FAILED' else '', flush=True)
        if state=="ok" and not j.get("untimed"): good.append(j)
    print(f"checked after {time.time()-T0:.0f} s", flush=True)
    measure(good)


def cudnn(p, causal):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    q,k,v = (p[n].transpose(1,2).detach().requires_grad_() for n in "qkv"); do = p["dout"].transpose(1,2)
    def f():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q,k,v,is_causal=causal,enable_gqa=q.shape[1]!=k.shape[1])
    o=f()
    return (lambda: f().detach()), (lambda: torch.autograd.grad(o,(q,k,v),do,retain_graph=True))

def measure(good, S=16384, heads=16, kv=16, mask_="causal", seconds=2.0):
    import torch
    from burst_portable.kernels.base import Options
    masks=[mask_]
    table=[]
    for D,DV in dict.fromkeys((j["D"],j["DV"]) for j in good):
      for mask in masks:
        p = problem(1,S,S,heads,kv,D,DV); t = tiles_of(mask,S,S); opt = Options(D**-0.5, deterministic=False)
        area = S*(S+1)//2 if mask=="causal" else S*S
        unit = area*heads*2
        entries=[]; out=lse=delta=None
        for j in [j for j in good if (j["D"],j["DV"])==(D,DV)]:
            try:
                kn = make(j)
                if j["kind"]!="tri":
                    out,lse = kn.attend_whole(p["q"],p["k"],p["v"],t,opt)
                    entries.append((name(j)+" fwd",(D+DV)*unit,lambda kn=kn: kn.attend_whole(p["q"],p["k"],p["v"],t,opt)))
                    if j["kind"] in ("hop","triw"):
                        o,l=out,lse
                        entries.append((name(j)+" bwd",(3*D+2*DV)*unit,lambda kn=kn,o=o,l=l: kn.gradients(p["dout"],p["q"],p["k"],p["v"],o,l,t,opt)))
                        from burst_portable.backends.cuda.hopper import configs as cf, kernel as km
                        ap = (tuple(cf.ApartConfig(*c) for c in j["a"]) if j.get("a") else cf.apart_configs(D,DV)) if j["kind"]=="hop" else None
                        if ap:
                            entries[-1][2]()
                            tm = km._row_terms(km._TERMS,p["dout"],l,None,o,opt.scale,dim=D); gr=tuple(torch.empty_like(p[n]) for n in "qkv")
                            for w in (0,1,2):
                                entries.append((name(j)+" only "+("dq","dk","dv")[w],(2*D+DV if w<2 else D+DV)*unit,lambda kn=kn,ap=ap,tm=tm,gr=gr,w=w: kn._launch_apart(ap,tm,p["dout"],p["q"],p["k"],p["v"],t,opt.scale,gr,store=True,which=(w,))))
                else:
                    if lse is None: lse=torch.zeros(1,heads,S,device="cuda")+9
                    if delta is None: delta=torch.zeros(1,heads,S,device="cuda")
                    fl={"forward":D+DV,"both":2*D+2*DV,"dv":D+DV,"dk":2*D+DV,"queries":2*D+DV}[j["which"]]*unit
                    entries.append((name(j),fl,lambda kn=kn,j=j: run_part(kn,j,p,t,opt,None,lse,delta)))
                entries[-1][2](); torch.cuda.synchronize()
            except Exception as e: print("TIMING FAILED",name(j),traceback.format_exc()[-500:],flush=True)
        try:
            f,b = cudnn(p,mask=="causal"); f(); b(); torch.cuda.synchronize()
            entries += [(f"{D}/{DV} cudnn fwd",(D+DV)*unit,f),(f"{D}/{DV} cudnn bwd",(3*D+2*DV)*unit,b)]
        except Exception as e: print("cudnn",D,DV,str(e)[:200],flush=True)
        times={n:[] for n,_,_ in entries}; start=time.time(); rounds=0
        while rounds<4 or (time.time()-start<seconds and rounds<40):
            order=random.sample(entries,len(entries)); ev=[]
            for n,fl,c in order:
                a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True); a.record(); c(); b.record(); ev.append((n,a,b))
            torch.cuda.synchronize()
            for n,a,b in ev: times[n].append(a.elapsed_time(b))
            rounds+=1
        for n,fl,_ in sorted(entries,key=lambda e:e[0]):
            ms=statistics.median(times[n][1:]); table.append(dict(name=n,mask=mask,ms=round(ms,3),tflops=round(fl/ms/1e9,1)))
            print(f"{mask} {S//1024}K {heads}/{kv} {n:60} {ms:8.3f} ms {fl/ms/1e9:7.1f}",flush=True)
        json.dump(table,open(f"{OUT}/gpu-{mask_}-{S}-{heads}-{kv}.json","w"),indent=0)
        del entries,p; torch.cuda.empty_cache()
    print(f"done after {time.time()-T0:.0f} s",torch.cuda.get_device_name(),torch.__version__,flush=True)

if __name__=="__main__": main()
