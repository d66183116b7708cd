"""Whole models on the Triton kernels: on the CPU through the interpreter, and on a GPU."""

from functools import partial

import pytest
import torch

from liger_models import KernelOptions
from liger_models.arch import get_arch
from liger_models.kernels.dispatch import reference_backend
from liger_models.layers.gated_delta_net import LigerGatedDeltaNet
from liger_models.layers.kimi_delta_attention import LigerKimiDeltaAttention
from liger_models.layers.layer import CHECKPOINTING_POLICIES
from liger_models.layers.moe import LigerMoE
from liger_models.layers.norm import LigerLayerNorm

from .families import (
    FIRST_CASES,
    LIMIT,
    VISION_CASES,
    assert_same_gradients,
    error,
    every_case,
    fp64_twin,
    gradients_of,
    hf_gradients,
    hf_model,
    make_folder,
    one_case_each,
    one_text_case_of_each_kind,
    our_gradients,
    simplest_with,
    tokens,
)

T = 40
DIFFERENT = [simplest_with(name) for name in ("LigerSwiGLUMLP", "needs_mask", "LigerLayerNorm", "LigerMoE")]
"""Families that differ in the kernels that they run: plain, with softcaps, with LayerNorms, with experts."""


@pytest.mark.cases(5)
@one_text_case_of_each_kind  # test_vision.py has the others
def test_kernels_match_transformers(pair, kernel_device):
    arch, variant, theirs, ours = pair
    ours.to(kernel_device)
    # In the interpreter, which is slow, "full" stands for the others: the same ops, and more of them again.
    slowly = ("none", "full") if arch in DIFFERENT else ("full",)
    ids = tokens(arch, variant, 2 if arch in DIFFERENT or kernel_device == "cuda" else 1, 9)
    want = theirs(ids, labels=ids)
    want.loss.backward()
    for policy in CHECKPOINTING_POLICIES if kernel_device == "cuda" else slowly:
        ours.zero_grad()
        ours.set_checkpointing(policy)
        got = ours(ids.to(kernel_device), labels=ids.to(kernel_device))
        assert error(got.loss, want.loss) <= LIMIT
        got.loss.backward()
        assert_same_gradients(ours, theirs)


@pytest.mark.parametrize(
    ("pair", "kernel_device"),
    [
        *((case, "interpreter") for case in FIRST_CASES if case[0] in DIFFERENT),
        *(pytest.param(case, "gpu", marks=pytest.mark.gpu) for case in FIRST_CASES if case not in VISION_CASES),
    ],
    indirect=True,
    ids=str,
)
def test_every_kernel_can_be_switched_off(pair, kernel_device, root):
    """The same numbers whichever kernels run; test_vision.py has models with images."""
    arch, variant, theirs, ours = pair
    ids = tokens(arch, variant, 1, 9)
    want = theirs(ids, labels=ids)
    want.loss.backward()
    norm = "layer_norm" if isinstance(ours.norm, LigerLayerNorm) else "rms_norm"
    off = {norm: False, "rope": False, "swiglu": False, "fused_linear_cross_entropy": False}
    if any(isinstance(module, LigerGatedDeltaNet | LigerKimiDeltaAttention) for module in ours.modules()):
        off["linear_attention"] = False
    for options in (
        *({name: False} for name in off),
        off,
        {"cross_entropy": True, "fused_linear_cross_entropy": False},
    ):
        ours = get_arch(arch).from_pretrained(
            make_folder(arch, variant, root), device=kernel_device, kernels=KernelOptions(**options), progress=False
        )
        got = ours(ids.to(kernel_device), labels=ids.to(kernel_device))
        assert error(got.loss, want.loss) <= LIMIT, options
        got.loss.backward()
        assert_same_gradients(ours, theirs)


@pytest.mark.gpu
@every_case
def test_fp32_on_gpu(pair):
    arch, variant, theirs, ours = pair
    ours.cuda()
    ids = tokens(arch, variant, 2, T)
    want = theirs(ids, labels=ids)
    want.loss.backward()
    assert error(ours(ids.cuda()).logits, want.logits) <= LIMIT
    got = ours(ids.cuda(), labels=ids.cuda())
    assert error(got.loss, want.loss) <= LIMIT
    got.loss.backward()
    assert_same_gradients(ours, theirs, twin=partial(fp64_twin, ours, input_ids=ids, labels=ids))


@pytest.mark.gpu
@one_case_each
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_gpu(pair, side):
    """flex_attention there, a dense mask on the CPU."""
    arch, variant, _, ours = pair
    ids = tokens(arch, variant, 3, 200)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 50, 131)):
        mask[row, slice(0, padding) if side == "left" else slice(200 - padding, 200)] = 0
    labels = ids.masked_fill(mask == 0, -100)
    compare_devices(ours, ids, labels, attention_mask=mask)


@pytest.mark.gpu
@one_case_each
def test_packing_on_gpu(pair):
    arch, variant, _, ours = pair
    ids = tokens(arch, variant, 1, 500)
    compare_devices(ours, ids, ids, cu_seqlens=torch.tensor([0, 100, 101, 164, 420], dtype=torch.int32))


def compare_devices(ours, ids, labels, **options):
    with reference_backend():
        want = ours(ids, labels=labels, return_logits=True, **options)
        want.loss.backward()
    gradients = gradients_of(ours)
    ours.zero_grad()
    ours.cuda()
    on_gpu = {name: tensor.cuda() for name, tensor in options.items()}
    got = ours(ids.cuda(), labels=labels.cuda(), return_logits=True, **on_gpu)
    got.loss.backward()
    seen = options.get("attention_mask", torch.ones_like(ids)).bool()
    assert error(got.logits.cpu()[seen], want.logits[seen]) <= LIMIT
    assert error(got.loss, want.loss) <= LIMIT
    beyond = [name for name, gradient in gradients.items() if error(ours.get_parameter(name).grad, gradient) > LIMIT]
    if beyond:  # both devices round: fp64 judges, by the same limit, or by the CPU's error where terms cancel
        exact = gradients_of(fp64_twin(ours, input_ids=ids, labels=labels, **options))
        for name in beyond:
            limit = max(LIMIT, error(gradients[name], exact[name]))
            assert error(ours.get_parameter(name).grad, exact[name]) <= limit, name


def choose_alike(ids, ours, *others):
    """In half precision each router takes others of two that are alike for a few tokens: by luck, more or fewer.

    So all experts are chosen, or, by routers that choose one, those that the tokens determine. The second way needs
    the returned argument of ``ours``.
    """
    mixtures = [module for module in ours.modules() if isinstance(module, LigerMoE)]
    if any(module.routing.score == "sparsemixer" for module in mixtures):
        return {}  # these routers choose two, one after the other
    if any(module.weights_input for module in mixtures):
        for module in (each for other in others for each in other.modules() if type(each).__name__ == "Llama4Router"):
            module.register_forward_hook(partial(weights_of, ids.flatten() % len(mixtures[0].down_weight)))
        return {
            "routed_experts": (ids % len(mixtures[0].down_weight))[..., None, None].expand(-1, -1, len(mixtures), 1)
        }
    for module in mixtures:
        module.routing = module.routing._replace(top_k=len(module.down_weight), top_groups=module.routing.groups)
    for module in (each for other in others for each in other.modules() if getattr(each, "top_k", 0)):
        module.top_k = len(mixtures[0].down_weight)
        if hasattr(module, "topk_group"):
            module.topk_group = module.num_group
    return {}


def weights_of(experts, router, args, out):
    """What Llama 4's router returns if it chooses these experts."""
    chosen = torch.nn.functional.one_hot(experts, router.num_experts).to(out[1].device)
    return (out[1].float().sigmoid() * chosen).to(out[1].dtype), out[1]


def error_of_all(gradients, exact):
    """Of all gradients as one vector."""
    assert gradients.keys() == exact.keys()
    names = sorted(exact)
    return error(*(torch.cat([g[name].flatten().cpu().float() for name in names]) for g in (gradients, exact)))


@pytest.mark.gpu
@one_case_each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_errs_no_more_than_transformers(pair, root, dtype):
    """Against fp32 truth, from the same rounded weights."""
    arch, variant, _, ours = pair
    folder = make_folder(arch, variant, root)
    ids = tokens(arch, variant, 16, T)
    truth, theirs = hf_model(folder, dtype).float(), hf_model(folder, dtype).cuda()
    experts = choose_alike(ids.cuda(), ours, truth, theirs)
    want = truth(ids, labels=ids)
    want.loss.backward()
    their = theirs(ids.cuda(), labels=ids.cuda())
    their.loss.backward()
    ours.to("cuda", dtype)
    got = ours(ids.cuda(), labels=ids.cuda(), return_logits=True, **experts)
    got.loss.backward()
    assert error(got.logits, want.logits) <= 1.2 * error(their.logits, want.logits)
    exact = hf_gradients(truth)
    assert error_of_all(our_gradients(ours, exact), exact) <= 1.2 * error_of_all(hf_gradients(theirs), exact)


@pytest.mark.compile
@pytest.mark.gpu
@one_case_each
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_fullgraph_compile_on_gpu(pair, packed, fresh_dynamo):
    arch, variant, _, ours = pair
    ours.cuda()
    ids = tokens(arch, variant, 1, 256).cuda()
    options = {"cu_seqlens": torch.tensor([0, 100, 256], device="cuda")} if packed else {}
    want = ours(ids, labels=ids, **options)
    want.loss.backward()
    gradients = gradients_of(ours)
    ours.zero_grad()
    got = torch.compile(ours, fullgraph=True)(ids, labels=ids, **options)
    got.loss.backward()
    assert error(got.loss, want.loss) <= LIMIT
    for name, gradient in gradients.items():
        assert error(ours.get_parameter(name).grad, gradient) <= LIMIT, name


@pytest.mark.gpu
@one_case_each
def test_autocast_on_gpu(pair, root):
    """fp32 weights, bf16 products: fp32 gradients that err no more than transformers' under the same autocast."""
    arch, variant, truth, ours = pair
    ids = tokens(arch, variant, 16, T)
    theirs = hf_model(make_folder(arch, variant, root)).cuda()
    experts = choose_alike(ids.cuda(), ours, truth, theirs)
    truth(ids, labels=ids).loss.backward()
    ours.cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        losses = (theirs(ids.cuda(), labels=ids.cuda()).loss, ours(ids.cuda(), labels=ids.cuda(), **experts).loss)
    for loss in losses:
        loss.backward()
    exact = hf_gradients(truth)
    gradients = our_gradients(ours, exact)
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
    assert error_of_all(gradients, exact) <= 1.2 * error_of_all(hf_gradients(theirs), exact)
