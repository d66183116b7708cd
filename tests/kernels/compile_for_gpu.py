"""Compile every kernel for a GPU without having one: the interpreter runs what Triton's compiler may refuse.

The ops run on tensors on the CPU, at widths of real models, with each launch replaced by a compilation for the target
that the command line names (`TARGETS`); what they compute is left undefined. A number after the target limits the
variants of a kernel; if it is 1, kernels for Hopper are compiled to PTX and not assembled. Prints as JSON how many
variants of each kernel were compiled, which were refused, which have products of registers that go on too long
(`PENDING`), which lose an address (`loses_address`), and which kernels the ops did not launch.
"""

import dataclasses
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections import defaultdict

import torch
from torchao.quantization import Float8Tensor, to_nf4
from triton import knobs
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from liger_models import kernels
from liger_models.kernels import dispatch
from liger_models.kernels.activation.gated_act import gated_act
from liger_models.kernels.activation.low_rank_gated_act import (
    empty_codes,
    low_rank_gated_act,
    low_rank_gated_act_backward,
)
from liger_models.kernels.activation.xielu import xielu
from liger_models.kernels.add_parts import add_parts
from liger_models.kernels.attention.causal_attention import causal_attention
from liger_models.kernels.attention.copy_keys import copy_keys
from liger_models.kernels.attention.decode_attention import GROUP_ROWS, SharedKeys, decode_attention
from liger_models.kernels.attention.invariant_attention import invariant_attention
from liger_models.kernels.attention.scaled_pages import ScaledPages
from liger_models.kernels.attention.sink_attention import sink_attention
from liger_models.kernels.attention.token_slots import token_slots
from liger_models.kernels.attention.write_latents import write_latents
from liger_models.kernels.attention.write_pages import write_pages
from liger_models.kernels.embedding import embedding
from liger_models.kernels.float8.float8 import RECIPES, Float8, float8_dtype, round_known, transposed
from liger_models.kernels.float8.float8_gated_mlp import float8_gated_mlp
from liger_models.kernels.float8.float8_linear import float8_norm_linear
from liger_models.kernels.frozen.float8_tiles import tile_product
from liger_models.kernels.frozen.frozen_float8_linear import frozen_float8_linear
from liger_models.kernels.frozen.nf4_linear import nf4_linear
from liger_models.kernels.frozen.products import quantized_linear
from liger_models.kernels.frozen.weight import FORMATS, FrozenWeight
from liger_models.kernels.linear.act_linear import ACTIVATIONS, act_linear
from liger_models.kernels.linear.gated_mlp import gated_mlp
from liger_models.kernels.linear.low_rank_factors import Rows, pack_factors
from liger_models.kernels.linear.low_rank_linear import low_rank_linear
from liger_models.kernels.linear.norm_linear import layer_norm_linear, rms_norm_linear
from liger_models.kernels.linear_attention.gated_delta_rule import gated_delta_rule
from liger_models.kernels.linear_attention.kimi_delta_rule import kimi_delta_rule
from liger_models.kernels.linear_attention.short_conv import short_conv
from liger_models.kernels.linear_attention.ssd_scan import ssd_scan
from liger_models.kernels.linear_attention.step_sizes import step_sizes
from liger_models.kernels.linear_attention.unit_parts import unit_parts
from liger_models.kernels.loss.accept_drafts import accept_drafts
from liger_models.kernels.loss.choose_tokens import choose_tokens
from liger_models.kernels.loss.cross_entropy import cross_entropy
from liger_models.kernels.loss.distribution_divergence import DISTRIBUTION_KINDS, distribution_divergence
from liger_models.kernels.loss.divergence import KINDS, linear_divergence
from liger_models.kernels.loss.linear_cross_entropy import linear_cross_entropy
from liger_models.kernels.loss.linear_kl_div import linear_kl_div
from liger_models.kernels.loss.linear_logprobs import fused_linear_logprobs, log_probs_of_sum
from liger_models.kernels.loss.logits_divergence import logits_divergence
from liger_models.kernels.loss.seeded_scores import seeded_scores
from liger_models.kernels.loss.verify_drafts import verify_drafts
from liger_models.kernels.matmul import row_linear as row_linear_file
from liger_models.kernels.matmul.head_linear import head_linear
from liger_models.kernels.matmul.invariant_linear import invariant_linear
from liger_models.kernels.matmul.narrow_linear import narrow_linear
from liger_models.kernels.matmul.row_linear import row_linear, row_linear_forward, wide_inference_linear
from liger_models.kernels.matmul.wide_linear import MIN_ROWS, wide_linear
from liger_models.kernels.moe import Routing, moe_mlp, route
from liger_models.kernels.norm.embed_norms import embed_norms
from liger_models.kernels.norm.fused_norm import FusedNorm
from liger_models.kernels.norm.gated_norm import gated_norm
from liger_models.kernels.norm.layer_norm import add_layer_norm, layer_norm
from liger_models.kernels.norm.rms_norm import add_rms_norm, rms_norm
from liger_models.kernels.optimizer.adamw import Hyper, Update, adamw_
from liger_models.kernels.optimizer.newton_schulz import newton_schulz
from liger_models.kernels.overlap import overlapping
from liger_models.kernels.rope.latent_heads import latent_heads
from liger_models.kernels.rope.qk_norm_rope import qk_norm_rope
from liger_models.kernels.rope.qkv_norm_rope import qkv_norm_rope
from liger_models.kernels.rope.rope import rope, rope_qkv

TARGETS = {"sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64), "gfx950": ("hip", "gfx950", 64)}
"""NVIDIA Hopper, AMD MI300 and AMD MI350: backend, architecture, threads of a warp."""
VARIANTS = int(sys.argv[2]) if len(sys.argv) > 2 else sys.maxsize
"""The most variants of a kernel that are compiled."""

PENDING = re.compile(
    r"(%\S+) = ttng\.warp_group_dot [^\n]*: tensor<[^\n]*(?:\n[^\n]*)*?warp_group_dot_wait \1,[^\n]*pendings = [1-9]"
)
"""In Triton's IR, an asynchronous product of Hopper whose left operand is in registers, and a wait that lets it go on.
With Triton 3.6 and 3.7 the next step of the loop then writes registers that the product still reads (triton#9433)."""

LOW = re.compile(r"U?IADD3 (?P<out>\w+), (?P<carry>U?P\d), (?P<register>U?R\d+)(\.reuse)?, -?0x\w+, U?RZ ")
HIGH = re.compile(r"U?IADD3\.X \w+, (?P<register>U?R\d+)(\.reuse)?, -?0x\w+, U?RZ, (?P<carry>U?P\d),")
WRITE = re.compile(r"(?P<op>[A-Z][\w.]+) (?P<file>U?R)(?P<index>\d+)[, ]")
"""In the assembly of Hopper, the sums of the low and of the high words of a 64-bit number and a constant, and the
register that an instruction writes."""

compiled: dict[str, set[str]] = defaultdict(set)
pending: set[str] = set()
lost: set[str] = set()
refused: dict[str, str] = {}


class Compiler:
    """What Triton asks of a driver when it only compiles."""

    def __init__(self, target: str) -> None:
        self.target = GPUTarget(*TARGETS[target])
        if self.target.backend == "hip":
            torch.version.hip = target  # which the ops ask

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def leave_out_the_assembler() -> None:
    """Let Triton compile only to PTX for GPUs of NVIDIA: ptxas and nvdisasm take two fifths of the time."""

    class ToPTX(CUDABackend):
        def __init__(self, target: GPUTarget) -> None:
            super().__init__(target)
            self.binary_ext = "ptx"

        def add_stages(self, stages: dict[str, object], *options: object) -> None:
            super().add_stages(stages, *options)
            del stages["cubin"]

        def hash(self) -> str:  # the place in Triton's cache
            return f"{super().hash()}-ptx"

    backends["nvidia"] = dataclasses.replace(backends["nvidia"], compiler=ToPTX)


def compile_instead(kernel: JITFunction, grid: object):
    def launch(*args, **options):
        name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
        if len(compiled[name]) == VARIANTS:
            return
        try:
            made = kernel.run(*args, grid=(1,), warmup=True, **options)
            compiled[name].add(made.hash)
            if PENDING.search(made.asm["ttgir"]):
                pending.add(name)
            if "cubin" in made.asm and "warp_group_dot" in made.asm["ttgir"] and loses_address(made.asm["cubin"]):
                lost.add(name)
        except Exception as error:  # all others are compiled, too
            refused[name] = repr(error)

    return launch


def loses_address(cubin: bytes) -> bool:
    """Return whether the code adds a constant to a 64-bit number both of whose words are the same register.

    ptxas 12.8, which Triton 3.6 and 3.7 have, makes such sums of addresses of operands that it has lost.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers: dict[str, str] = {}  # the low word of the last sum with each carry, until the register is written
    for line in code.splitlines():
        if (high := HIGH.search(line)) and registers.pop(high["carry"], None) == high["register"]:
            return True
        if written := WRITE.search(line):
            op = written["op"]
            width = 4 if re.search(r"\.128|M88\.4", op) else 2 if re.search(r"\.64|WIDE", op) else 1
            names = {f"{written['file']}{int(written['index']) + word}" for word in range(width)}
            registers = {carry: register for carry, register in registers.items() if register not in names}
        if (low := LOW.search(line)) and low["out"] != low["register"]:
            registers[low["carry"]] = low["register"]
    return False


def draw(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*size).to(dtype).requires_grad_()


def differentiate(out: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
    outs = [x for x in (out if isinstance(out, tuple) else (out,)) if x.requires_grad]
    torch.autograd.backward(outs, [torch.ones_like(x) for x in outs])


def run(dtype: torch.dtype, C: int, F: int, V: int) -> None:
    draw_ = lambda *size: draw(*size, dtype=dtype)
    x, residual, norm = draw_(1, 3, C), draw_(1, 3, C), draw_(C)
    for fp32 in (False, True):
        differentiate(rms_norm(x, norm, 1e-6, 1.0, fp32))
        differentiate(add_rms_norm(x, residual, norm, 1e-6, 0.0, fp32))
    for bias in (draw_(C), None):
        differentiate(layer_norm(x, norm, bias))
        differentiate(add_layer_norm(x, residual, norm, bias))
        differentiate(layer_norm_linear(x, residual, norm, bias, draw_(64, C)))
        mlp = draw_(2 * F, C), draw_(C, F)
        differentiate(gated_mlp(x, residual, norm, *mlp, norm="layer_norm", norm_bias=bias, recompute=True))
    for act in ACTIVATIONS:
        differentiate(act_linear(x, draw_(64, C), draw_(64), act))
    differentiate(act_linear(x, draw_(64, C), None, "xielu", draw(4, dtype=torch.float32)))
    differentiate(xielu(x, draw(4, dtype=torch.float32)))
    differentiate(nf4_linear(draw_(3, 64), to_nf4(draw_(8, 64).detach(), 64, 1)))
    codes, rounded = to_nf4(draw_(8, 512).detach(), 64, 1), Float8Tensor.from_hp(draw_(64, C).detach())
    for rows in (1, 2, 3, 20):
        nf4_linear(draw_(rows, 512).detach(), codes)
        frozen_float8_linear(draw_(rows, C).detach(), rounded)
        for weight in (FrozenWeight.of(codes), FrozenWeight.of(rounded), draw_(8, 512).detach()):
            N, K = weight.shape
            pair = draw_(48, K).detach(), draw_(N, 48).detach()
            low_rank_linear(draw_(rows, K).detach(), weight, None, pair)
    differentiate(frozen_float8_linear(draw_(64, C), rounded))
    for count in (1, 4):
        pairs = [(draw(8, C, dtype=torch.float32), draw(16, 8, dtype=torch.float32)) for _ in range(count)]
        rows = [Rows(2 * count, 2 * i, 2) for i in range(count)]
        differentiate(pack_factors(*zip(*pairs, strict=True), rows, 16 * count, 2.0, dtype))
    if dtype == torch.bfloat16:  # other dtypes are dequantized
        operands = draw(64, C).to(torch.float8_e4m3fn), draw(64, dtype=torch.float32)
        for bias in (None, draw(64)):
            tile_product(*operands, *operands, bias)
        rms_norm_linear(None, draw_(64, C).detach(), norm.detach(), FrozenWeight.of(rounded))
    gated_mlp(None, draw_(1, 512), draw_(512), FrozenWeight.of(codes), draw_(8, 4))
    gated_mlp(None, draw_(1, C), norm, FrozenWeight.of(rounded), draw_(8, 32))
    stored = draw_(64, C).detach().to(torch.float8_e4m3fn), torch.ones(64, C // 128)
    blocks = FrozenWeight(FORMATS["blocks"], stored, torch.Size([64, C]), [128], dtype)
    blocks.dense()
    for rows in (1, 3, 20):
        quantized_linear(draw_(rows, C).detach(), blocks)
        low_rank_linear(draw_(rows, C).detach(), blocks, None, (draw_(48, C).detach(), draw_(64, 48).detach()))
    gated_mlp(None, draw_(1, C), norm, blocks, draw_(8, 32))
    by_row = blocks._replace(tensors=(stored[0], torch.ones(64, 1)), layout=[0])
    for each in (by_row, *(four_bits(kind, (64, 512), dtype) for kind in FOUR_BITS)):
        each.dense()
        for rows in (1, 3, 20):
            quantized_linear(draw_(rows, each.shape[1]).detach(), each)
        pair = draw_(48, each.shape[1]).detach(), draw_(64, 48).detach()
        low_rank_linear(draw_(1, each.shape[1]).detach(), each, None, pair)
    differentiate(rms_norm_linear(x, residual, norm, draw_(64, C)))
    for act in ("silu", "gelu_tanh", "gelu"):
        differentiate(gated_act(draw_(3, 2 * F), act))
        differentiate(gated_mlp(x, residual, norm, draw_(2 * F, C), draw_(C, F), act=act, recompute=act == "gelu"))
        u, dy = draw_(3, 2 * F).detach(), draw_(3, F).detach()
        for R in (8, 64):
            term = draw_(3, R).detach(), draw_(2 * F, R).detach().t()
            dy_term = draw_(3, R).detach(), draw_(R, F).detach()
            for codes in (None, empty_codes(u)):
                for each in (term, None):
                    low_rank_gated_act(u, act, each, codes)
                low_rank_gated_act_backward(dy, codes or u, act, True, None, dy_term)
            for each in (dy_term, None):
                low_rank_gated_act_backward(dy, u, act, True, term, each)
    for heads, kv_heads, D, R in ((32, 8, 128, 128), (8, 4, 256, 256), (32, 2, 128, 64)):
        cos, sin = torch.randn(2, 1, 3, R // 2)
        packed = draw_(1, 3, (heads + 2 * kv_heads) * D)
        for interleaved in (False, True):
            differentiate(rope_qkv(packed, cos, sin, heads, kv_heads, D, interleaved=interleaved))
        differentiate(rope(draw_(1, 3, heads, D), cos, sin))
        differentiate(qk_norm_rope(packed, cos, sin, heads, kv_heads, D, draw_(D), draw_(D)))
        differentiate(qk_norm_rope(packed, cos, sin, heads, kv_heads, D, draw_(heads * D), draw_(kv_heads * D)))
    differentiate(embedding(draw_(V, 64), torch.tensor([[1, 1, 5] * 7]), 0))
    target = torch.tensor([1, 2, -100])
    for options in ({}, {"softcap": 30.0}, {"label_smoothing": 0.1, "return_token_accuracy": True}):
        differentiate(cross_entropy(draw_(3, V), target, **options).loss)
    differentiate(linear_cross_entropy(draw_(3, 64), draw_(V, 64), target, reduction="none").loss)
    differentiate(linear_cross_entropy(draw_(3, 64), draw_(V, 64), target).loss)
    differentiate(fused_linear_logprobs(draw_(3, 64), draw_(V, 64), target, softcap=30.0, return_entropy=True))
    log_probs_of_sum(draw_(3, 64), draw_(V, 64), target)
    for divergence in KINDS:
        heads = draw_(3, 64), draw_(V, 64), draw_(3, 32), draw_(V, 32)
        differentiate(linear_divergence(*heads, target, divergence=divergence, hard_weight=0.5)[0])
        differentiate(sum(logits_divergence(draw_(3, V), draw_(3, V), target, divergence=divergence)))
    for dtype in (torch.float32, torch.bfloat16):
        differentiate(linear_kl_div(draw_(3, 64), draw_(V, 64), draw_(3, V).detach().to(dtype), softcap=30.0))
    for kind in DISTRIBUTION_KINDS:
        differentiate(distribution_divergence(draw_(3, V), draw_(3, V), kind))
    differentiate(distribution_divergence(draw_(3, V), draw_(3, V), "jsd", reduction="none"))


def run_delta_rule(dtype: torch.dtype) -> None:
    draw_ = lambda *size: draw(*size, dtype=dtype)
    q, k, v, g, beta = (
        draw_(1, 70, 2, 128),
        draw_(1, 70, 2, 128),
        draw_(1, 70, 4, 128),
        draw_(1, 70, 4),
        draw_(1, 70, 4),
    )
    state, bounds = draw(3, 4, 128, 128, dtype=torch.float32), torch.tensor([0, 3, 60, 70])
    differentiate(gated_delta_rule(q, k, v, g, beta))
    packed = {"initial_state": state, "return_state": True, "cu_seqlens": bounds}
    differentiate(gated_delta_rule(q, k, v, g, beta, **packed))
    with torch.no_grad():
        gated_delta_rule(*(x[:, :1] for x in (q, k, v, g, beta)), initial_state=state[:1])
    run_kimi_delta_rule(dtype, 128, packed)
    run_kimi_delta_rule(dtype, 64, packed)
    differentiate(gated_norm(v, draw_(1, 70, 4, 128), draw_(128)))
    differentiate(gated_norm(v, draw_(1, 70, 4, 128), draw_(4, 128), gate_first=True))
    differentiate(gated_norm(v, draw_(1, 70, 4, 128), None))
    differentiate(short_conv(draw_(1, 70, 1024), draw_(1024, 4)))
    differentiate(unit_parts(draw_(1, 70, 64 * 161), 64, ((64,), (64, 16, 16), (1,)), (1.0, 2.0, 1.0, 0.5, 1.0)))
    differentiate(unit_parts(draw_(1, 1, 16 * 772), 16, ((128, 128, 256), (256,), (2,), (2,))))
    differentiate(
        short_conv(draw_(1, 70, 640), draw_(640, 4), draw_(640), initial_state=draw_(3, 640, 3), cu_seqlens=bounds)
    )
    with torch.no_grad():
        short_conv(draw_(2, 1, 640), draw_(640, 4), draw_(640), initial_state=draw_(2, 640, 3), return_state=True)


def run_kimi_delta_rule(dtype: torch.dtype, D: int, packed: dict[str, object]) -> None:
    q, k, v = (draw(1, 70, 4, D, dtype=dtype) for _ in range(3))
    g, beta = draw(1, 70, 4, D, dtype=torch.float32), draw(1, 70, 4, dtype=dtype)
    state = draw(3, 4, D, D, dtype=torch.float32)
    differentiate(kimi_delta_rule(q, k, v, g, beta))
    differentiate(kimi_delta_rule(q, k, v, g, beta, **packed | {"initial_state": state}))
    with torch.no_grad():
        kimi_delta_rule(*(x[:, :1] for x in (q, k, v, g, beta)), initial_state=state[:1])


def run_state_space(dtype: torch.dtype) -> None:
    draw_ = lambda *size: draw(*size, dtype=dtype)
    single = lambda *size: draw(*size, dtype=torch.float32)
    for heads, groups, P, N in ((16, 2, 64, 128), (6, 1, 64, 256), (16, 2, 32, 128), (3, 1, 16, 256), (1, 1, 16, 16)):
        x, B, C = draw_(1, 300, heads, P), draw_(1, 300, groups, N), draw_(1, 300, groups, N)
        delta, g, D = single(1, 300, heads), single(1, 300, heads), single(heads)
        state, bounds = single(3, heads, N, P), torch.tensor([0, 3, 60, 300])
        differentiate(ssd_scan(x, B, C, delta, g))
        differentiate(ssd_scan(x, B, C, delta, g, D, initial_state=state, return_state=True, cu_seqlens=bounds))
        with torch.no_grad():
            ssd_scan(*(t[:, :1] for t in (x, B, C, delta, g)), D, initial_state=state[:1])
            step_sizes(draw_(1, 1, heads), D, D, (0.001, 0.1))


def run_wide_norm() -> None:
    x, norm = draw(2, 65536), draw(65536)
    differentiate(rms_norm(x, norm))
    differentiate(layer_norm_linear(None, x, norm, norm, draw(1, 65536)))


def zeros_like(weight: torch.Tensor, kind: str) -> FrozenWeight:
    """A frozen weight with the shape of a dense one, without the work of quantizing it."""
    frozen = FrozenWeight.quantize(weight.detach().to("meta"), kind)
    return frozen._replace(tensors=tuple(torch.zeros_like(each, device="cpu") for each in frozen.tensors))


def with_blocks(weight: FrozenWeight) -> FrozenWeight:
    """Matrices in float8 with a scale for 128 columns of a row."""
    scales = weight.scales.new_ones(*weight.shape[:2], -(-weight.shape[2] // 128))
    return FrozenWeight(FORMATS["blocks"], (weight.codes, scales), weight.shape, [128], weight.dtype)


FOUR_BITS = {"mxfp4": [32], "nvfp4": [16, 0], "int4": [128], "bnb_nf4": [64, 0]}
"""The formats of checkpoints in 4 bits, and their layouts."""


def four_bits(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> FrozenWeight:
    """A weight in 4 bits as a checkpoint has it."""
    scales = torch.ones(*shape[:-1], shape[-1] // FOUR_BITS[kind][0])
    stored = {"mxfp4": torch.uint8, "nvfp4": torch.float8_e4m3fn, "int4": torch.bfloat16}.get(kind, torch.float32)
    tensors = [torch.zeros(*shape[:-1], shape[-1] // 2, dtype=torch.uint8), scales.to(stored)]
    if kind == "nvfp4":
        tensors.append(torch.ones(*shape[:-1], 1))
    return FrozenWeight(FORMATS[kind], tuple(tensors), torch.Size(shape), FOUR_BITS[kind], dtype)


def run_experts(X: int, K: int, F: int) -> None:
    differentiate(wide_linear(draw(MIN_ROWS, 256), draw(X, 256)))
    acts = ("silu", ()), ("clamped_swiglu", (draw(X, 2 * F), draw(X, 256))), ("relu2", ())
    for act, biases in acts:
        width = F if act == "relu2" else 2 * F
        x, logits = draw(5, 256), draw(5, X)
        weights, experts = route(logits, Routing(K, normalize=True))
        grouped = Routing(K, normalize=True, score="sigmoid", groups=2, top_groups=2, group_score="top2")
        differentiate(route(logits, grouped, torch.zeros(X))[0])
        experts = torch.arange(5 * K).view(5, K) % X  # what the kernel would have written
        route(logits, Routing(K, normalize=True), given=experts.short())
        differentiate(route(logits, Routing(2, score="sparsemixer", tolerance=0.02), given=experts[:, :2].short())[0])
        matrices = draw(X, width, 256), draw(X, 256, F)
        differentiate(moe_mlp(x, weights, experts, *matrices, *biases, act=act, limit=7.0))
        pairs = {"gate_up_low_rank": (draw(X, 16, 256), draw(X, width, 16))}
        pairs["down_low_rank"] = draw(X, 16, F), draw(X, 256, 16)
        frozen = weights.detach(), experts, *(each.detach() for each in matrices)
        differentiate(moe_mlp(x, *frozen, *biases, **pairs, act=act, limit=7.0, dropout=0.1))
        quantized = [[zeros_like(each, kind) for each in matrices] for kind in ("nf4", "float8")]
        quantized.append([with_blocks(each) for each in quantized[1]])
        quantized += [[four_bits(kind, each.shape, each.dtype) for each in matrices] for kind in FOUR_BITS]
        for stored in quantized:
            differentiate(moe_mlp(x, *frozen[:2], *stored, *biases, **pairs, act=act, limit=7.0))
        with torch.no_grad():
            for stored in (matrices, *quantized):
                for N in (1, 5):
                    few = x[:N], weights[:N], experts[:N], *stored, *biases
                    moe_mlp(*few, act=act, limit=7.0, addend=x[:N] if N == 1 else None)


def run_sinks() -> None:
    for H, G, D in ((64, 8, 64), (4, 4, 128), (3, 1, 24)):
        q, k, v = (draw(1, 256, heads, D) for heads in (H, G, G))
        differentiate(sink_attention(q, k, v, draw(H), scale=0.1))
        bounds, copies = torch.tensor([0, k.shape[1]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        tokens = {"tokens": torch.arange(k.shape[1]), "cu_seqlens": bounds, "max_seqlen": k.shape[1]}
        differentiate(copy_keys(k[0], copy_bounds=bounds, copies=copies, **tokens))


def run_decoding(dtype: torch.dtype) -> None:
    table, lengths = torch.zeros(2, 40, dtype=torch.int32), torch.tensor([3, 2000], dtype=torch.int32)
    heads = ((24, 8, 128), (64, 8, 64), (8, 1, 256), (8, 2, 512), (71, 1, 64), (16, 16, 80))
    for H, G, D in heads if dtype == torch.bfloat16 else heads[1::2]:
        q, keys = draw(2, H, D, dtype=dtype).detach(), draw(3, 64, G, D, dtype=dtype).detach()
        for options in ({}, {"window": 300, "softcap": 30.0}, {"sinks": q[0, :, 0].contiguous()}):
            decode_attention(q, keys, keys, table, lengths, scale=0.1, **options)
            if "window" not in options:
                shared = SharedKeys(torch.zeros(1, GROUP_ROWS + 1, dtype=torch.int32), torch.zeros_like(lengths))
                decode_attention(q, keys, keys, table, lengths, shared, scale=0.1, **options)
            invariant_attention(q, keys, keys, lengths, lengths, scale=0.1, table=table, **options)
        decode_attention(q, keys, keys, table, lengths, scale=0.1, chunk=300)
        run_scaled_pages(q, table, lengths, G)
        invariant_attention(q, keys[0], keys[0], lengths, lengths, scale=0.1)
        write_pages(keys, keys, keys[0, :2], keys[0, :2], torch.tensor([1, -1]))
    seeded_scores(torch.zeros(2, 128256), torch.tensor([3, 4]), 5)
    run_drafts(dtype)
    for K in (64, 100, 3072):
        invariant_linear(draw(3, K, dtype=dtype).detach(), draw(8, K, dtype=dtype).detach(), draw(8, dtype=dtype))
        row_linear(draw(1, K, dtype=dtype).detach(), draw(8, K, dtype=dtype).detach(), draw(8, dtype=dtype).detach())
        with torch.no_grad():
            wide_inference_linear(draw(1, K, dtype=dtype), draw(8, K, dtype=dtype))
        for rows in (1, 9) if dtype != torch.float32 else (1,):
            x, weight = draw(rows, K, dtype=dtype).detach(), draw(8, K, dtype=dtype).detach()
            row_linear_forward(x, weight, None, "silu")
            row_linear_file.SMALL = 0  # with divided columns, too
            row_linear_forward(x, weight, None, "silu")
            row_linear_file.SMALL = 2**22
        if dtype != torch.float32:
            narrow_linear(draw(9, K, dtype=dtype).detach(), draw(16, K, dtype=dtype).detach())


def run_scaled_pages(q: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, G: int) -> None:
    D = q.shape[2]
    pages = ScaledPages(torch.zeros(3, 64, G, D, dtype=torch.float8_e4m3fn), torch.ones(3, G, 64))
    shared = SharedKeys(torch.zeros(1, GROUP_ROWS + 1, dtype=torch.int32), torch.zeros_like(lengths))
    decoding = importlib.import_module("liger_models.kernels.attention.decode_attention")
    for decoding.ROWS_PER_SM in (0, 10**6):  # with rows of a single part, and of several parts
        for options in ({}, {"window": 300, "softcap": 30.0}, {"sinks": q[0, :, 0].contiguous()}, {"chunk": 300}):
            decode_attention(q, pages, pages, table, lengths, scale=0.1, **options)
    decode_attention(q, pages, pages, table, lengths, shared, scale=0.1)
    k = q.new_zeros(2, G, D)
    write_pages(pages, pages, k, k, torch.tensor([1, -1]))


def run_drafts(dtype: torch.dtype) -> None:
    numbers, table = torch.tensor([3, 4]), torch.zeros(2, 40, dtype=torch.int32)
    for V in (4096, 128256):
        logits = draw(2, V, dtype=dtype).detach()
        for options in ({}, {"scores": logits.float()}, {"seeds": numbers, "steps": numbers}):
            choose_tokens(logits, **options)
        proposed = torch.zeros(1, 1, V)
        for scores in (None, logits.float()):
            verify_drafts(logits, scores, numbers[:1, None], proposed, proposed[..., 0], numbers)
    for k in (1, 3):
        tokens = torch.zeros(2, k + 1, dtype=torch.int64)
        for agree in (None, torch.zeros(2, k, dtype=torch.bool)):
            accept_drafts(tokens, tokens.clone(), agree, tokens[:, : k - 1], table[:, 0].clone(), numbers, numbers + 1)
        token_slots(table, table[:, 0].contiguous(), numbers, n=k, offset=1, page=64)
    for C in (512, 7168):
        rows, norm = draw(2, C, dtype=dtype).detach(), draw(C, dtype=dtype).detach()
        for fp32 in (False, True):
            embed_norms(rows, numbers, rows, norm, norm, 1e-6, 1.0, fp32)


def run_latents(dtype: torch.dtype) -> None:
    table, lengths = torch.zeros(2, 40, dtype=torch.int32), torch.tensor([3, 2000], dtype=torch.int32)
    for H, N, R, V, L in ((128, 128, 64, 128, 512), (20, 192, 64, 256, 512), (32, 64, 64, 128, 256)):
        rows, q = draw(3, 64, 1, L + R, dtype=dtype).detach(), draw(2, H, L + R, dtype=dtype).detach()
        decode_attention(q, rows, rows[..., :L], table, lengths, scale=0.1)
        write_pages(rows, rows[..., :0], rows[0, :2], rows[0, :2, :, :0], torch.tensor([1, -1]))
        up_weight = draw(H, N + V, L, dtype=dtype).detach()
        for B in (1, 2, 16) if dtype == torch.bfloat16 else (1,):
            c, rest, latent_of_q = (draw(B, size, dtype=dtype).detach() for size in (L, R, 1536))
            fused, slots = FusedNorm(c[0]), torch.zeros(B, dtype=torch.int64)
            for angles in (torch.randn(2, 1, 1, R // 2), (None, None)):
                write_latents(rows, slots, c, rest, fused, *angles, interleaved=True)
                write_latents(rows, slots, c, rest, fused, *angles, latent_of_q, latent_of_q[0])
                q = draw(B, 1, H, N + R, dtype=dtype).detach()
                head_linear(q, up_weight[:, :N].transpose(1, 2), *angles, interleaved=True)
            head_linear(draw(B, 1, H, L, dtype=dtype).detach(), up_weight[:, N:])
        for angles in (torch.randn(2, 1, 3, R // 2), (None, None)):
            q, kv = draw(1, 3, H * (N + R), dtype=dtype), draw(1, 3, H * (N + V), dtype=dtype)
            for interleaved in (False, True):
                differentiate(latent_heads(q, kv, draw(1, 3, R, dtype=dtype), *angles, H, interleaved=interleaved))
    heads = [draw(1, 3, *size, dtype=dtype) for size in ((4, 192), (4, 192), (4, 128))]
    differentiate(causal_attention(*heads))
    latents = draw(1, 3, 1, 576, dtype=dtype)
    differentiate(causal_attention(draw(1, 3, 4, 576, dtype=dtype), latents, latents[..., :512]))
    q, k, v = (x.detach()[0] for x in heads)
    invariant_attention(q, k, v, lengths.new_zeros(3), lengths.new_zeros(3), scale=0.1)


def run_wide_heads(dtype: torch.dtype, D: int, window: int | None) -> None:
    documents = None if window is None else torch.zeros(1, 3, dtype=torch.int64)
    attended = causal_attention(*(draw(1, 3, heads, D, dtype=dtype) for heads in (4, 2, 2)), documents, window=window)
    differentiate(attended)
    for parts in range(3):
        cos, sin = torch.randn(2, 1, 3, D // 2)
        weights = [draw(D, dtype=dtype) for _ in range(2 if parts else 1)]
        split = qkv_norm_rope(draw(1, 3, (8 + 2 * parts) * D, dtype=dtype), cos, sin, 8, 2, D, *weights)
        differentiate(split if parts else split[0])


def run_float8(dtype: torch.dtype) -> None:
    """With products of nothing: PyTorch's are no kernels of ours, and the CPU would take a minute for them."""
    for name in ("float8_linear", "float8_gated_mlp"):
        module = importlib.import_module(f"liger_models.kernels.float8.{name}")
        module.scaled_product = lambda a, b, dtype, fast=False: torch.zeros(len(a.data), len(b.data), dtype=dtype)
    x, residual, norm = draw(3, 4096, dtype=dtype), draw(3, 4096, dtype=dtype), draw(4096, dtype=dtype)
    mlp = draw(1024, 4096, dtype=dtype), draw(4096, 512, dtype=dtype)
    for weight in mlp:  # gathered by ranks, for both directions
        amax = torch.ones(1)
        transposed(Float8(round_known(weight.detach(), float8_dtype(weight.device), amax), amax[0]))
    for recipe in RECIPES:
        for kind in ("rms_norm", "layer_norm"):
            rms = kind == "rms_norm"
            fused = FusedNorm(norm, None, kind, scale_in_fp32=rms)
            differentiate(float8_norm_linear(x, residual, fused, mlp[0], None, recipe))
        for act in ("silu", "gelu_tanh", "gelu"):
            differentiate(float8_gated_mlp(None, x, FusedNorm(norm), *mlp, act=act, recipe=recipe))


def run_optimizer() -> None:
    hyper = Hyper(1e-3, 0.9, 0.99, 1e-8, 0.1, False, 1)
    for p, state in ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)):
        for stochastic in (False, True):
            tensors = [torch.zeros(9, dtype=dtype) for dtype in (p, p, state, state)]
            adamw_([Update(*tensors, hyper, 0)], stochastic_rounding=stochastic)
            codes = [torch.zeros(2, 144, dtype=dtype) for dtype in (p, p, torch.int8, torch.uint8)]
            scales = torch.zeros(2, 2), torch.zeros(2, 2)
            adamw_([Update(*codes, hyper, 0, scales)], stochastic_rounding=stochastic)


def run_muon() -> None:
    module = importlib.import_module("liger_models.kernels.optimizer.newton_schulz")
    module.BLOCK, module.BLOCK_K = 128, 64  # the interpreter has smaller tiles
    for dtype in (torch.bfloat16, torch.float32):
        newton_schulz(draw(1, 129, 256, dtype=dtype).detach())


def run_exchange() -> None:
    for ranks, count in ((2, 4096), (3, 4097), (8, 2**31)):
        parts = torch.zeros(1, dtype=torch.bfloat16).expand(ranks, count)
        add_parts(parts, torch.zeros(1).expand(count), ranks)


if __name__ == "__main__":
    driver.set_active(Compiler(sys.argv[1]))
    if VARIANTS == 1:
        leave_out_the_assembler()
    for kind in (JITFunction, *JITFunction.__subclasses__()):
        kind.__getitem__ = compile_instead
    dispatch.INTERPRET = True  # ops on the CPU take the way of the kernels
    torch.manual_seed(0)
    for name in ("frozen.nf4_rows", "frozen.float8_blocks", "frozen.code_rows", "attention.decode_attention"):
        importlib.import_module(f"liger_models.kernels.{name}").has_ptx = lambda x: sys.argv[1] == "sm_90"
    code_rows = importlib.import_module("liger_models.kernels.frozen.code_rows")
    code_rows.num_programs = lambda x, each: 132 * each
    for name in ("overlap", "matmul.row_linear"):
        importlib.import_module(f"liger_models.kernels.{name}").can_overlap = lambda device: sys.argv[1] == "sm_90"
    shared_kb = {"sm_90": 227, "gfx942": 64, "gfx950": 160}[sys.argv[1]]
    wide_heads = importlib.import_module("liger_models.kernels.attention.causal_attention")
    large = lambda x: sys.argv[1] == "sm_90" and x.element_size() == 2
    wide_heads.choose_tiles = lambda x: wide_heads.LARGE if large(x) else wide_heads.SMALL
    for module in [module for name, module in sys.modules.items() if name.startswith("liger_models.kernels.")]:
        if hasattr(module, "fitting_stages"):
            module.fitting_stages = lambda x, stages, size: stages if stages * size <= shared_kb * 1024 else 1
    with overlapping():
        run(torch.bfloat16, 4096, 512, 128256)
    # The other targets, and runs with one variant, get every kernel, but not at every width and dtype.
    every_dtype = sys.argv[1] == "sm_90" and VARIANTS > 1
    if every_dtype:
        run(torch.float16, 640, 352, 49155)
        run(torch.float32, 2048, 512, 32000)
    run_delta_rule(torch.bfloat16)
    if every_dtype:
        run_delta_rule(torch.float32)
    run_state_space(torch.bfloat16)
    run_wide_norm()
    for dtype in (torch.bfloat16, torch.float32):
        run_wide_heads(dtype, 512, None if dtype == torch.bfloat16 else 100)
    run_wide_heads(torch.bfloat16, 320, 100)
    run_latents(torch.bfloat16)
    if every_dtype:
        run_latents(torch.float32)
    run_experts(8, 2, 512)
    run_experts(128, 8, 256)
    run_sinks()
    if sys.argv[1] == "gfx942":
        importlib.import_module("liger_models.kernels.float8.float8").is_fnuz = lambda device: True
    run_float8(torch.bfloat16)
    run_decoding(torch.bfloat16)
    if every_dtype:
        run_decoding(torch.float32)
    run_optimizer()
    run_muon()
    run_exchange()
    modules = [
        importlib.import_module(name) for _, name, _ in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")
    ]
    every = {
        f"{value.fn.__module__}.{name}"
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel")
    }
    counts = {name: len(variants) for name, variants in compiled.items()}
    never = sorted(every - compiled.keys())
    found = {"compiled": counts, "refused": refused, "pending": sorted(pending), "lost": sorted(lost), "never": never}
    print(json.dumps(found))
