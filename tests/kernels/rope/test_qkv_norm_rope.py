from importlib import import_module

import pytest
import torch

from liger_models.kernels.rope.qkv_norm_rope import qkv_norm_rope, qkv_norm_rope_reference

from ..oracle import assert_close_to_truth, opcheck
from .test_rope import GPU_DTYPES, draw, dtypes, tables

# (B, T, H, G, D, parts): queries, keys and values; keys that are values; queries alone
SHAPES = [(2, 3, 4, 2, 8, 2), (2, 3, 4, 2, 8, 1), (2, 3, 4, 2, 8, 0), (1, 1, 1, 1, 2, 2), (1, 3, 6, 1, 20, 1)]
MANY_HEADS = (1, 2, 40, 8, 96, 1)  # more than one program takes
GPU_SHAPES = [
    (2, 65, 8, 2, 256, 2),  # Gemma 4 E4B
    (2, 65, 8, 2, 512, 2),
    (2, 65, 8, 2, 512, 0),
    (1, 33, 16, 2, 512, 1),  # 26B-A4B
    (1, 65, 12, 12, 64, 2),  # the tower of E4B
    (1, 65, 16, 16, 72, 2),  # of 26B-A4B
]


def make(shape, dtype=torch.float32, device="cpu", table_batch=1):
    """Our function, the reference, their inputs and upstream gradients."""
    B, T, H, G, D, parts = shape
    cos, sin = tables(table_batch, T, D, device)

    def on(function):
        def call(packed, *weights):
            outputs = function(packed, cos.to(packed.device), sin.to(packed.device), H, G, D, *weights, eps=1e-5)
            return outputs if parts else outputs[0]

        return call

    weights = [draw(D, dtype=dtype, device=device, seed=seed) for seed in range(2 if parts else 1)]
    packed = draw(B, T, (H + parts * G) * D, dtype=dtype, device=device)
    heads = (H, G, G) if parts else (H,)
    upstream = [draw(B, T, n, D, dtype=dtype, device=device, seed=seed) for seed, n in enumerate(heads)]
    return on(qkv_norm_rope), on(qkv_norm_rope_reference), [packed, *weights], upstream


@pytest.mark.parametrize("shape", [*SHAPES, MANY_HEADS], ids=str)
def test_matches_fp64(backend, shape, poisoned_empty):
    for dtype in dtypes(backend):
        assert_close_to_truth(*make(shape, dtype, backend, shape[0] if dtype == torch.float32 else 1))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_real_sizes(shape, poisoned_empty):
    for dtype in GPU_DTYPES:
        assert_close_to_truth(*make(shape, dtype, "cuda"))


@pytest.mark.gpu
def test_weight_gradients_over_many_tokens():
    assert_close_to_truth(*make((2, 1025, 8, 2, 512, 1), torch.bfloat16, "cuda"))


def test_strided_inputs_and_gradients(backend):
    ours, reference, (packed, *weights), upstream = make((2, 3, 4, 2, 8, 1), device=backend)
    turned = [grad.transpose(1, 2).contiguous().transpose(1, 2) for grad in upstream]
    assert_close_to_truth(ours, reference, [packed.transpose(0, 1).contiguous().transpose(0, 1), *weights], turned)


def test_missing_gradients_are_zero(backend, poisoned_empty):
    for given in range(3):
        ours, reference, inputs, upstream = make((2, 3, 4, 2, 8, 1), device=backend)
        pick = lambda function, given=given: lambda *args: function(*args)[given]
        assert_close_to_truth(pick(ours), pick(reference), inputs, [upstream[given]])


@pytest.mark.parametrize("parts", [1, 2])
def test_as_transformers(parts):
    modeling = import_module("transformers.models.gemma4.modeling_gemma4")
    cos, sin = tables(1, 5, 16)
    raw_q, *raw = (draw(2, 5, heads, 16, seed=seed) for seed, heads in enumerate((4, 2, 2)))
    groups = [raw_q.unflatten(2, (2, 2)), *(x[:, :, :, None] for x in raw[:parts])]
    weights = [draw(16, seed=seed) for seed in (1, 2)]
    got = qkv_norm_rope(torch.cat(groups, 3).flatten(2), cos, sin, 4, 2, 16, *weights, eps=1e-5)
    wide = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    for ours, x, weight in zip(got, (raw_q, raw[0], raw[parts - 1]), (*weights, None), strict=True):
        norm = modeling.Gemma4RMSNorm(16, eps=1e-5, with_scale=weight is not None)
        if weight is not None:
            norm.weight.data.copy_(weight)
        want = norm(x) if weight is None else modeling.apply_rotary_pos_emb(norm(x), *wide, unsqueeze_dim=2)
        torch.testing.assert_close(ours, want)


def test_opcheck(backend):
    cos, sin = tables(1, 3, 8, backend)
    packed = draw(2, 3, 6 * 8, device=backend).requires_grad_()
    weights = [draw(8, device=backend, seed=seed).requires_grad_() for seed in range(2)]
    opcheck(torch.ops.liger_models.qkv_norm_rope, (packed, cos, sin, 4, 2, 8, *weights, 1e-6))


def test_errors():
    cos, sin = tables(1, 3, 8)
    packed, weight = torch.zeros(2, 3, 48), torch.ones(8)
    with pytest.raises(ValueError, match=r"num_heads \(3\) must be a multiple of num_kv_heads \(2\)"):
        qkv_norm_rope(packed, cos, sin, 3, 2, 8, weight, weight)
    with pytest.raises(ValueError, match=r"with W 32 without k_norm_weight, got \[2, 3, 48\]"):
        qkv_norm_rope(packed, cos, sin, 4, 2, 8, weight)
    with pytest.raises(ValueError, match=r"with W 48 or 64 with k_norm_weight, got \[2, 3, 40\]"):
        qkv_norm_rope(packed[..., :40], cos, sin, 4, 2, 8, weight, weight)
    with pytest.raises(ValueError, match=r"q_norm_weight must be \[8\], got \[4\]"):
        qkv_norm_rope(packed, cos, sin, 4, 2, 8, weight[:4], weight)
    with pytest.raises(TypeError, match="one dtype"):
        qkv_norm_rope(packed, cos, sin, 4, 2, 8, weight, weight.half())
