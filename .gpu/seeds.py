"""Check and time seeded_scores against plain torch on a GPU."""
import torch
from liger_models.kernels.seeded_scores import seeded_scores, seeded_scores_reference
def ms(f):
    f(); torch.cuda.synchronize(); a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record(); [f() for _ in range(10)]; b.record(); torch.cuda.synchronize(); return a.elapsed_time(b) / 10
for B in (1, 16, 256):
    z = torch.randn(B, 128256, device="cuda") * 3
    seeds = torch.randint(0, 2**62, (B,), device="cuda"); step = torch.randint(0, 1000, (B,), device="cuda")
    got, want = seeded_scores(z, seeds, step), seeded_scores_reference(z, seeds, step)
    print(B, "error %.1e" % (got - want).abs().max().item(), "same tokens", (got.argmax(1) == want.argmax(1)).all().item(), "ms: torch %.3f kernel %.3f" % (ms(lambda: seeded_scores_reference(z, seeds, step)), ms(lambda: seeded_scores(z, seeds, step))))
