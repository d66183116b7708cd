from importlib import import_module

import pytest
import torch

from liger_models.kernels.rope.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from liger_models.kernels.rope.rope import rope_qkv

from ..oracle import assert_close_to_truth, opcheck, run
from .test_rope import GPU_DTYPES, draw, dtypes, packed, tables, upstream_of

# whole: the norms are over all heads
FLAVORS = {
    "qwen3": {"whole": False},
    "gemma3": {"whole": False, "weight_offset": 1.0, "scale_in_fp32": True},
    "olmo2": {"whole": True, "eps": 1e-5, "scale_in_fp32": True},
    "other": {"whole": True, "interleaved": True},
}
# (B, T, H, G, D, R): grouped, multi-head and multi-query; odd sizes; partial rotary widths and no rotation
SHAPES = [(2, 3, 4, 2, 8, 8), (1, 1, 1, 1, 2, 2), (2, 3, 7, 1, 6, 2), (1, 3, 6, 6, 20, 10), (2, 2, 3, 3, 4, 0)]
SMALL = (2, 2, 4, 2, 8, 8)
MANY_HEADS = (2, 1, 40, 8, 96, 48)  # more than one program takes
GPU_SHAPES = [
    ((2, 65, 32, 8, 128, 128), "qwen3"),  # Qwen3-8B
    ((1, 33, 64, 4, 128, 128), "qwen3"),  # Qwen3-235B-A22B
    ((2, 65, 4, 1, 256, 256), "gemma3"),  # Gemma-3-1B
    ((2, 17, 32, 16, 128, 128), "gemma3"),  # Gemma-3-27B
    ((1, 33, 16, 2, 256, 64), "gemma3"),  # Qwen3-Next
    ((2, 65, 32, 32, 128, 128), "olmo2"),  # OLMo-2-7B
    ((1, 33, 40, 8, 128, 128), "olmo2"),  # OLMo-2-32B
    ((2, 17, 40, 40, 128, 128), "olmo2"),  # OLMo-2-13B
    ((2, 17, 12, 4, 80, 0), "other"),
]


def on(function, cos, sin, *sizes, **options):
    """``function`` of the activations and the norm weights alone: tables get no gradient."""

    def call(qkv, q_weight, k_weight):
        angles = (None, None) if cos is None else (cos.to(qkv.device), sin.to(qkv.device))
        return function(qkv, *angles, *sizes, q_weight, k_weight, **options)

    return call


def make(shape, flavor, dtype=torch.float32, device="cpu", table_batch=1):
    """Our function, the reference, their inputs and upstream gradients."""
    B, T, H, G, D, R = shape
    options = dict(FLAVORS[flavor])
    widths = [n * D for n in (H, G)] if options.pop("whole") else [D, D]
    cos, sin = tables(table_batch, T, R, device) if R else (None, None)
    functions = [on(f, cos, sin, H, G, D, **options) for f in (qk_norm_rope, qk_norm_rope_reference)]
    weights = [draw(width, dtype=dtype, device=device, seed=seed) for seed, width in enumerate(widths)]
    inputs = [draw(*packed(B, T, H, G, D), dtype=dtype, device=device), *weights]
    return *functions, inputs, upstream_of(B, T, H, G, D, dtype, device)


@pytest.mark.cases(22)
@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("shape", [*SHAPES, MANY_HEADS], ids=str)
def test_matches_fp64(backend, shape, flavor, poisoned_empty):
    for dtype in dtypes(backend):
        table_batch = shape[0] if dtype == torch.float32 else 1
        assert_close_to_truth(*make(shape, flavor, dtype, backend, table_batch))


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "flavor"), GPU_SHAPES, ids=str)
def test_real_sizes(shape, flavor, poisoned_empty):
    for dtype in GPU_DTYPES:
        assert_close_to_truth(*make(shape, flavor, dtype, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("flavor", ["qwen3", "olmo2"])
def test_weight_gradients_over_many_tokens(flavor):
    """More tokens than programs, so that each sums over several, and not all over as many."""
    assert_close_to_truth(*make((2, 1025, 16, 4, 128, 128), flavor, torch.bfloat16, "cuda"))


@pytest.mark.parametrize("flavor", ["qwen3", "olmo2"])
def test_strided_inputs_and_gradients(backend, flavor):
    B, T, H, G, D, _ = shape = (2, 5, 4, 2, 8, 8)
    ours, reference, (qkv, *weights), _ = make(shape, flavor, device=backend, table_batch=B)
    dq, dk, dv = draw(B, H, T, D, device=backend), draw(B, G, T, D, device=backend), draw(T, B, G, D, device=backend)
    upstream = [dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(0, 1)]  # attention's layout, and another
    assert_close_to_truth(ours, reference, [qkv.transpose(0, 1).contiguous().transpose(0, 1), *weights], upstream)
    upstream = [dq[..., :1].transpose(1, 2).expand(B, T, H, D), dk[:1, :, :1].transpose(1, 2).expand(B, T, G, D)]
    double = [draw(B, T, 2 * qkv.shape[-1], device=backend), *(draw(2 * len(w), device=backend) for w in weights)]
    assert_close_to_truth(ours, reference, [x[..., ::2] for x in double], [*upstream, dv.transpose(0, 1)])


@pytest.mark.parametrize("given", [(0,), (1,), (2,), (1, 2)], ids=str)
@pytest.mark.parametrize("flavor", ["qwen3", "olmo2"])
def test_missing_gradients_are_zero(backend, flavor, given, poisoned_empty):
    ours, reference, inputs, upstream = make(SMALL, flavor, device=backend)
    pick = lambda function: lambda *args: tuple(function(*args)[i] for i in given)
    assert_close_to_truth(pick(ours), pick(reference), inputs, [upstream[i] for i in given])


def test_mixed_dtypes(backend):
    """Norm weights are often kept in fp32 in a half-precision model."""
    for flavor in ("qwen3", "olmo2"):
        ours, reference, (qkv, *weights), upstream = make(SMALL, flavor, device=backend)
        assert_close_to_truth(ours, reference, [qkv.half(), *weights], [grad.half() for grad in upstream])


def test_extreme_values(backend):
    heads = torch.tensor([[1e4, -6e4, 3e4, 0.0], [1e-6, 2e-7, -1e-6, 6e-8], [0.0] * 4, [-0.0] * 4], device=backend)
    qkv, cos, sin = heads.half().view(1, 1, 16), *tables(1, 1, 4, backend)
    for width in (1, 2):
        weights = [torch.ones(n, device=backend, dtype=torch.float16) for n in (4 * width, 4)]
        got = qk_norm_rope(qkv, cos, sin, 2, 1, 4, *weights)
        assert all(part.isfinite().all() for part in got)
        torch.testing.assert_close(got, qk_norm_rope_reference(qkv, cos, sin, 2, 1, 4, *weights))


TRANSFORMERS = {
    "qwen3": ("qwen3", "Qwen3", 16, {}),
    "gemma3": ("gemma3", "Gemma3", 16, {"query_pre_attn_scalar": 8}),
    "olmo2": ("olmo2", "Olmo2", 16, {}),
    "olmo3": ("olmo3", "Olmo3", 16, {}),
    "glm": ("glm", "Glm", 8, {"pad_token_id": 0, "attention_bias": False}),
    "glm4": ("glm4", "Glm4", 8, {"pad_token_id": 0, "attention_bias": False}),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_equals_transformers(backend, name, monkeypatch):
    """What transformers' attention hands to the attention proper, and the gradients of all that went in."""
    B, T, H, G, D, C = 2, 5, 4, 2, 16, 24
    package, prefix, R, more = TRANSFORMERS[name]
    modeling = import_module(f"transformers.models.{package}.modeling_{package}")
    config_class = "Gemma3TextConfig" if name == "gemma3" else f"{prefix}Config"
    config = getattr(import_module(f"transformers.models.{package}.configuration_{package}"), config_class)(
        hidden_size=C, num_attention_heads=H, num_key_value_heads=G, head_dim=D, num_hidden_layers=1, **more
    )
    config._attn_implementation = "eager"
    config.head_dim = D
    torch.manual_seed(0)
    theirs = getattr(modeling, f"{prefix}Attention")(config, 0).to(backend)
    captured = []

    def capture(module, query, key, value, *args, **kwargs):
        captured.extend(x.transpose(1, 2) for x in (query, key, value))
        return captured[0], None

    monkeypatch.setattr(modeling, "eager_attention_forward", capture)
    norms = [theirs.q_norm, theirs.k_norm] if hasattr(theirs, "q_norm") else []
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    cos, sin = tables(1, T, R, backend)
    full = tuple(torch.cat([table, table], -1).float() for table in (cos, sin))
    projections = [theirs.q_proj.weight, theirs.k_proj.weight, theirs.v_proj.weight]

    def hugging_face(x, *leaves):
        captured.clear()
        names = [f"{part}.weight" for part in ("q_proj", "k_proj", "v_proj", *(["q_norm", "k_norm"] if norms else []))]
        torch.func.functional_call(theirs, dict(zip(names, leaves, strict=True)), (x, full, None))
        return tuple(captured)

    def native(x, q_rows, k_rows, v_rows, *weights):
        groups = [rows.view(G, -1, C) for rows in (q_rows, k_rows, v_rows)]
        qkv = x @ torch.cat(groups, 1).flatten(0, 1).T
        if not weights:
            return rope_qkv(qkv, cos.float(), sin.float(), H, G, D, interleaved=True)
        options = dict(FLAVORS["olmo2" if name == "olmo3" else name])
        del options["whole"]
        options["eps"] = config.rms_norm_eps
        return qk_norm_rope(qkv, cos.float(), sin.float(), H, G, D, *weights, **options)

    inputs = [draw(B, T, C, device=backend), *(w.detach() for w in (*projections, *(norm.weight for norm in norms)))]
    upstream = upstream_of(B, T, H, G, D, torch.float32, backend)
    got, want = run(native, inputs, upstream), run(hugging_face, inputs, upstream)
    for ours, exact in zip(got, want, strict=True):
        assert (ours - exact).norm() <= 2e-6 * exact.norm()


@pytest.mark.parametrize("flavor", ["qwen3", "olmo2"])
def test_second_backward_agrees_and_nothing_is_overwritten(backend, flavor):
    ours, _, inputs, upstream = make(SMALL, flavor, device=backend)
    leaves = [x.requires_grad_() for x in inputs]
    outputs = ours(*leaves)
    kept = [t.clone() for t in (*leaves, *outputs, *upstream)]
    first = [g.clone() for g in torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)]
    second = torch.autograd.grad(outputs, leaves, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((*leaves, *outputs, *upstream), kept, strict=True))


@pytest.mark.parametrize("flavor", ["qwen3", "olmo2"])
def test_frozen_weights_cost_no_gradient_work(kernel_device, flavor, monkeypatch):
    ours, _, inputs, upstream = make(SMALL, flavor, device=kernel_device)
    leaves = [x.requires_grad_() for x in inputs]
    want = torch.autograd.grad(ours(*leaves), leaves, upstream)
    for frozen in ((1, 2), (1,), (2,)):
        for index, leaf in enumerate(leaves):
            leaf.requires_grad_(index not in frozen)
        outputs = ours(*leaves)
        with monkeypatch.context() as patch:
            if frozen == (1, 2):
                patch.setattr(torch.Tensor, "sum", None)  # of the partial weight gradients
            got = torch.autograd.grad(outputs, [leaf for leaf in leaves if leaf.requires_grad], upstream)
        assert all(torch.equal(a, b) for a, b in zip(got, [want[i] for i in {0, 1, 2} - {*frozen}], strict=True))
    with torch.no_grad():
        assert not ours(*leaves)[0].requires_grad


def test_saved_are_the_packed_projection_weights_and_tables(kernel_device):
    ours, _, inputs, _ = make(SMALL, "qwen3", device=kernel_device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)), lambda t: t):
        ours(*(x.requires_grad_() for x in inputs))
    assert sorted(saved) == sorted([(2, 2, 64), (8,), (8,), (1, 2, 4), (1, 2, 4)])


@pytest.mark.parametrize("flavor", ["qwen3", "olmo2"])
def test_empty_batch(backend, flavor, poisoned_empty):
    for B, T in ((0, 3), (2, 0)):
        options = dict(FLAVORS[flavor])
        widths = (32, 16) if options.pop("whole") else (8, 8)
        table = torch.ones(1, T, 4, device=backend)
        qkv = torch.ones(B, T, 64, device=backend, requires_grad=True)
        weights = [torch.ones(width, device=backend, requires_grad=True) for width in widths]
        sum(part.sum() for part in qk_norm_rope(qkv, table, table, 4, 2, 8, *weights, **options)).backward()
        assert qkv.grad.shape == qkv.shape
        assert all(torch.equal(weight.grad, torch.zeros_like(weight)) for weight in weights)


@pytest.mark.gpu
@pytest.mark.parametrize("flavor", ["qwen3", "olmo2"])
def test_more_than_two_billion_elements(flavor):
    T, H, G, D = 350_001, 32, 8, 128
    options = dict(FLAVORS[flavor])
    widths = (H * D, G * D) if options.pop("whole") else (D, D)
    weights = [draw(width, device="cuda", dtype=torch.bfloat16, seed=width) for width in widths]
    angles = torch.arange(T, device="cuda")[:, None] * 10000.0 ** (-torch.arange(0, D, 2, device="cuda") / D)
    cos, sin = angles.cos()[None], angles.sin()[None]
    qkv = torch.zeros(packed(1, T, H, G, D), dtype=torch.bfloat16, device="cuda")
    assert qkv.numel() > 2**31
    qkv[:, -2:] = torch.randn(2, qkv.shape[-1], device="cuda")
    end = lambda t: t[:, -2:].detach().float()
    few = [end(qkv).requires_grad_(), *(weight.float().requires_grad_() for weight in weights)]
    want = qk_norm_rope_reference(few[0], end(cos), end(sin), H, G, D, *few[1:], **options)
    many = [x.requires_grad_() for x in (qkv, *weights)]
    outputs = qk_norm_rope(qkv, cos, sin, H, G, D, *weights, **options)
    # The outputs are sent back in the attention's layout. They are zero where the input is, and so are the gradients.
    back = [out.detach().transpose(1, 2).contiguous().transpose(1, 2) for out in outputs]
    dqkv, *dweights = torch.autograd.grad(outputs, many, back)
    want += torch.autograd.grad(want, few, [end(out) for out in outputs])
    for got, exact in zip((*map(end, outputs), end(dqkv), *dweights), want, strict=True):
        assert (got.float() - exact).norm() < 0.01 * exact.norm()
    assert not dqkv[:, : T // 2].any()


def test_opcheck(kernel_device):
    cos, sin = tables(1, 3, 8, kernel_device)
    qkv = draw(*packed(2, 3, 4, 2, 8), device=kernel_device).requires_grad_()
    q_weight, k_weight = (draw(width, device=kernel_device).requires_grad_() for width in (32, 16))
    opcheck(torch.ops.liger_models.qk_norm_rope, (qkv, cos, sin, 4, 2, 8, q_weight, k_weight, 1e-6, 0.0, True, False))
    dq, weight = draw(2, 4, 3, 8, device=kernel_device).transpose(1, 2), draw(8, device=kernel_device)
    opcheck(
        torch.ops.liger_models.qk_norm_rope_backward,
        (dq, None, None, qkv.detach(), None, None, 4, 2, 8, weight, weight, 1e-6, 1.0, True, False),
    )


@pytest.mark.compile
def test_compiles_without_graph_breaks(kernel_device):
    for flavor in ("qwen3", "olmo2"):
        ours, _, inputs, upstream = make(SMALL, flavor, device=kernel_device)
        backend = "inductor" if kernel_device == "cuda" else "aot_eager"
        compiled = torch.compile(ours, fullgraph=True, backend=backend)
        torch.testing.assert_close(run(compiled, inputs, upstream), run(ours, inputs, upstream), rtol=0, atol=0)


def test_bad_arguments():
    qkv, table = torch.ones(2, 3, 64), torch.ones(1, 3, 4)
    with pytest.raises(
        ValueError, match=r"must both be \[8\] \(each head .* or \[32\] and \[16\] .* got \[32\] and \[8\]"
    ):
        qk_norm_rope(qkv, table, table, 4, 2, 8, torch.ones(32), torch.ones(8))
    with pytest.raises(TypeError, match=r"norm weights must have one dtype, got torch.float32 and torch.float16"):
        qk_norm_rope(qkv, table, table, 4, 2, 8, torch.ones(8), torch.ones(8).half())
    with pytest.raises(TypeError, match=r"k_norm_weight must be a floating-point tensor, got torch.int64"):
        qk_norm_rope(qkv, table, table, 4, 2, 8, torch.ones(8), torch.ones(8).long())
    with pytest.raises(ValueError, match=r"qk_norm_rope: num_heads \(4\) must be a multiple of num_kv_heads \(3\)"):
        qk_norm_rope(qkv, table, table, 4, 3, 8, torch.ones(8), torch.ones(8))
    with pytest.raises(ValueError, match=r"qk_norm_rope: cos and sin must both be given"):
        qk_norm_rope(qkv, table, None, 4, 2, 8, torch.ones(8), torch.ones(8))
