"""Models by name, training runs of them, and what must agree between one process and several."""

import dataclasses
from typing import Any

import torch

from liger_models.arch import get_arch
from liger_models.base.vision_language import VisionLanguageModel
from liger_models.convert.config_map import read_config
from liger_models.parallel import (
    apply_fsdp,
    apply_tp,
    clip_grad_norm_,
    mean_over_ranks,
    targets_per_rank,
)

from ..arch.families import beyond_kinds
from .images import IMAGE_BATCHES, IMAGE_MODELS, image_batch, image_config
from .models import TINY, batch, gradients, init_device_mesh, make_optimizer, share, whole

STEPS = 2


def build(arch: str, config: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    model = get_arch(arch).from_config(config, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Also norms and biases away from the ones and zeros that they start from.
            parameter.add_(torch.randn_like(parameter) * 0.1)
            parameter.nan_to_num_(posinf=1.0, neginf=-1.0)  # bounds of what a tower clips
            if name.endswith("A_log"):  # in a new model states vanish within a token or two, and whatever is in them
                parameter.sub_(4)
    return model


def configs_of(arch: str) -> list[Any]:
    """The tiny configurations of an architecture whose KV heads two ranks can share."""
    import transformers  # here, so that the processes need not import it

    from ..arch.families import tiny as tiny_configs

    theirs = [transformers.AutoConfig.for_model(arch, **config).to_dict() for config in tiny_configs(arch).values()]
    configs = [read_config(get_arch(arch).config_class, config) for config in theirs]
    return [config for config in configs if getattr(config, "kv_heads", 2) % 2 == 0]


def mesh_of(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])


def assert_close(got: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


def assert_same(got: dict[str, Any], expected: dict[str, Any], limit: float = 1e-5) -> None:
    """Tensors that differ by no more than this share of their norm."""
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (got[name] - gradient).norm() / gradient.norm().clamp_min(1e-12)
        assert error <= limit, f"{name}: {error}"


def once(model: Any, **options: Any) -> dict[str, Any]:
    """Loss, logits and gradients of a padded batch."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (2, 12), generator=generator)  # those from there on may stand for images
    if model.config.pad_token_id is not None:
        ids[:, 5] = model.config.pad_token_id
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    out = model(ids, labels=labels, attention_mask=mask, return_logits=True, **options)
    out.loss.backward()
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), "gradients": gradients(model)}


def assert_same_once(got: dict[str, Any], right: dict[str, Any]) -> None:
    assert_close(got["loss"], right["loss"])
    assert_close(got["logits"], right["logits"], atol=1e-5)
    assert_same(got["gradients"], right["gradients"])


GEMMA4 = {
    "head_dim": 8, "global_head_dim": 16, "sliding_window": 5, "vocab_size_per_layer_input": 97, "rms_norm_eps": 0.1,
    "hidden_size_per_layer_input": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
# Whole training runs: tied and not, of all kinds of layers.
RUNS = {
    "llama": ("llama", {}),
    "llama, tied, biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 5.0}),
    "phi3": ("phi3", {}),
    "glm4": ("glm4", {"head_dim": 8}),
    "granite": ("granite", {"residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "olmo2": ("olmo2", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 5}),
    "apertus": ("apertus", {}),
    "gemma4_text": ("gemma4_text", GEMMA4 | {"num_hidden_layers": 4, "num_kv_shared_layers": 2}),
    "gemma3n_text": (
        "gemma3n_text",
        {
            "head_dim": 8, "sliding_window": 5, "vocab_size_per_layer_input": 97, "rms_norm_eps": 0.1,
            "hidden_size_per_layer_input": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4, "num_kv_shared_layers": 2, "altup_num_inputs": 3, "laurel_rank": 4,
            "activation_sparsity_pattern": [0.7, 0.0, 0.0, 0.0],
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            "head_dim": 8, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "rms_norm_eps": 0.05, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 24, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {
            "q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
            "attention_bias": True, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "hybrid_override_pattern": "ME*", "head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 8,
            "ssm_state_size": 8, "n_groups": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 24, "moe_latent_size": 16,
            "layer_norm_epsilon": 0.05, "pad_token_id": None,
        },
    ),
    "kimi_linear": (
        "kimi_linear",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"], "rms_norm_eps": 0.05,
            "linear_num_heads": 4, "linear_head_dim": 8, "kv_lora_rank": 12, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4, "v_head_dim": 6, "num_experts": 4, "num_experts_per_token": 2,
            "moe_intermediate_size": 16, "pad_token_id": None,
        },
    ),
    "llama4_text": (
        "llama4_text",
        {
            "head_dim": 8, "attention_chunk_size": 5, "no_rope_layer_interval": 2, "floor_scale": 4,
            "num_local_experts": 4, "moe_layers": [0, 1], "intermediate_size_mlp": 24,
        },
    ),
}  # fmt: skip


def beyond_kinds_of_run(name: str) -> Any:
    """The marker ``matrix`` for a run of a family whose layers are those of other families."""
    return beyond_kinds((IMAGE_MODELS if name in IMAGE_MODELS else RUNS)[name][0])


def run_config(name: str) -> tuple[str, Any]:
    if name in IMAGE_MODELS:
        return image_config(name)
    arch, config = RUNS[name]
    return arch, get_arch(arch).config_class(**{**TINY, "initializer_range": 0.1, **config})


def batch_for(model: Any, step: int, *, packed: bool = False, dp: tuple[int, int] = (0, 1)) -> dict[str, torch.Tensor]:
    images = isinstance(model, VisionLanguageModel)
    inputs = image_batch(model.config, step, dp) if images else share(batch(step, packed=packed), *dp)
    return {key: value.to(model.device) for key, value in inputs.items()}


def train(model: Any, optimizer_name: str = "liger", *, packed: bool = False, dp: tuple[int, int] = (0, 1)) -> dict:
    """Losses, norms, the first step's gradients and the last one's weights; ``dp``: place and number of the rank."""
    optimizer = make_optimizer(optimizer_name, model)
    result: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(len(IMAGE_BATCHES) if isinstance(model, VisionLanguageModel) else STEPS):
        inputs = batch_for(model, step, packed=packed, dp=dp)
        loss = model(**inputs, num_items_in_batch=targets_per_rank(inputs)).loss
        loss.backward()
        result["losses"].append(mean_over_ranks(loss))
        if step == 0:
            result["gradients"] = gradients(model)
        result["norms"].append(clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return result | {"weights": whole(model.named_parameters())}


def assert_same_run(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_close(got["losses"], expected["losses"])
    assert_close(got["norms"], expected["norms"], rtol=2e-5)
    assert_same(got["gradients"], expected["gradients"])
    assert_same(got["weights"], expected["weights"])


def assert_same_on_device(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """In fp32, also by the kernels of a GPU."""
    assert_close(got["losses"], expected["losses"], rtol=1e-4)
    for part in ("gradients", "weights"):
        assert_same(got[part], expected[part], limit=1e-4)


def assert_same_runs(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """On all ranks, whose weights are the same bit for bit."""
    for got in results:
        assert_same_run(got, expected)
        assert_close(got["weights"], results[0]["weights"], rtol=0, atol=0)


CHECKPOINTS = {
    "llama": {"vocab_size": 101},
    "gemma2": {"tie_word_embeddings": True, "head_dim": 16},
    "phi3": {"pad_token_id": 0, "eos_token_id": 1},
    "olmo2": {},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 12, "num_experts_per_tok": 2},
}
"""A projection for each of q, k, v, gate, up; tied; fused ones; norms as wide as them; experts."""


def shard_2d(model: Any, shape: tuple[int, ...]) -> Any:
    mesh = mesh_of(*shape)
    apply_tp(model, mesh["tp"])
    return apply_fsdp(model, mesh["dp"], param_dtype=None) if len(shape) == 2 else model


def experts_case(arch: str, *, balanced: bool) -> tuple[str, Any]:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 12}
    gemma4 = GEMMA4 | experts | {"layer_types": GEMMA4["layer_types"][:3], "attention_k_eq_v": True}
    ernie = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "tie_word_embeddings": False}
    every = {"mixtral": {"num_local_experts": 4}, "gemma4_text": gemma4, "ernie4_5_moe": ernie}
    every |= {name: RUNS[name][1] for name in ("gpt_oss", "kimi_linear", "llama4_text", "nemotron_h", "qwen3_next")}
    sizes = every.get(arch) or CHECKPOINTS[arch]
    config_class = get_arch(arch).config_class
    balance = {"output_router_logits": balanced, "router_aux_loss_coef": 0.5}
    known = {field.name for field in dataclasses.fields(config_class)}  # Gemma 4 has no auxiliary loss
    options = {**TINY, "initializer_range": 0.1, **sizes, **{key: balance[key] for key in balance.keys() & known}}
    return arch, config_class(**options)


def one_block(arch: str, config: Any) -> Any:
    return build(arch, dataclasses.replace(config, num_hidden_layers=1))
