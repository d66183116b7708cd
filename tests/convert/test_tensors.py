"""Weights in memory under Hugging Face's names: out of a model, into an engine that loads as vLLM does, and back."""

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_models import get_hf_state_dict, hf_tensors, load_hf_tensors
from liger_models.adapters import LoRAConfig, apply_lora, merge_lora, quantize_base
from liger_models.arch import get_arch
from liger_models.convert import format_of
from liger_models.convert.config_map import read_config
from liger_models.layers.linear import is_sharded, local

from ..arch.families import CASES, beyond_first, tiny
from ..parallel.models import mixture
from ..parallel.models import tiny as tiny_llama
from .conftest import assert_same_bits, read_tensors


def build(arch: str, variant: str, seed: int = 0) -> Any:
    from transformers import AutoConfig

    cls = get_arch(arch)
    torch.manual_seed(seed)
    model = cls.from_config(read_config(cls.config_class, AutoConfig.for_model(arch, **tiny(arch)[variant]).to_dict()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def described(tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]


@pytest.mark.cases(10)
@pytest.mark.slow
@pytest.mark.parametrize(("arch", "variant"), [pytest.param(*case, marks=beyond_first(case)) for case in CASES])
def test_out_and_back(arch: str, variant: str, tmp_path: Path) -> None:
    """Every family: the tensors of the checkpoint in its order, and a model that takes them in any order."""
    model = build(arch, variant)
    for dtype in (None, torch.bfloat16):
        model.save_pretrained(tmp_path / "saved", dtype=dtype)
        stream = list(hf_tensors(model, dtype))
        assert all(tensor.is_contiguous() and not tensor.requires_grad for _, tensor in stream)
        assert_same_bits(dict(stream), read_tensors(tmp_path / "saved"))
        meta = get_hf_state_dict(model, dtype, device="meta")
        assert described(stream) == described(meta.items())
        assert {tensor.device.type for tensor in meta.values()} == {"meta"}
    names = [name for name, _ in stream]
    assert len(set(names)) == len(names)
    besides = (
        "visual",
        "vision",
        "projector",
        "image_newline",
        "connector",
        "embed_tokens_per_layer",
        "altup_",
        "per_layer_model",
        "per_layer_projection_norm",
    )
    text = [name for name in names if not any(each in name for each in besides)]
    layers = [int(name.partition("layers.")[2].partition(".")[0]) for name in text[1:] if ".layers." in name]
    assert "embed" in text[0]
    assert layers == sorted(layers)
    outside = [name for name in text if ".layers." not in name]
    tied = model.config.tie_word_embeddings
    head = [f"lm_head.{name}" for name, _ in model.lm_head.named_parameters() if not (tied and name == "weight")]
    ends = ["embed_tokens.weight", *(f"norm.{name}" for name, _ in model.norm.named_parameters()), *head]
    other_names = {
        "backbone.embeddings.": "embed_tokens.",
        "backbone.norm_f.": "norm.",
        "embedding_norm.": "norm.",
        "final_layernorm.": "norm.",
    }
    for theirs, ours in other_names.items():
        outside = [name.replace(theirs, ours) for name in outside]
    assert [name.split("model.")[-1] for name in outside] == ends
    assert names[-1] == text[-1] or names[-1].endswith(ends[-1])

    expected = state(model)
    other = build(arch, variant, seed=1)
    before = dict(other.named_parameters())
    load_hf_tensors(other, hf_tensors(model))
    assert_same_bits(state(other), expected)
    assert all(parameter is before[name] for name, parameter in other.named_parameters())
    # In any order, and in every layout: transformers may have all experts of a layer in one tensor.
    for weights in format_of(type(model)).weight_maps(model.config):
        tensors = [each for name, value in expected.items() for each in weights.entries[name].unpack(value).items()]
        for given in (tensors[::-1], dict(tensors)):
            other = build(arch, variant, seed=2)
            load_hf_tensors(other, given)
            assert_same_bits(state(other), expected)


def test_a_tied_head_is_one_tensor() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    tensors = get_hf_state_dict(model)
    assert "lm_head.weight" not in tensors
    embedding = tensors["model.embed_tokens.weight"]
    load_hf_tensors(model, {"lm_head.weight": embedding, **tensors})
    message = "lm_head.weight must be equal to the embedding.*20 of 20 parameters hold new weights already"
    with pytest.raises(ValueError, match=message):
        load_hf_tensors(model, {"lm_head.weight": embedding + 1, **tensors})
    model.lm_head.weight = nn.Parameter(embedding + 1)
    with pytest.warns(UserWarning, match="hf_tensors: tie_word_embeddings is True .* are two tensors"):
        assert torch.equal(dict(hf_tensors(model))["lm_head.weight"], embedding + 1)


def test_a_state_dict_is_a_copy() -> None:
    model = tiny_llama()
    expected = {name: tensor.clone() for name, tensor in hf_tensors(model)}
    for options in ({}, {"device": "cpu"}):
        found = get_hf_state_dict(model, **options)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        assert_same_bits(found, expected)
        load_hf_tensors(model, found)


def test_values_are_rounded_to_the_parameters_dtype() -> None:
    model, other = tiny_llama(), tiny_llama().to(torch.bfloat16)
    nn.init.zeros_(other.embed_tokens.weight)
    load_hf_tensors(other, hf_tensors(model, torch.float64))
    assert {parameter.dtype for parameter in other.parameters()} == {torch.bfloat16}
    assert_same_bits(state(other), {name: each.to(torch.bfloat16) for name, each in state(model).items()})


def changed(tensors: dict[str, Tensor], **changes: Any) -> dict[str, Any]:
    made = {name: changes.get(name.replace(".", "_"), tensor) for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in made.items() if tensor is not None}


REFUSED = {
    "missing": ({"model_norm_weight": None}, "got none of the name model.norm.weight"),
    "shape": ({"model_norm_weight": torch.ones(31)}, r"model.norm.weight must have shape \(32,\), got \(31,\)"),
    "dtype": ({"model_norm_weight": torch.ones(32).char()}, "model.norm.weight must .* got Tensor torch.int8"),
    "kind": ({"model_norm_weight": [1.0] * 32}, "model.norm.weight must be a whole tensor .* got list"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    model = tiny_llama()
    tensors = changed(get_hf_state_dict(model), **REFUSED[case][0])
    with torch.no_grad():
        model.embed_tokens.weight.zero_()
    before = state(model)
    with pytest.raises(ValueError, match=REFUSED[case][1]) as error:
        load_hf_tensors(model, tensors)
    assert "already" not in str(error.value)
    assert_same_bits(state(model), before)
    with pytest.raises(ValueError, match=rf"{REFUSED[case][1]}.* (19|20) of 21 parameters hold new weights already"):
        load_hf_tensors(model, tensors.items())
    assert model.embed_tokens.weight.any()


def test_names_that_are_refused() -> None:
    model = tiny_llama()
    tensors = get_hf_state_dict(model)
    message = "names in a checkpoint of the model, got model.norm.wieght. Did you mean model.norm.weight?"
    with pytest.raises(ValueError, match=message):
        load_hf_tensors(model, {"model.norm.wieght": torch.ones(32), **tensors})
    with pytest.raises(ValueError, match=r"given once, got model.norm.weight twice. 1 of 21 parameters hold"):
        load_hf_tensors(model, [("model.norm.weight", tensors["model.norm.weight"])] * 2)
    with pytest.raises(ValueError, match=r"hf_tensors: dtype must be one of float64, .* got torch.int8"):
        hf_tensors(model, torch.int8)
    with pytest.raises(ValueError, match=r"hf_tensors: model must be one of this package, got Sequential\. Pass"):
        hf_tensors(nn.Sequential(model))
    for call in (lambda: hf_tensors(model.to("meta")), lambda: load_hf_tensors(model.to("meta"), tensors)):
        with pytest.raises(ValueError, match=r"hf_tensors: parameters must hold weights, got embed_tokens.weight"):
            call()


def adapted(**config: Any) -> Any:
    model = apply_lora(tiny_llama(), LoRAConfig(r=4, **config))
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize(
    "config", [{}, {"use_dora": True, "target_modules": ["q_proj", "lm_head"]}], ids=["lora", "dora"]
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_merged_adapters(config: dict[str, Any], dtype: torch.dtype | None, tmp_path: Path) -> None:
    model = adapted(**config)
    before = state(model)
    merged = get_hf_state_dict(model, dtype)
    plain = get_hf_state_dict(model, dtype, merge=False)
    assert_same_bits(state(model), before)
    assert_same_bits(plain, get_hf_state_dict(tiny_llama(), dtype))
    load_hf_tensors(model, {name: tensor * 2 for name, tensor in get_hf_state_dict(model, merge=False).items()})
    after = state(model)
    assert all(torch.equal(after[name], value if "lora" in name else value * 2) for name, value in before.items())
    load_hf_tensors(model, get_hf_state_dict(tiny_llama()))
    merge_lora(model).save_pretrained(tmp_path, dtype=dtype)
    assert_same_bits(merged, read_tensors(tmp_path))
    assert not torch.equal(
        merged["model.layers.0.self_attn.q_proj.weight"], plain["model.layers.0.self_attn.q_proj.weight"]
    )


def test_a_merged_head_is_no_longer_tied() -> None:
    model = apply_lora(tiny_llama(tie_word_embeddings=True), LoRAConfig(target_modules=["lm_head"]))
    nn.init.ones_(model.lm_head.lora["lm_head"].lora_B)
    with pytest.warns(UserWarning, match="hf_tensors: tie_word_embeddings is True .* are two tensors"):
        tensors = dict(hf_tensors(model))
    assert torch.equal(tensors["lm_head.weight"], model.lm_head.merged())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "lm_head.weight" not in dict(hf_tensors(model, merge=False))


def test_weights_in_4_bits() -> None:
    model = quantize_base(adapted(target_modules=["q_proj"]).to(torch.bfloat16))
    plain, merged = get_hf_state_dict(model, merge=False), get_hf_state_dict(model)
    q = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(plain[q], merged[q])
    assert_same_bits({q: merged[q]}, {q: get_hf_state_dict(merge_lora(model))[q]})
    model = quantize_base(adapted(target_modules=["q_proj"]).to(torch.bfloat16))
    with torch.no_grad():
        load_hf_tensors(model, {name: tensor * 0 for name, tensor in plain.items()})
    assert not get_hf_state_dict(model, merge=False)[q].any()
    load_hf_tensors(model, hf_tensors(tiny_llama().to(torch.bfloat16)))  # quantized again
    assert_same_bits(get_hf_state_dict(model, merge=False), plain)


class Peak(TorchDispatchMode):
    """The most bytes of new storages that were alive at a time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.own = {StorageWeakRef(local(parameter).untyped_storage()) for parameter in model.parameters()}
        self.sizes: dict[StorageWeakRef, int] = {}
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta" and not is_sharded(tensor):
                made = StorageWeakRef(tensor.untyped_storage())
                if made not in self.own:
                    self.sizes[made] = tensor.untyped_storage().nbytes()
        self.sizes = {made: size for made, size in self.sizes.items() if not made.expired()}
        self.bytes = max(self.bytes, sum(self.sizes.values()))
        return out


@pytest.mark.parametrize("kind", ["plain", "cast", "mixture", "lora"])
def test_memory(kind: str) -> None:
    """Two tensors at most, the last and the next; merging needs a few copies of one weight in fp32."""
    model = {"mixture": mixture, "lora": adapted}.get(kind, tiny_llama)()
    dtype = torch.float64 if kind == "cast" else None
    largest = max(tensor.nbytes for _, tensor in hf_tensors(model, dtype))
    whole = sum(tensor.nbytes for _, tensor in hf_tensors(model, dtype))
    with Peak(model) as peak:
        for _ in hf_tensors(model, dtype):
            pass
    packed = max(parameter.nbytes for parameter in model.layers.parameters())
    limit = 4 * packed + largest if kind == "lora" else 2 * largest
    assert 0 < peak.bytes <= limit < whole


def test_memory_of_loading() -> None:
    model = tiny_llama()
    tensors = get_hf_state_dict(model)
    packed = max(parameter.nbytes for parameter in model.parameters())
    with Peak(model) as peak:
        load_hf_tensors(model, ((name, tensor.clone()) for name, tensor in tensors.items()))
    assert 0 < peak.bytes <= 3 * packed


class StandIn(nn.Module):
    """An engine that loads weights as vLLM does: rows of q, k, v after each other, of gate, then of up, and w13, w2.

    Names are translated by a table, and each packed parameter takes a tensor together with the part that it is.
    """

    stacked_params_mapping = (
        ("qkv_proj", "q_proj", "q"),
        ("qkv_proj", "k_proj", "k"),
        ("qkv_proj", "v_proj", "v"),
        ("gate_up_proj", "gate_proj", 0),
        ("gate_up_proj", "up_proj", 1),
    )

    def __init__(self, shapes: dict[str, tuple[int, ...]], sizes: dict[str | int, tuple[int, int]], tied: bool) -> None:
        super().__init__()
        self.params = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
        self.sizes, self.tied = sizes, tied

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        for name, weight in weights:
            if self.tied and name.startswith("lm_head."):
                continue
            for target, source, part in self.stacked_params_mapping:
                if f".{source}." in name and ".experts." not in name:
                    name = name.replace(source, target)
                    first, count = self.sizes[part]
                    self.params[name][first : first + count].copy_(weight)
                    break
            else:
                if ".experts." in name:
                    layer, _, rest = name.partition(".experts.")
                    expert, matrix, _ = rest.split(".")
                    target = "w2_weight" if matrix == "w2" else "w13_weight"
                    name = f"{layer}.experts.{target}"
                    rows = self.params[name][int(expert)]
                    if matrix == "w2":
                        rows.copy_(weight)
                    else:
                        rows.chunk(2)[matrix == "w3"].copy_(weight)
                else:
                    self.params[name].copy_(weight)
            loaded.add(name)
        return loaded


@pytest.mark.parametrize("kind", ["llama", "tied", "mixtral"])
def test_an_engine_that_loads_like_vllm(kind: str) -> None:
    model: Any = mixture() if kind == "mixtral" else tiny_llama(tie_word_embeddings=kind == "tied")
    config = model.config
    C, D, F = config.hidden_size, config.head_size, config.intermediate_size
    q, k = config.num_attention_heads * D, config.kv_heads * D
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, C),
        "model.norm.weight": (C,),
    }
    if kind != "tied":
        shapes["lm_head.weight"] = (config.vocab_size, C)
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.{norm}.weight": (C,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}.self_attn.qkv_proj.weight": (q + 2 * k, C), f"{at}.self_attn.o_proj.weight": (C, q)}
        if kind == "mixtral":
            at, X = f"{at}.block_sparse_moe", config.num_local_experts
            shapes |= {f"{at}.gate.weight": (X, C), f"{at}.experts.w13_weight": (X, 2 * F, C)}
            shapes[f"{at}.experts.w2_weight"] = (X, C, F)
        else:
            shapes |= {f"{at}.mlp.gate_up_proj.weight": (2 * F, C), f"{at}.mlp.down_proj.weight": (C, F)}
    engine = StandIn(shapes, {"q": (0, q), "k": (q, k), "v": (q + k, k), 0: (0, F), 1: (F, F)}, kind == "tied")
    assert engine.load_weights(hf_tensors(model)) == shapes.keys()
    assert not any(each.isnan().any() for each in engine.params.values())

    # Its products are the model's.
    x, block = torch.randn(5, C), model.layers[1]
    packed = block.self_attn.qkv_proj(x).view(5, config.kv_heads, -1, D)
    ours = [packed[:, :, :-2].flatten(1), packed[:, :, -2].flatten(1), packed[:, :, -1].flatten(1)]
    torch.testing.assert_close(torch.cat(ours, 1), x @ engine.params["model.layers.1.self_attn.qkv_proj.weight"].T)
    if kind == "mixtral":
        at = "model.layers.1.block_sparse_moe.experts"
        experts = zip(engine.params[f"{at}.w13_weight"], engine.params[f"{at}.w2_weight"], strict=True)
        theirs = [gated(x, w13) @ w2.T for w13, w2 in experts]
        ours = [
            interleaved(x, gate_up) @ down.T
            for gate_up, down in zip(block.mlp.gate_up_weight, block.mlp.down_weight, strict=True)
        ]
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs))
    else:
        at = "model.layers.1.mlp"
        theirs = gated(x, engine.params[f"{at}.gate_up_proj.weight"]) @ engine.params[f"{at}.down_proj.weight"].T
        torch.testing.assert_close(block.mlp.down_proj(interleaved(x, block.mlp.gate_up_proj.weight)), theirs)


def gated(x: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, -1)
    return nn.functional.silu(gate) * up


def interleaved(x: Tensor, gate_up: Tensor) -> Tensor:
    return nn.functional.silu(x @ gate_up[::2].T) * (x @ gate_up[1::2].T)


def test_the_stream_is_lazy() -> None:
    """The values are those of the time of reading."""
    model = tiny_llama()
    stream: Iterator[tuple[str, Tensor]] = hf_tensors(model)
    next(stream)
    with torch.no_grad():
        model.norm.weight.fill_(3)
    assert (dict(stream)["model.norm.weight"] == 3).all()
