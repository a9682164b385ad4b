"""AOT of hopper variants: python hop.py"""
import re, sys, time
from backends.cuda import aot
from backends.cuda.aot import _descriptor, _vector, _build, compiled
from burst_portable.kernels.triton import descriptors as md
def rows(r,c,dt): 
    size={'bf16':2,'fp16':2,'fp32':4}[dt]
    return _descriptor([1,r,1,c],dt,min(128,c*size))
def fwd(A,B,VA,VB,BN,NS,W=2,REGS=240,maxnreg=168,mode=0,share=0,DV=None):
    from burst_portable.backends.cuda.hopper import forward
    dt='bf16'; od=dt if mode==0 else 'fp32'
    t={"q_desc":rows(64,A,dt),"q2_desc":rows(64,B or A,dt),"k_desc":rows(BN,A,dt),"k2_desc":rows(BN,B or A,dt),
       "v_desc":rows(BN,VA,dt),"v2_desc":rows(BN,VB or VA,dt),"o_desc":rows(64,VA,od),"o2_desc":rows(64,VB or VA,od),
       "out":f"*{od}","lse":"*fp32","table":"*i32","counter":"*i32","qk_scale":"fp32","o_sb":"i64","o_ss":"i64","o_sh":"i64","lse_sb":"i64","lse_sh":"i64"}
    c={"BN":BN,"A":A,"B":B,"VA":VA,"VB":VB,"DV":DV or VA+VB,"NS":NS,"MODE":mode,"SHARE":share,"W":W,"REGS":REGS}
    return _build(f"fwd {A}+{B}/{VA}+{VB} BN{BN} NS{NS} W{W} mode{mode} share{share}",forward.forward_kernel,t,c,maxnreg)
def show(b):
    t=time.time()
    try: k,said=compiled(b)
    except Exception as e:
        while e.__cause__: e=e.__cause__
        print(b.name,'FAILED',type(e).__name__,str(e)[-600:],flush=True); return
    u=re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",said); r=re.search(r"Used (\d+) registers",said)
    print(b.name,'regs',r and r[1],'stack',u and u[1],'spill',u and (int(u[2])+int(u[3])),'smem KiB',k.metadata.shared/1024,'early',aot._early_releases(k.asm['ptx']),sorted(set(re.findall(r"C75\d\d[^\n]*",said)))[:2],md.check(k.asm['cubin'])[:2],f'{time.time()-t:.0f}s',flush=True)
    return k
def bwd(A,B,VA,VB,BM,NQ,early=0,REGS=240,maxnreg=168,store=1,D=None,DV=None):
    from burst_portable.backends.cuda.hopper import backward
    dt='bf16'; md_=dt if store else 'fp32'
    t={"q_desc":rows(BM,A,dt),"q2_desc":rows(BM,B or A,dt),"k_desc":rows(64,A,dt),"k2_desc":rows(64,B or A,dt),
       "v_desc":rows(64,VA,dt),"v2_desc":rows(64,VB or VA,dt),"do_desc":rows(BM,VA,dt),"do2_desc":rows(BM,VB or VA,dt),"term_desc":_vector(BM),
       "dq_desc":rows(64,64,'fp32'),"dq2_desc":rows(64,B or 64,'fp32'),
       "dk_desc":rows(64,A,md_),"dk2_desc":rows(64,B or A,md_),"dv_desc":rows(64,VA,md_),"dv2_desc":rows(64,VB or VA,md_),
       "dk_out":f"*{md_}","dv_out":f"*{md_}","table":"*i32","scale":"fp32","qk_scale":"fp32"}
    c={"BM":BM,"A":A,"B":B,"D":D or A+B,"VA":VA,"VB":VB,"DV":DV or VA+VB,"NQ":NQ,"FOLD":1,"STORE":store,"EARLY":early,"REGS":REGS}
    return _build(f"{early}bwd {A}+{B}/{VA}+{VB} BM{BM} NQ{NQ} store{store}",backward.backward_kernel,t,c,maxnreg)
def apart(what,A,B,VA,VB,BN,NX,NY,early=0,REGS=240,maxnreg=168,store=1,D=None,DV=None):
    from burst_portable.backends.cuda.hopper import apart as m
    dt='bf16'; od=dt if store else 'fp32'; OA,OB=(VA,VB) if what==2 else (A,B)
    t={"own_desc":rows(64,A,dt),"own2_desc":rows(64,B or A,dt),"ownv_desc":rows(64,VA,dt),"ownv2_desc":rows(64,VB or VA,dt),
       "x_desc":rows(BN,A,dt),"x2_desc":rows(BN,B or A,dt),"y_desc":rows(BN,VA,dt),"y2_desc":rows(BN,VB or VA,dt),"term_desc":_vector(BN),
       "out_desc":rows(64,OA,od),"out2_desc":rows(64,OB or OA,od),"out":f"*{od}","terms":"*fp32","table":"*i32","scale":"fp32","qk_scale":"fp32"}
    c={"WHAT":what,"BN":BN,"A":A,"B":B,"D":D or A+B,"VA":VA,"VB":VB,"DV":DV or VA+VB,"NX":NX,"NY":NY,"FOLD":1,"STORE":store,"EARLY":early,"REGS":REGS}
    return _build(f"{early}{('dq','dk','dv')[what]} {A}+{B}/{VA}+{VB} BN{BN} NX{NX} NY{NY} store{store}",m.apart_kernel,t,c,maxnreg)
