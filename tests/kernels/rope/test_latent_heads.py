from functools import partial

import pytest
import torch

from liger_models.kernels.rope import latent_heads as module
from liger_models.kernels.rope.latent_heads import latent_heads, latent_heads_reference

from ..oracle import assert_close_to_truth, opcheck, run
from .test_rope import draw, dtypes, tables

# (B, T, H, N, R, V): one head; values wider and narrower than keys; widths that fill no block
SHAPES = [(2, 3, 4, 8, 4, 8), (1, 1, 1, 2, 2, 3), (2, 5, 3, 6, 2, 20), (1, 4, 40, 12, 8, 5)]
GPU_SHAPES = [(2, 33, 128, 128, 64, 128), (1, 50, 20, 192, 64, 256), (2, 17, 32, 64, 64, 128)]


def make(shape, dtype, device):
    B, T, H, N, R, V = shape
    both = draw(B, T, H * (N + V) + R + 3, dtype=dtype, device=device)  # of which kv and k_rope are parts
    q = draw(B, T, H * (N + R), dtype=dtype, device=device, seed=1)
    inputs = [q, both[..., : H * (N + V)], both[..., H * (N + V) + 3 :]]
    # The gradients of a fused attention kernel have the tokens after the heads.
    upstream = [
        draw(B, H, T, width, dtype=dtype, device=device, seed=seed).transpose(1, 2)
        for seed, width in enumerate((N + R, N + R, V))
    ]
    return inputs, upstream


def on(function, cos, sin, shape, interleaved):
    """``function`` of the activations alone: tables get no gradient."""
    tables = (None, None) if cos is None else (cos, sin)

    def call(q, kv, k_rope):
        angles = (None if x is None else x.to(q.device) for x in tables)
        return function(q, kv, k_rope, *angles, shape[2], interleaved=interleaved)

    return call


def check(shape, dtype, device, interleaved=False, rotated=True):
    B, T, _, _, R, _ = shape
    angles = tables(B if dtype == torch.float32 else 1, T, R, device) if rotated else (None, None)
    ours, reference = (on(f, *angles, shape, interleaved) for f in (latent_heads, latent_heads_reference))
    assert_close_to_truth(ours, reference, *make(shape, dtype, device))


@pytest.mark.cases(8)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(backend, shape, interleaved, monkeypatch, poisoned_empty):
    monkeypatch.setattr(module, "ELEMENTS", 64)  # several tiles of heads
    for dtype in dtypes(backend):
        check(shape, dtype, backend, interleaved)


def test_without_tables_nothing_is_rotated(backend, poisoned_empty):
    for dtype in dtypes(backend):
        check(SHAPES[0], dtype, backend, rotated=False)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
def test_against_a_loop_over_heads(backend, interleaved):
    """So that the reference itself is pinned: which columns are which, which are a pair, and which way they turn."""
    _, T, H, N, R, V = shape = (1, 3, 2, 5, 4, 3)
    (q, kv, k_rope), _ = make(shape, torch.float32, backend)
    cos, sin = tables(1, T, R, backend)
    got = latent_heads(q, kv, k_rope, cos, sin, H, interleaved=interleaved)

    def turned(x):  # [T, R]
        pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + R // 2) for i in range(R // 2)]
        y = x.clone()
        for i, (a, b) in enumerate(pairs):
            y[:, a] = x[:, a] * cos[0, :, i] - x[:, b] * sin[0, :, i]
            y[:, b] = x[:, b] * cos[0, :, i] + x[:, a] * sin[0, :, i]
        return y

    for head in range(H):
        own = q[0, :, head * (N + R) : (head + 1) * (N + R)]
        pair = kv[0, :, head * (N + V) : (head + 1) * (N + V)]
        torch.testing.assert_close(got[0][0, :, head], torch.cat([own[:, :N], turned(own[:, N:])], 1))
        torch.testing.assert_close(got[1][0, :, head], torch.cat([pair[:, :N], turned(k_rope[0])], 1))
        assert torch.equal(got[2][0, :, head], pair[:, N:])


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_real_sizes(shape, interleaved, poisoned_empty):
    for dtype in dtypes("cuda"):
        check(shape, dtype, "cuda", interleaved)


def test_results_are_contiguous_and_keep_no_input(backend):
    inputs, _ = make(SHAPES[0], torch.float32, backend)
    results = latent_heads(*inputs, *tables(1, 3, 4, backend), 4)
    storages = {x.untyped_storage().data_ptr() for x in inputs}
    assert all(x.is_contiguous() and x.untyped_storage().data_ptr() not in storages for x in results)


def test_no_tokens(backend):
    inputs, upstream = make(SHAPES[0], torch.float32, backend)
    call = on(latent_heads, *tables(1, 0, 4, backend), SHAPES[0], False)
    *results, _, _, _ = run(call, [x[:, :0] for x in inputs], [x[:, :0] for x in upstream])
    assert [list(x.shape) for x in results] == [[2, 0, 4, 12], [2, 0, 4, 12], [2, 0, 4, 8]]


def test_opcheck(kernel_device):
    inputs, upstream = make((1, 2, 2, 4, 2, 3), torch.float32, kernel_device)
    cos, sin = tables(1, 2, 2, kernel_device)
    opcheck(torch.ops.liger_models.latent_heads, (*(x.requires_grad_() for x in inputs), cos, sin, 2, True))
    opcheck(torch.ops.liger_models.latent_heads_backward, (*upstream, cos, sin, 2, True))


def test_errors():
    (q, kv, k_rope), _ = make(SHAPES[0], torch.float32, "cpu")
    cos, sin = tables(1, 3, 4)
    call = partial(latent_heads, q, kv, k_rope, cos, sin, 4)
    assert len(call()) == 3
    for inputs, error, message in (
        ((q[..., :-1], kv, k_rope, cos, sin), ValueError, r"q must be .* with H = 4, got \[2, 3, 47\]"),
        ((q, kv[:, :2], k_rope, cos, sin), ValueError, r"got \[2, 3, 48\], \[2, 2, 64\] and \[2, 3, 4\]"),
        ((q, kv, q[..., :12], cos, sin), ValueError, "q must be"),
        ((q, kv, k_rope[..., :3], cos, sin), ValueError, "head_dim must be even, got 3"),
        ((q, kv, k_rope, cos[:, :2], sin[:, :2]), ValueError, "cos and sin must be"),
        ((q, kv, k_rope, cos, None), ValueError, "must both be given"),
        ((q, kv.half(), k_rope, cos, sin), TypeError, "must have one dtype, got torch.float32, torch.float16"),
        ((q, kv, k_rope.long(), cos, sin), TypeError, "k_rope must be a floating-point tensor"),
    ):
        with pytest.raises(error, match=message):
            latent_heads(*inputs, 4)
