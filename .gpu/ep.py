"""torchrun --nproc-per-node R .gpu/ep.py MODE TOKENS LAYERS: where a step of Qwen3-30B-A3B's layers goes: host, allocator, kernels."""
import sys, time
import torch, torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from benchmarks.training import build
from benchmarks.training.models import keep_layers, read_config
from benchmarks.training.modes import Mode
from benchmarks.training.step import make_step

import os
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
build.WHOLE = 0
mode, T, layers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = read_config("qwen3-30b-a3b")
keep_layers(config, layers)
step = make_step(Mode.parse(mode), config, lr=1e-5, sharded=True)
generator = torch.Generator("cuda").manual_seed(dist.get_rank())
draw = lambda: torch.randint(0, config["vocab_size"], (1, T), device="cuda", generator=generator)
run = lambda: step({"input_ids": (ids := draw()), "labels": ids})
for _ in range(6):
    run()
torch.cuda.synchronize(); dist.barrier()
segments = lambda: torch.cuda.memory_stats()["segment.all.allocated"]
host, whole, made = [], [], []
for _ in range(8):
    torch.cuda.synchronize(); dist.barrier(); torch.cuda.synchronize()
    before, begun = segments(), time.perf_counter()
    run()
    host.append(time.perf_counter() - begun)
    torch.cuda.synchronize()
    whole.append(time.perf_counter() - begun)
    made.append(segments() - before)
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
    run(); torch.cuda.synchronize()
if dist.get_rank() == 0:
    ms = lambda xs: [round(x * 1e3) for x in xs]
    print(mode, T, layers, "host", ms(host), "whole", ms(whole), "segments", made, "retries", torch.cuda.memory_stats()["num_alloc_retries"],
          "peak", round(torch.cuda.max_memory_allocated() / 2**30, 1))
    kernels = {}
    for e in prof.events():
        if e.device_type == torch.autograd.DeviceType.CUDA:
            kernels.setdefault(e.name[:60], []).append(e.device_time_total)
    for name, times in sorted(kernels.items(), key=lambda kv: -sum(kv[1]))[:14]:
        print(f"  {sum(times) / 1e3:8.1f} ms {len(times):5d}  {name}")
    rows = [(e.self_cpu_time_total, e.count, e.key[:60]) for e in prof.key_averages()]
    for t, n, name in sorted(rows, reverse=True)[:12]:
        print(f"  cpu {t / 1e3:8.1f} ms {n:6d}  {name}")
dist.destroy_process_group()
