"""Latent attention against transformers' layer, with and without a cache of latents."""

import pytest
import torch
from torch import nn

from liger_models.kernels.attention.write_latents import write_latents
from liger_models.kernels.matmul.batch_invariance import batch_invariant
from liger_models.kernels.matmul.head_linear import head_linear
from liger_models.layers import latent_attention as module
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import LatentDecoderConfig
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.latent_attention import LigerLatentAttention
from liger_models.layers.norm import LigerRMSNorm
from liger_models.layers.paged_cache import PagedCache
from liger_models.layers.rope import RotaryEmbedding, YarnScaling

from ..late import Late

deepseek = Late("transformers.models.deepseek_v3.modeling_deepseek_v3")
configuration = Late("transformers.models.deepseek_v3.configuration_deepseek_v3")

C, H, N, R, V, L = 32, 4, 12, 8, 10, 24
SIZES = {"qk_nope_head_dim": N, "qk_rope_head_dim": R, "v_head_dim": V, "kv_lora_rank": L}


def make(q_rank=20, **options):
    torch.manual_seed(0)
    norm = lambda width: LigerRMSNorm(width, 1e-6)
    layer = LigerLatentAttention(C, H, N, R, V, L, q_rank, norm=norm, layer=0, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return layer.eval()


def layout_of(B, T, device="cpu", **options):
    return BatchLayout.build((B, T), torch.device(device), {"default": RotaryEmbedding(R)}, **options)


def attend(layer, x, **options):
    """The layer's output on x [B, T, C] alone, without the stream."""
    return layer.add_norm(None, None, x, layout_of(*x.shape[:2], x.device, **options))[0]


def theirs(layer, interleaved=True):
    """transformers' layer with the weights of ours."""
    config = configuration.DeepseekV3Config(
        hidden_size=C, num_attention_heads=H, num_key_value_heads=H, q_lora_rank=layer.q_rank, **SIZES,
        attention_bias=layer.o_proj.bias is not None, rope_interleave=interleaved, num_hidden_layers=1, vocab_size=9,
    )  # fmt: skip
    config._attn_implementation = "eager"
    other = deepseek.DeepseekV3Attention(config, 0)
    pairs = {"kv_a_layernorm": layer.kv_a_layernorm, "kv_b_proj": layer.kv_b_proj, "o_proj": layer.o_proj}
    state = {f"{name}.{key}": x for name, part in pairs.items() for key, x in part.state_dict().items()}
    if layer.q_rank is None:
        state["q_proj.weight"] = layer.q_proj.weight
        state |= {f"kv_a_proj_with_mqa.{key}": x for key, x in layer.kv_a_proj.state_dict().items()}
    else:
        for key, x in layer.qkv_a_proj.state_dict().items():
            state[f"q_a_proj.{key}"], state[f"kv_a_proj_with_mqa.{key}"] = x[: layer.q_rank], x[layer.q_rank :]
        state |= {"q_a_layernorm.weight": layer.q_a_layernorm.weight, "q_b_proj.weight": layer.q_b_proj.weight}
    other.load_state_dict(state)
    return other


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("q_rank", "bias"), [(20, False), (20, True), (None, False), (None, True)])
def test_against_transformers(q_rank, bias, interleaved, kernel):
    layer = make(q_rank, bias=bias, interleaved=interleaved, rope_kernel=kernel)
    x = torch.randn(2, 7, C, requires_grad=True)
    got = attend(layer, x)
    cos, sin = RotaryEmbedding(R)(torch.arange(7)[None])
    tables = tuple(torch.cat([x, x], -1) for x in (cos, sin))
    mask = torch.full((7, 7), float("-inf")).triu(1)[None, None]
    other = theirs(layer, interleaved)
    want = other(x, position_embeddings=tables, attention_mask=mask)[0]
    torch.testing.assert_close(got, want)
    dy = torch.randn_like(want)
    ours = torch.autograd.grad(got, [x, layer.kv_b_proj.weight, layer.o_proj.weight], dy)
    wanted = torch.autograd.grad(want, [x, other.kv_b_proj.weight, other.o_proj.weight], dy)
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("q_rank", [20, None])
@pytest.mark.parametrize("parts", [[5, 1, 1, 20], [1, 23, 1], [2, 3, 21]])
def test_cached_latents_give_what_the_whole_gives(q_rank, parts):
    """One token, few tokens (absorbed) and many (keys and values computed again) after cached ones, with padding."""
    layer, x = make(q_rank), torch.randn(2, sum(parts), C)
    mask = torch.ones(2, sum(parts), dtype=torch.int64)
    mask[1, :1] = 0
    with torch.no_grad():
        want = attend(layer, x, attention_mask=mask)
        cache, results, forms = DecodeCache(), [], []
        for part in x.split(parts, 1):
            seen = mask[:, : cache.length + part.shape[1]]
            layout = layout_of(*part.shape[:2], cache=cache, attention_mask=seen)
            forms.append(layer._absorbs(layout, part.shape[1]))
            results.append(layer.add_norm(None, None, part, layout)[0])
            cache.advance(part.shape[1])
    torch.testing.assert_close(torch.cat(results, 1)[mask > 0], want[mask > 0])
    assert forms == [cached > 0 and size <= 20 for cached, size in zip([0, *parts], parts, strict=False)]
    rows, nothing = cache._layers[0]
    assert rows.shape[2:] == (1, L + R)
    assert nothing.numel() == 0


def test_pages_hold_one_row_for_each_token():
    layer, x = make(), torch.randn(2, 21, C)
    with torch.no_grad():
        want = attend(layer, x)
        cache = PagedCache(2, 40, torch.device("cpu"))
        cache.start(2, 18)
        prompts = attend(layer, x[:, :18], cache=cache)
        torch.testing.assert_close(prompts, want[:, :18])
        cache.settle()
        cache.advance(18)
        for place in range(18, 21):
            cache.step()
            new = x[:, place : place + 1]
            options = {"cache": cache, "position_ids": torch.tensor([[place]])}
            torch.testing.assert_close(attend(layer, new, **options), want[:, place : place + 1])
    rows, nothing = cache._layers[0]
    assert rows.shape == (2, 64, 1, L + R)
    assert cache.num_bytes == rows.nbytes
    assert not nothing.numel()


def step_twice(layer, x, length):
    """The layer's outputs for x [B, length, C] and two more tokens, in a paged cache, [B, length + 2, C]."""
    cache = PagedCache(len(x), length + 2, x.device)
    cache.start(len(x), length)
    results = [attend(layer, x[:, :length], cache=cache)]
    cache.settle()
    cache.advance(length)
    for place in (length, length + 1):
        cache.step()
        positions = torch.full((len(x), 1), place, device=x.device)
        results.append(attend(layer, x[:, place : place + 1], cache=cache, position_ids=positions))
    return torch.cat(results, 1), cache._layers[0][0]


@pytest.mark.cases(9)
@torch.no_grad()
@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 1), (torch.float16, 1), (torch.float16, 3)])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("q_rank", "rotary"), [(20, "default"), (None, "default"), (20, None)])
def test_fused_steps(q_rank, rotary, interleaved, rows, dtype, kernel_device, monkeypatch):
    """The kernels of a step, against the layer in fp32, and against the step without them up to rounding."""
    layer = make(q_rank, interleaved=interleaved, rotary=rotary).to(kernel_device)
    x, calls = torch.randn(rows, 6, C, device=kernel_device), []
    want = attend(layer, x)
    layer, x = layer.to(dtype), x.to(dtype)
    for op in (head_linear, write_latents):
        spy = lambda *args, op=op, **options: calls.append(op) or op(*args, **options)
        monkeypatch.setattr(module, op.__name__, spy)
    got, pages = step_twice(layer, x, 4)
    assert calls == [write_latents, head_linear, head_linear] * 2  # rows, queries and values of both tokens
    monkeypatch.setattr(module, "takes_heads", lambda *_: False)
    monkeypatch.setattr(PagedCache, "pages_of", lambda *_: None)
    unfused, unfused_pages = step_twice(layer, x, 4)
    assert len(calls) == 6
    eps = torch.finfo(dtype).eps
    assert (got - want).norm() <= 1.5 * (unfused - want).norm() + eps * want.norm()
    torch.testing.assert_close(pages[:, :6], unfused_pages[:, :6], rtol=4 * eps, atol=4 * eps)


def test_batch_invariant_decoding_gives_the_bits_of_training():
    layer, x = make(), torch.randn(1, 9, C)
    with torch.no_grad(), batch_invariant(True):
        want = attend(layer, x)
        cache, results = DecodeCache(), []
        for part in x.split([6, 1, 1, 1], 1):
            results.append(attend(layer, part, cache=cache))
            cache.advance(part.shape[1])
    assert torch.equal(torch.cat(results, 1), want)


class Doubled(nn.Linear):
    """A layer that is not plain: a projection whose weight no fused op may read."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_a_wrapped_projection_is_absorbed_too():
    layer, x = make(), torch.randn(1, 6, C)
    weight = layer.kv_b_proj.weight
    layer.kv_b_proj = Doubled(L, H * (N + V), bias=False)
    layer.kv_b_proj.weight = weight
    with torch.no_grad():
        want = attend(layer, x)
        cache = DecodeCache()
        attend(layer, x[:, :5], cache=cache)
        cache.advance(5)
        torch.testing.assert_close(attend(layer, x[:, 5:], cache=cache), want[:, 5:])


def test_saved_for_the_backward_are_the_latents_and_the_heads(kernel_device):
    """Neither the output of a projection to heads nor a copy of the shared part of the keys for each head."""
    layer, saved, T = make().to(kernel_device), [], 16
    x = torch.randn(1, T, C, device=kernel_device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        attend(layer, x)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    for parameter in layer.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    # For each token: x, the latents with the statistics of their norms, the tables, q, k, v, the output (as wide as q
    # on the CPU), its copy and a log-sum.
    most = [C, 20 + L + R + 2, R, *[H * (N + R)] * 4, H * V, H]
    assert sum(storages.values()) <= 4 * T * sum(most), [(x.shape, x.untyped_storage().nbytes()) for x in saved]


def test_the_scale_of_yarn():
    config = LatentDecoderConfig(
        **SIZES, hidden_size=C, num_attention_heads=H,
        rope_scaling=YarnScaling(factor=40.0, original_max_position_embeddings=64, mscale=0.707, mscale_all_dim=0.707),
    )  # fmt: skip
    assert config.head_size == N + R
    assert config.rotary_width == R
    assert config.attention_scale == pytest.approx(1.5896 * (N + R) ** -0.5, rel=1e-4)
    plain = LatentDecoderConfig(**SIZES, hidden_size=C, num_attention_heads=H)
    assert plain.attention_scale == (N + R) ** -0.5
    with pytest.raises(ValueError, match="qk_rope_head_dim must be even, got 7"):
        LatentDecoderConfig(**{**SIZES, "qk_rope_head_dim": 7, "qk_nope_head_dim": 13}, hidden_size=C)
