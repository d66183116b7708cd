"""Modes, their steps, and the classes of their kernels."""

import itertools
import re

import pytest
import torch

from benchmarks.profile import kernel_class
from benchmarks.training import build, step
from benchmarks.training.batches import draw_chain, draw_images, draw_padded_images
from benchmarks.training.frozen import LAYOUTS
from benchmarks.training.medusa import MedusaLoss
from benchmarks.training.models import CHANGES, FAMILIES, RELEASES, keep_layers, read_config, text_part
from benchmarks.training.modes import MODE, Mode, title
from liger_models import AutoLigerModel, LigerLlama, LlamaConfig
from liger_models.adapters import LoRAConfig, apply_lora
from liger_models.adapters.medusa import LigerMedusa
from liger_models.arch.qwen3_moe import LigerQwen3MoE, Qwen3MoeConfig
from liger_models.base import CapturedStep

from ..late import transformers

LLAMA = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2
}  # fmt: skip


@pytest.mark.parametrize("mode", ["hf+graph", "ours+compile+graph"])
def test_graphs_are_of_what_the_mode_names(monkeypatch, mode):
    recorded, compiled = [], torch.nn.Identity()
    monkeypatch.setattr(step, "build", lambda config, mode: torch.nn.Linear(1, 1))
    monkeypatch.setattr(torch, "compile", lambda model, fullgraph: compiled)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda loss, sample: recorded.append(loss) or print)
    step.make_step(Mode.parse(mode), {}, lr=0.1).forward(torch.ones(1), torch.ones(1))
    assert (recorded[0].model is compiled) == ("compile" in mode)


def test_graphs_of_our_models_are_captured_steps(monkeypatch):
    monkeypatch.setattr(step, "build", lambda *_: LigerLlama.from_config(LlamaConfig(**LLAMA)))
    train = step.make_step(Mode.parse("ours+graph"), {}, lr=0.1)
    ids = torch.arange(20)[None]
    losses = [train({"input_ids": ids, "labels": ids}).item() for _ in range(3)]
    assert isinstance(train.replay, CapturedStep)
    assert losses[2] < losses[1] < losses[0]


def test_balanced_experts_have_the_same_number_of_tokens(monkeypatch):
    sizes = {"vocab_size": 64, "hidden_size": 32, "moe_intermediate_size": 16, "num_attention_heads": 2}
    config = Qwen3MoeConfig(**sizes, num_key_value_heads=1, num_hidden_layers=2, num_experts=8, num_experts_per_tok=3)
    monkeypatch.setattr(step, "build", lambda *_: LigerQwen3MoE.from_config(config))
    train, ids = step.make_step(Mode.parse("ours+balanced"), {}, lr=3e-3), torch.arange(48).view(2, 24)
    given, chosen = [], []
    for router in train.model.routers:
        router.register_forward_pre_hook(lambda router, args: given.append(args[1]))
        router.gate.register_forward_hook(lambda gate, args, logits: chosen.append(logits.topk(3).indices))
    losses = [train({"input_ids": ids, "labels": ids}).item() for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    for experts, preferred in zip(given, chosen, strict=True):
        assert torch.bincount(experts.flatten().long()).tolist() == [48 * 3 // 8] * 8
        assert len({*experts[0, 0].tolist()}) == 3
        assert torch.bincount(preferred.flatten()).tolist() != [48 * 3 // 8] * 8
    monkeypatch.setattr(step, "build", lambda *_: LigerLlama.from_config(LlamaConfig(**LLAMA)))
    with pytest.raises(ValueError, match="balanced: is for models with routed experts"):
        step.make_step(Mode.parse("ours+balanced"), {}, lr=0.1)({"input_ids": ids, "labels": ids})


def test_blocks_of_transformers_are_compiled_before_they_are_sharded(monkeypatch):
    compiled, sharded = [], []
    block = torch.nn.Linear(1, 1)
    monkeypatch.setattr(block, "compile", lambda: compiled.append(len(sharded)))
    monkeypatch.setattr(build, "fully_shard", lambda module, **options: sharded.append(module) or module)
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList([block])
    build.shard(model, Mode.parse("hf+compile"))
    assert (compiled, sharded) == ([0], [block, model])


@pytest.mark.cases(6)
@pytest.mark.filterwarnings("ignore")  # names that transformers' next version drops, which PEFT reads
@pytest.mark.parametrize("experts", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "glm4_moe_lite", "nemotron_h", "gemma3", "qwen2_5_vl"])
def test_both_libraries_adapt_the_same_matrices(family, experts):
    """Of the language model alone, and of experts."""
    pytest.importorskip("peft")
    config = read_config(family)
    ours = AutoLigerModel.from_config(config, device="meta")
    apply_lora(ours, LoRAConfig(**build.LORA | build.our_targets(ours, experts)))
    kind = "AutoModelForImageTextToText" if "vision_config" in config else "AutoModelForCausalLM"
    with torch.device("meta"):
        theirs = getattr(transformers, kind).from_config(transformers.AutoConfig.for_model(**config))
    theirs = build.with_peft(theirs, build.hf_targets(theirs, experts))
    counts = [sum(each.numel() for each in model.parameters() if each.requires_grad) for model in (ours, theirs)]
    assert counts[0] == counts[1] > 0


def test_medusa_heads_have_the_same_loss(tmp_path):
    config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **config))
    theirs.save_pretrained(tmp_path)
    ours = LigerMedusa(LigerLlama.from_pretrained(tmp_path, progress=False), build.MEDUSA_HEADS)
    ids = torch.randint(64, (2, 12))
    theirs = MedusaLoss(theirs, build.MEDUSA_HEADS, liger=False)
    results = []
    for model in (ours, theirs):
        loss = model(input_ids=ids, labels=ids)[0]
        loss.backward()
        gradients = [each.grad.norm() for each in model.parameters() if each.requires_grad]
        results.append((loss, sorted(gradients)))
    torch.testing.assert_close(*results)
    assert len(results[0][1]) == 3 * build.MEDUSA_HEADS


def test_modes_have_names():
    assert title("hf+liger+ac") == "transformers + Liger Kernel, activation checkpointing"
    assert title("ours+offload20+new") == "liger_models, activations of 20 blocks offloaded, new"
    assert title("unsloth+lora+nf4+ac") == "Unsloth, LoRA on 4-bit weights, activation checkpointing"
    assert title("titan+compile+selective") == 'torchtitan, torch.compile, policy "selective"'
    assert title("ours+fp8+blocks") == "liger_models, float8, each block compiled"
    assert re.fullmatch(MODE, "ours+adamw+bf16+ep2+balanced")
    assert title("ours+ep2+balanced") == "liger_models, expert parallel over 2 GPUs, balanced routing"
    assert title("ours+full9") == 'liger_models, policy "full" for 9 blocks'
    assert title("ours+offload") == "liger_models, all activations offloaded"


def test_kernels_have_classes():
    names = {
        "nvjet_sm90_tst_256x128_64x4_2x1_v_bz_coopA_NNT": "matmul",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3": "attention",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizer>": "optimizer",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*, void const*)": "attention",
        "_adamw_kernel": "optimizer",
        "liger_cross_entropy_kernel": "loss",
        "_qk_norm_rope_backward_kernel": "rope",
        "_swiglu_forward_kernel": "gated activation",
        "_rms_norm_backward_kernel": "norm",
        "Memcpy DtoH (Device -> Pinned)": "copies",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>": "elementwise",
    }
    assert {name: kernel_class(name) for name in names} == names


def test_the_chain_can_be_learned():
    data = draw_chain(1000, 2, 64, 200, seed=1)
    assert data.shape == (200, 2, 64)
    pairs = {(a, b) for row in data.flatten(0, 1).tolist() for a, b in itertools.pairwise(row)}
    assert len({a for a, _ in pairs}) > 500
    assert len(pairs) <= 512 * 4
    assert torch.equal(data, draw_chain(1000, 2, 64, 200, seed=1))


def test_padded_images_have_their_placeholders():
    config, generator = read_config("gemma4"), torch.Generator().manual_seed(0)
    batch = draw_padded_images(config, torch.zeros(2, 1300, dtype=torch.int64), generator)
    patches = (batch["image_position_ids"] >= 0).all(-1).sum(1)
    assert patches.tolist() == 2 * [2520, 2304]
    assert (batch["input_ids"] == config["image_token_id"]).sum() * 9 == patches.sum()


def test_a_mode_is_parsed():
    mode = Mode.parse("ours+adamw+fp8+offload12+selective")
    assert mode.library == "ours"
    assert "adamw" in mode
    assert "fp8" in mode
    assert [mode.number(extra, 32) for extra in ("offload", "selective", "full")] == [12, 32, 0]
    assert re.fullmatch(MODE, "ours+adamw+8bit+moments16")
    assert re.fullmatch(MODE, "ours+adamw+plan60")
    assert re.fullmatch(MODE, "ours+lora+float8")
    assert not re.fullmatch(MODE, "ours+adamw+plan")
    assert re.fullmatch(MODE, "unsloth+lora+nf4+ac")
    assert re.fullmatch(MODE, "titan+compile+full")
    assert Mode.parse("ours+plan60").extras == {"plan": 60}
    assert title("ours+plan60") == "liger_models, planned for 60 GB"
    assert title("ours+adamw+tp2") == "liger_models, LigerAdamW, tensor parallel over 2 GPUs"
    assert title("ours+hsdp2+offload4") == "liger_models, 2 replicas, activations of 4 blocks offloaded"
    assert not re.fullmatch(MODE, "ours+ep")
    assert title("ours+adamw+8bit+moments16") == (
        "liger_models, LigerAdamW, 8-bit moments, moments of 16 blocks offloaded"
    )


@pytest.mark.cases(20)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_few_layers_of_a_release_are_a_model(name):
    config = read_config(name)
    model = AutoLigerModel.from_config(config, device="meta")
    assert len(model.layers) == FAMILIES[name][1]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name.startswith(("qwen3_next", "qwen3_5"))])
def test_hybrid_families_keep_both_kinds_of_attention(name):
    model = AutoLigerModel.from_config(read_config(name), device="meta")
    assert [block.linear for block in model.layers] == [True, True, True, False]


def test_what_a_release_has_none_of_is_not_added():
    config = read_config("qwen3_5")
    assert config["vision_config"]["deepstack_visual_indexes"] == []
    config["vision_config"]["deepstack_visual_indexes"] = [3, 9]
    keep_layers(config, 3)
    assert config["vision_config"]["deepstack_visual_indexes"] == [2, 5]
    assert text_part(config)["num_hidden_layers"] == 3


def test_only_what_has_an_entry_for_each_layer_is_shortened():
    config = read_config("llama-3-70b-8-layers")
    assert len(config["torch_dtype"]) == config["num_hidden_layers"]
    assert read_config("nemotron_h")["hybrid_override_pattern"] == "MEMEM*"
    keep_layers(config, 2)
    assert (config["torch_dtype"], config["num_hidden_layers"]) == ("bfloat16", 2)


PUBLISHED = {
    "DeepSeek-V2-Lite": 15_706_484_224, "GLM-4.7": 352_797_829_024, "GLM-4.7-Flash": 29_943_393_920,
    "MiniMax-M2.5": 228_689_764_864, "Falcon-H1-7B": 7_585_513_568, "Granite-4.0-H-Small": 32_207_337_984,
    "LFM2-350M": 354_483_968, "Bamba-9B": 9_778_138_240, "Pixtral-12B": 12_682_739_712,
    "InternVL3.5-8B": 8_528_318_464, "SmolVLM2-2.2B": 2_246_784_880, "Idefics3-8B-Llama3": 8_462_086_384,
    "GLM-4.1V-9B": 10_292_777_472, "GLM-4.5V": 107_710_933_120, "LFM2-VL-450M": 450_822_656,
    "Apertus-8B": 8_053_338_240, "ERNIE-4.5-21B-A3B": 21_825_437_888, "Hunyuan-A13B": 80_393_183_232,
    "LFM2-8B-A1B": 8_339_930_560, "OLMoE-1B-7B": 6_919_161_856, "Qwen1.5-MoE-A2.7B": 14_315_784_192,
}  # fmt: skip
"""Parameters of the releases, with the correction biases of routers and the constants of Apertus' activations."""


@pytest.mark.parametrize("release", RELEASES)
def test_releases_have_as_many_parameters_as_published(release):
    assert AutoLigerModel.from_config(RELEASES[release], device="meta").num_parameters() == PUBLISHED[release]


@pytest.mark.cases(14)
@pytest.mark.filterwarnings("ignore:.*rope_scaling.*:FutureWarning")  # a key of Kimi Linear's file
@pytest.mark.parametrize(
    "family",
    [
        *CHANGES, "deepseek_v2", "glm4_moe_lite", "granitemoehybrid", "lfm2", "muse_glimmer", "phimoe", "apertus",
        "ernie4_5_moe", "gemma3n_text", "glm4v", "hunyuan_v1_moe", "idefics3", "internvl", "lfm2_moe", "lfm2_vl",
        "llava", "llava_next", "olmoe", "paligemma", "paligemma2", "pixtral", "qwen2_moe", "smolvlm",
    ],
)  # fmt: skip
def test_both_libraries_train_the_same_number_of_parameters(family):
    config = read_config(family)
    kind = "AutoModelForImageTextToText" if "vision_config" in config else "AutoModelForCausalLM"
    with torch.device("meta"):
        theirs = getattr(transformers, kind).from_config(transformers.AutoConfig.for_model(**config))
    ours = AutoLigerModel.from_config(config, device="meta")
    assert len(ours.layers) == FAMILIES[family][1]
    if family in ("llava", "llava_next"):  # the text does not read the last layer of the tower
        theirs.model.vision_tower.encoder.layers[-1].requires_grad_(False)
        theirs.model.vision_tower.post_layernorm.requires_grad_(False)
    counts = [sum(each.numel() for each in model.parameters() if each.requires_grad) for model in (ours, theirs)]
    assert counts[0] == counts[1] > 0


def test_images_hold_no_placeholder_of_a_video():
    config, ids = read_config("muse_glimmer"), torch.tensor([[5, 200_091, 200_092, 7]]).repeat(1, 200)
    batch = draw_images(config, ids, torch.Generator().manual_seed(0))
    assert int((batch["input_ids"] == config["image_token_id"]).sum()) == 12 * 20
    assert int((batch["input_ids"] == config["video_token_id"]).sum()) == 0
    assert batch["pixel_values"].shape == (4 * 12 * 20, 3 * 2 * 14**2)


@pytest.mark.parametrize("word", LAYOUTS)
def test_frozen_formats_are_trained_with_adapters(monkeypatch, word):
    """The base has fewer bytes than in bf16, no number in it moves, and the loss falls."""
    monkeypatch.setattr(build, "DEVICE", "cpu")
    config = {
        "model_type": "qwen3_moe", "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96,
        "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    train = step.make_step(Mode.parse(f"ours+lora+{word}+full"), config, lr=0.01)
    frozen = {name: value.clone() for name, value in train.model.named_parameters() if not value.requires_grad}
    dense = AutoLigerModel.from_config(config, dtype=torch.bfloat16, device="meta")
    assert sum(value.nbytes for value in frozen.values()) < 0.9 * sum(each.nbytes for each in dense.parameters())
    ids = torch.arange(20)[None]
    losses = [train({"input_ids": ids, "labels": ids}).item() for _ in range(3)]
    assert losses[2] < losses[0]
    assert all(torch.equal(value, train.model.get_parameter(name)) for name, value in frozen.items())
