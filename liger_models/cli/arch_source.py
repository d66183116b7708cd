"""The source of a new architecture's module: wired like Llama, with the settings of a config.json as fields."""

import dataclasses
import inspect
import json
from collections.abc import Mapping
from typing import Any

from liger_models.convert.config_map import IGNORED_KEYS
from liger_models.kernels.activation.gated_act import ACTIVATIONS as GATED_ACTIVATIONS
from liger_models.layers.config import DecoderConfig, RMSNormDecoderConfig
from liger_models.layers.mlp import ACTIVATIONS

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")
WIDTH = 120
"""Columns of a line of source."""


def arguments(config_class: Any) -> dict[str, inspect.Parameter]:
    """The arguments of transformers' config class that have a default, by name; none without the class."""
    found = {} if config_class is None else inspect.signature(config_class).parameters
    return {name: each for name, each in found.items() if each.default is not inspect.Parameter.empty}


def own_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json that describe the architecture and are no fields of every decoder."""
    common = {field.name for field in dataclasses.fields(RMSNormDecoderConfig)} | {*ROPE_KEYS} | IGNORED_KEYS
    return {key: value for key, value in hf.items() if key not in common and not key.startswith("_")}


def _hint(*values: Any, optional: bool = False) -> str:
    """The type of a field that has these values."""
    kinds = {f"list[{_hint(*each)}]" if isinstance(each, list) else type(each).__name__ for each in values}
    optional = optional or "NoneType" in kinds
    kinds -= {"NoneType", *(["int"] if "float" in kinds else [])}
    return " | ".join([*sorted(kinds or {"int"}), *(["None"] if optional else [])])


def _annotated(parameter: inspect.Parameter) -> str | None:
    """The type that transformers annotates an argument with, if it is a union of plain types."""
    text = inspect.formatannotation(parameter.annotation).strip("'").replace("typing.", "")
    parts = [part.strip() for part in text.split("|")]
    plain = {"bool", "int", "float", "str", "None", "list[str]", "list[int]", "list[float]"}
    return " | ".join(parts) if plain.issuperset(parts) else None


def _line(name: str, hint: str, default: Any) -> str:
    """The line of a field in its class; a list that is too long for one is None."""
    if isinstance(default, list):
        line = f"    {name}: {hint} = field(default_factory=lambda: {json.dumps(default)})"
        return line if len(line) <= WIDTH else f"    {name}: {hint.removesuffix(' | None')} | None = None"
    return f"    {name}: {hint} = {json.dumps(default) if isinstance(default, str) else repr(default)}"


def _call(head: str, *arguments: str) -> str:
    """``head(arguments)`` on one line; too long for that, the arguments on one line, or on one each."""
    indent, inside = " " * (len(head) - len(head.lstrip())), ", ".join(arguments)
    if len(f"{head}({inside})") <= WIDTH:
        return f"{head}({inside})"
    lines = [inside] if len(f"{indent}    {inside}") <= WIDTH else [f"{argument}," for argument in arguments]
    return "\n".join([f"{head}(", *(f"{indent}    {line}" for line in lines), f"{indent})"])


def _common_fields(config_class: Any, base: type) -> list[str]:
    """The lines of the base class's fields that have another default in transformers."""
    theirs, lines = {name: each.default for name, each in arguments(config_class).items()}, []
    if hasattr(config_class, "default_theta"):
        theirs["rope_theta"] = config_class.default_theta
    for field in dataclasses.fields(base):
        default = theirs.get(field.name, field.default)
        if default != field.default and field.name != "rope_scaling":
            hint = field.type.__name__ if isinstance(field.type, type) else str(field.type)
            lines.append(_line(field.name, hint, float(default) if hint == "float" else default))
    return lines


def _own_fields(hf: Mapping[str, Any], config_class: Any, ignored: set[str]) -> tuple[list[str], list[str]]:
    """The lines of the fields that only this architecture has, and what is a guess in them."""
    known: list[str] = []
    unknown: list[str] = []
    notes: list[str] = []
    theirs = arguments(config_class)
    for key, value in own_keys(hf).items():
        default = theirs[key].default if key in theirs else value
        if key in ignored:
            continue
        if isinstance(value, Mapping):
            notes.append(f"{key} is an object: give it a dataclass, or move its values in from_json.")
            continue
        annotated = _annotated(theirs[key]) if key in theirs else None
        if value is None and default is None and annotated is None:
            notes.append(f"{key} is null: its type is a guess.")
        optional = key in theirs and "None" in str(theirs[key].annotation)
        line = _line(key, annotated or _hint(value, default, optional=optional), default)
        (known if key in theirs or config_class is None else unknown).append(line)
    if unknown:
        unknown.insert(0, "    # Not an argument of transformers' class, but its code reads them.")
    return known + unknown, notes


def module_source(
    name: str, prefix: str, hf: Mapping[str, Any], config_class: Any, code: str = "", norm_bias: bool = False
) -> tuple[str, list[str]]:
    """The source of the module, and what is a guess in it.

    Args:
        name: ``model_type``.
        prefix: what the names of its classes begin with.
        hf: the content of config.json, and the keys that transformers adds.
        config_class: transformers' config class, whose defaults the fields take; None for the values of ``hf``.
        code: transformers' source of the architecture. A key that does not occur in it is ignored.
        norm_bias: whether LayerNorms have a bias.
    """
    own = own_keys(hf)
    endings = ("norm_eps", "norm_epsilon")
    eps = next(
        (key for key, value in own.items() if key.endswith(endings) and isinstance(value, float)), "rms_norm_eps"
    )
    base = RMSNormDecoderConfig if eps == "rms_norm_eps" else DecoderConfig
    ignored = {key for key in own if code and key not in code}
    fields, notes = _own_fields(hf, config_class, ignored)
    fields = _common_fields(config_class, base) + fields
    act = hf.get("hidden_act", "silu")
    has_kernel = ACTIVATIONS.get(act) in GATED_ACTIVATIONS
    if not has_kernel:
        notes.append(f"hidden_act {act!r} has no kernel: config.json is refused until the MLP computes it.")
    gated = has_kernel and ACTIVATIONS[act] != "silu"
    if gated:
        fields = [f'    activations = ("{act}",)', "", *fields]
    biases = ["qkv_bias=config.attention_bias", "o_bias=config.attention_bias"]
    biases = biases if isinstance(own.get("attention_bias"), bool) else []
    mlp_bias = isinstance(own.get("mlp_bias"), bool)
    mapped = [*biases, *(["mlp_bias=config.mlp_bias"] if mlp_bias else [])]
    sizes = ["config.hidden_size", "config.intermediate_size", "act=ACTIVATIONS[config.hidden_act]"]
    sizes += ["bias=config.mlp_bias"] if mlp_bias else []
    mlp = "GatedMLP" if gated else "LigerSwiGLUMLP"
    mlp = _call(f"        self.mlp = {mlp}", *(sizes if gated else ["config"]), "kernel=kernels.swiglu")
    used = "ACTIVATIONS, GatedMLP" if gated else "LigerSwiGLUMLP"
    factories = "dataclass, field" if any("= field(" in line for line in fields) else "dataclass"
    body = "\n".join(["", *fields, ""]) if fields else ""
    extra = "".join(f"            {each},\n" for each in biases)
    hf_class = (hf.get("architectures") or [f"{prefix}ForCausalLM"])[0]
    blocks = f"{prefix}Block(config, i, self.kernels) for i in range(config.num_hidden_layers)"
    blocks = _call("        self.layers = nn.ModuleList", blocks)
    inert = ""
    checkpoint = [f'model_type="{name}"', f'hf_class="{hf_class}"', "weight_map=weight_map"]
    if ignored:
        names = [json.dumps(key) for key in sorted(ignored)]
        inert = _call("IGNORED_KEYS = ", *(names if len(names) > 1 else [f"{names[0]},"]))
        inert = f"{inert}  # transformers does not read them\n\n\n"
        checkpoint.append("ignored_keys=IGNORED_KEYS")
    checkpoint_format = _call("    CheckpointFormat", *checkpoint).strip()
    family = _call("add_family", f"Liger{prefix}", checkpoint_format)
    rms = eps == "rms_norm_eps"
    norm, norm_kernel = ("LigerRMSNorm", "rms_norm") if rms else ("LigerLayerNorm", "layer_norm")
    bias = "" if rms or norm_bias else "use_bias=False, "
    norms = _call(
        "        norm = partial", norm, "config.hidden_size", f"config.{eps}", *([bias[:-2]] if bias else []),
        f"kernel=kernels.{norm_kernel}",
    )  # fmt: skip
    last_norm = _call(
        f"        self.norm = {norm}", "config.hidden_size", f"config.{eps}", *([bias[:-2]] if bias else []),
        f"kernel=self.kernels.{norm_kernel}",
    )  # fmt: skip
    source = f'''"""{prefix}: model_type ``{name}``.

Differs from Llama: TODO. Say what differs, and name the released models in the first line.

Source: TODO the paper, transformers ``models/{name}``.
"""

from dataclasses import {factories}
from functools import partial

from torch import Tensor, nn

from liger_models.arch.registry import add_family
from liger_models.base.causal_lm import CausalLM
from liger_models.convert.format import CheckpointFormat
from liger_models.convert.weight_map import WeightMap, decoder_map
from liger_models.kernels.options import KernelOptions
from liger_models.layers.attention import LigerAttention
from liger_models.layers.batch import BatchLayout
from liger_models.layers.config import {base.__name__}
from liger_models.layers.embedding import LigerEmbedding
from liger_models.layers.lm_head import LigerLMHead
from liger_models.layers.mlp import {used}
from liger_models.layers.norm import {norm}
from liger_models.layers.rope import RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class {prefix}Config({base.__name__}):
    """Sizes and constants of {prefix} models."""
{body}

class {prefix}Block(nn.Module):
    """``h += attention(norm(h)); h += mlp(norm(h))``, each addition done together with the norm that follows it."""

    def __init__(self, config: {prefix}Config, layer: int, kernels: KernelOptions) -> None:
        super().__init__()
{norms}
        self.input_layernorm = norm()
        self.self_attn = LigerAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.kv_heads,
            config.head_size,
            layer=layer,
{extra}            dropout=config.attention_dropout,
            rope_kernel=kernels.rope,
        )
        self.post_attention_layernorm = norm()
{mlp}

    def forward(self, x: Tensor | None, residual: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
        """x [B, T, C] is still to be added to residual [B, T, C]; returns the same pair."""
        x, residual = self.self_attn.add_norm(self.input_layernorm, x, residual, layout)
        return self.mlp.add_norm(self.post_attention_layernorm, x, residual)


class Liger{prefix}(CausalLM):
    """{prefix} with its language-model head.

    Args:
        config: sizes and constants.
        kernels: which parts run on fused kernels; all by default.
    """

    config_class = {prefix}Config

    def __init__(self, config: {prefix}Config, kernels: KernelOptions | None = None) -> None:
        super().__init__(config, kernels)
        self.embed_tokens = LigerEmbedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
{blocks}
{last_norm}
        self.lm_head = LigerLMHead(config.hidden_size, config.vocab_size, kernels=self.kernels)
        rotary = RotaryEmbedding(
            config.head_size, config.rope_theta, config.rope_scaling, config.max_position_embeddings
        )
        self.rotary = nn.ModuleDict({{"default": rotary}})
        self.post_init()


{inert}def weight_map(config: {prefix}Config) -> WeightMap:
    """{prefix}'s parameters over the tensors of a Hugging Face checkpoint."""
    return decoder_map({", ".join(["config", *mapped])})


{family}
'''
    return source, notes
