"""Gumbel-max scores, whose argmax is a sample from softmax(z). The noise depends only on the seed, the step and the
token.

::

    score_t = z_t − log E_t,   E_t = −log(1 − u_t),   u_t = (hash(seed, step, t) + ½) / 2³²

z holds the logits of a row, and t is a token. E is exponentially distributed. Imagine one clock per token, which rings
after an exponentially distributed time with the rate exp(z_t). The clock of token t rings first with probability
softmax(z)_t. The clock of token t rings at the time E_t / exp(z_t), whose logarithm is log E_t − z_t = −score_t. The
clock that rings first therefore has the highest score. The random numbers are hashes, so the numbers of a row do not
depend on the other rows, and all devices get the same numbers up to rounding.

The hash takes about twenty integer operations. In plain PyTorch, each of these operations is a pass over an int64
tensor [B, V]. The kernel reads each logit once and writes each score once.

Source: https://arxiv.org/abs/1411.0030 (Gumbel-max), https://nullprogram.com/blog/2018/07/31/ (hash).
"""

import torch
from torch import Tensor

from liger_models.kernels.dispatch import has_ptx, on_device_of, tl, triton, use_triton
from liger_models.kernels.tiles import cdiv, log2

BLOCK = 2048
NUM_WARPS = 8
"""Number of vocabulary entries per program, and number of warps per program."""

_LOW = 0xFFFFFFFF


def _hash(x: Tensor) -> Tensor:
    """Return the 32-bit hashes of 32-bit integers, which are held in int64 tensors.

    Different integers have different hashes, and the hashes show no visible patterns.
    """
    x = (x ^ x >> 16) * 0x7FEB352D & _LOW
    x = (x ^ x >> 15) * 0x846CA68B & _LOW
    return x ^ x >> 16


def exponential_noise(seeds: Tensor, step: int | Tensor, vocab_size: int) -> Tensor:
    """Compute the exponential noise E [B, V] fp32 in plain PyTorch.

    Args:
        seeds: [B] int64, not negative.
        step: number of tokens generated so far, as an int for all rows or as a tensor [B] int64.
        vocab_size: V.
    """
    key = _hash(_hash(_hash(seeds & _LOW) ^ (seeds >> 32)) ^ step)[:, None]
    token = torch.arange(vocab_size, device=seeds.device)
    bits = _hash(_hash(token ^ key) ^ _hash(key ^ 0x9E3779B9))
    return -torch.log1p(-(bits.float() + 0.5) * 2.0**-32)


@triton.jit
def _hash_uint32(x):
    """Return the same hashes as `_hash`, for uint32 integers in a kernel."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def uniform(seed, step, token):
    """Compute the random numbers u [BLOCK] of the given tokens. The seed and step of the row are int64 scalars."""
    # Hash seed, step and token, as in `exponential_noise`.
    key = _hash_uint32(_hash_uint32(seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32))
    key = _hash_uint32(key ^ step.to(tl.uint32))
    bits = _hash_uint32(_hash_uint32(token.to(tl.uint32) ^ key) ^ _hash_uint32(key ^ 0x9E3779B9))
    return bits.to(tl.float32) * 2.0**-32 + 2.0**-33  # rounded as (bits + ½) / 2³²


@triton.jit
def exponential(seed, step, token, PTX: tl.constexpr):
    """Compute E = −log(1 − u) [BLOCK] of the given tokens, where u is the result of `uniform`."""
    u = uniform(seed, step, token)
    # For small u, a polynomial is used, because 1 − u loses the digits of u, and log2 loses digits near 1. Its
    # coefficients are fitted to −log(1 − u) from 0 to ¼, with a relative error of at most 1.1e-7.
    series = 0.3357100188732147
    series = series * u + 0.14670312404632568
    series = series * u + 0.25711026787757874
    series = series * u + 0.33293071389198303
    series = series * u + 0.5000072717666626
    return tl.where(u < 0.25, u * u * series + u, log2(1.0 - u, PTX) * -0.6931471805599453)


@triton.jit
def _seeded_scores_kernel(
    logits_ptr, seed_ptr, step_ptr, score_ptr, V, BLOCK: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """Each program computes the scores of BLOCK tokens of a row [V]."""
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    noise = exponential(tl.load(seed_ptr + row), tl.load(step_ptr + row), token, PTX)
    z = tl.load(logits_ptr + row * V + token, mask=token < V, other=0.0)
    tl.store(score_ptr + row * V + token, z - tl.log(noise), mask=token < V)


def seeded_scores_reference(logits: Tensor, seeds: Tensor, step: int | Tensor) -> Tensor:
    """Compute `seeded_scores` in plain PyTorch."""
    return logits - exponential_noise(seeds, step, logits.shape[1]).log()


def seeded_scores(logits: Tensor, seeds: Tensor, step: int | Tensor) -> Tensor:
    """Compute the scores [B, V] fp32 of all tokens. The argmax of a row is the sampled token.

    The function is not differentiable.

    Args:
        logits: [B, V] fp32.
        seeds: [B] int64, not negative.
        step: number of tokens generated so far, as an int for all rows or as a tensor [B] int64.
    """
    if not use_triton(logits):
        return seeded_scores_reference(logits, seeds, step)
    (B, V), logits = logits.shape, logits.contiguous()
    steps = torch.full_like(seeds, step) if isinstance(step, int) else step.contiguous()
    scores = torch.empty_like(logits)
    with on_device_of(logits):
        _seeded_scores_kernel[(cdiv(V, BLOCK), B)](
            logits, seeds.contiguous(), steps, scores, V,
            BLOCK=BLOCK, PTX=has_ptx(logits), num_warps=NUM_WARPS,
        )  # fmt: skip
    return scores
