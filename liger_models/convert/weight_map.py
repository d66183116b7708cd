"""Weight maps: how a model's parameters correspond to the tensors of a Hugging Face checkpoint.

A weight map has one expression for each of our parameters, which are the parameters of a model of this package. The
expression names checkpoint tensors, packs them into our parameter, and unpacks our parameter into them. Expressions
only move elements, so a round trip is bitwise identical in every dtype. An expression that is applied to meta tensors
computes only shapes. Quantized tensors are decoded before an expression is applied; see `convert.encodings`.

For example, this entry packs the gate and up projections of an MLP::

    "layers.{i}.mlp.gate_up_proj.weight": Rearrange(
        "f two ... -> (f two) ...",
        Stack(["model.layers.{i}.mlp.gate_proj.weight", "model.layers.{i}.mlp.up_proj.weight"], dim=1),
        two=2,
    )

Names may contain indices (``{i}``). When the map is built, an entry with an index becomes one entry for each value of
this index. Names are never matched by patterns, so a printed map (``print(weight_map)``) lists every name and can be
diffed.
"""

from __future__ import annotations

import itertools
import string
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from liger_models.common.device import empty_on
from liger_models.layers.config import DecoderConfig, LatentDecoderConfig


class Expression(ABC):
    """A function that packs tensors of a checkpoint into one tensor of our model, and the inverse function."""

    by_rows = False
    """Whether row ``i`` of the packed tensor consists of the elements in row ``i`` of each checkpoint tensor."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the checkpoint's tensors in the expression, in order."""

    @abstractmethod
    def expand(self, indices: Mapping[str, int]) -> Expression:
        """Return this expression with the indices in its names replaced by numbers."""

    @abstractmethod
    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Compute the packed tensor from the checkpoint's tensors, which are passed by name."""

    @abstractmethod
    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        """Compute the checkpoint's tensors, by name, from the packed tensor.

        The results are views of the packed tensor if its strides allow views.
        """


class Name(Expression):
    """A tensor of the checkpoint that is used unchanged."""

    def __init__(self, name: str) -> None:
        self.name = name

    def names(self) -> list[str]:
        return [self.name]

    def expand(self, indices: Mapping[str, int]) -> Name:
        return Name(self.name.format(**indices))

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors[self.name]

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        return {self.name: packed}

    def __str__(self) -> str:
        return self.name


class Rearrange(Expression):
    """A tensor whose elements are reordered by an einops pattern.

    Args:
        pattern: the pattern from the checkpoint's layout to the layout of our model. The pattern must be invertible, so
            it must not drop or repeat an axis.
        child: the expression to rearrange.
        sizes: lengths of axes. The length of an axis is required if einops can't infer it when packing or unpacking.
    """

    def __init__(self, pattern: str, child: Expression | str, **sizes: int) -> None:
        self.pattern = pattern
        self.child = _expression(child)
        self.sizes = sizes

    def names(self) -> list[str]:
        return self.child.names()

    def expand(self, indices: Mapping[str, int]) -> Rearrange:
        return Rearrange(self.pattern, self.child.expand(indices), **self.sizes)

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return rearrange(self.child.pack(tensors), self.pattern, **self.sizes)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        theirs, _, ours = self.pattern.partition(" -> ")
        return self.child.unpack(rearrange(packed, f"{ours} -> {theirs}", **self.sizes))

    def __str__(self) -> str:
        sizes = "".join(f", {axis}={size}" for axis, size in self.sizes.items())
        return f"Rearrange({self.pattern!r}, {self.child}{sizes})"


class Cat(Expression):
    """Several tensors that are concatenated along ``dim``. ``sizes`` are the lengths of these tensors along ``dim``."""

    def __init__(self, children: Sequence[Expression | str], dim: int, sizes: Sequence[int]) -> None:
        self.children = [_expression(child) for child in children]
        self.dim = dim
        self.sizes = list(sizes)

    def names(self) -> list[str]:
        return [name for child in self.children for name in child.names()]

    def expand(self, indices: Mapping[str, int]) -> Cat:
        return Cat([child.expand(indices) for child in self.children], self.dim, self.sizes)

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.cat(_same_dtype(self, [child.pack(tensors) for child in self.children]), self.dim)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        parts = torch.split(packed, self.sizes, self.dim)
        return _union(child.unpack(part) for child, part in zip(self.children, parts, strict=True))

    def __str__(self) -> str:
        return f"Cat([{', '.join(map(str, self.children))}], dim={self.dim}, sizes={self.sizes})"


class Stack(Expression):
    """Several tensors of the same shape that are stacked along a new dimension ``dim``."""

    def __init__(self, children: Sequence[Expression | str], dim: int) -> None:
        self.children = [_expression(child) for child in children]
        self.dim = dim

    def names(self) -> list[str]:
        return [name for child in self.children for name in child.names()]

    def expand(self, indices: Mapping[str, int]) -> Stack:
        return Stack([child.expand(indices) for child in self.children], self.dim)

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.stack(_same_dtype(self, [child.pack(tensors) for child in self.children]), self.dim)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        parts = packed.unbind(self.dim)
        return _union(child.unpack(part) for child, part in zip(self.children, parts, strict=True))

    def __str__(self) -> str:
        return f"Stack([{', '.join(map(str, self.children))}], dim={self.dim})"


class Split(Expression):
    """A checkpoint tensor that concatenates several parts.

    The expression ``parts`` combines these parts into the packed tensor.

    Args:
        child: the checkpoint's tensor.
        dim: the dimension along which the parts are concatenated.
        sizes: maps the name of each part to its length, in order.
        parts: expression that computes the packed tensor from the parts, which it refers to by name.
    """

    def __init__(self, child: Expression | str, dim: int, sizes: Mapping[str, int], parts: Expression) -> None:
        self.child = _expression(child)
        self.dim = dim
        self.sizes = dict(sizes)
        self.parts = parts

    def names(self) -> list[str]:
        return self.child.names()

    def expand(self, indices: Mapping[str, int]) -> Split:
        return Split(self.child.expand(indices), self.dim, self.sizes, self.parts)

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        parts = torch.split(self.child.pack(tensors), list(self.sizes.values()), self.dim)
        return self.parts.pack(dict(zip(self.sizes, parts, strict=True)))

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        parts = self.parts.unpack(packed)  # the parts may have another order than in the checkpoint
        return self.child.unpack(torch.cat([parts[name] for name in self.sizes], self.dim))

    def __str__(self) -> str:
        return f"Split({self.child}, dim={self.dim}, sizes={self.sizes}, parts={self.parts})"


class Renamed(Expression):
    """An expression whose tensors have other names in the checkpoint than in ``child``.

    Args:
        child: the expression.
        names: maps each name in ``child`` to the name in the checkpoint.
    """

    def __init__(self, child: Expression, names: Mapping[str, str]) -> None:
        self.child = child
        self.renamed = names

    def names(self) -> list[str]:
        return [self.renamed[name] for name in self.child.names()]

    def expand(self, indices: Mapping[str, int]) -> Renamed:
        return self  # names without indices

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return self.child.pack({name: tensors[self.renamed[name]] for name in self.child.names()})

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        return {self.renamed[name]: tensor for name, tensor in self.child.unpack(packed).items()}

    def __str__(self) -> str:
        return f"Renamed({self.child}, {', '.join(self.names())})"


def _expression(value: Expression | str) -> Expression:
    return Name(value) if isinstance(value, str) else value


def _union(parts: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for part in parts for name, tensor in part.items()}


def _same_dtype(expression: Expression, tensors: list[Tensor]) -> list[Tensor]:
    # torch.cat and torch.stack would promote dtypes, and then unpacking would not restore the original tensors.
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise ValueError(
            f"{', '.join(expression.names())}: tensors that form one parameter must have one dtype, "
            f"got {', '.join(sorted(map(str, dtypes)))}. Pass dtype to convert them."
        )
    return tensors


class WeightMap:
    """An expression for every parameter of a model, and the checkpoint tensors that belong to no parameter.

    Args:
        entries: maps the name of each parameter of our model to an expression over the checkpoint's names, or to a
            single name. A key that contains an index, such as ``{i}``, stands for one entry per value of the index.
        over: maps the name of each index to its values.
        skip: names of checkpoint tensors that are ignored if they exist.
        kept: prefixes of the names of checkpoint tensors that belong to no parameter. If such tensors exist, the model
            keeps them in host memory and saves them unchanged.
        dropped: prefixes of the names of checkpoint tensors that are ignored if they exist.

    Raises:
        ValueError: a parameter has two entries, or a checkpoint tensor is used twice.
    """

    def __init__(
        self,
        entries: Mapping[str, Expression | str],
        *,
        over: Mapping[str, Sequence[int]],
        skip: Iterable[str] = (),
        kept: Iterable[str] = (),
        dropped: Iterable[str] = (),
    ) -> None:
        # An entry with indices in its name becomes one entry for each combination of the indices' values.
        expanded = [
            (name.format(**indices), _expression(expression).expand(indices))
            for name, expression in entries.items()
            for indices in _indices(name, over)
        ]
        self.entries = dict(expanded)
        self.skip = frozenset(name.format(**indices) for name in skip for indices in _indices(name, over))
        self.kept, self.dropped = tuple(kept), tuple(dropped)

        # Our names and the checkpoint's names must all be unique.
        names = [name for _, expression in expanded for name in expression.names()]
        if len(self.entries) < len(expanded) or len(set(names)) < len(names):
            raise ValueError(f"WeightMap: every name must be in one entry only. Look for duplicates in:\n{self}")

    def passes_over(self, name: str) -> bool:
        """Return whether ``skip``, ``kept`` or ``dropped`` says that a checkpoint tensor belongs to no parameter."""
        return name in self.skip or name.startswith((*self.kept, *self.dropped))

    def of_body(self) -> WeightMap:
        """Return the map for a checkpoint without a language-model head, in which names lack the prefix ``model.``."""
        entries: dict[str, Expression | str] = {
            ours: Renamed(expression, {name: name.removeprefix("model.") for name in expression.names()})
            for ours, expression in self.entries.items()
            if ours != "lm_head.weight"
        }
        return WeightMap(entries, over={}, skip=self.skip, kept=self.kept, dropped=self.dropped)

    def shapes(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the checkpoint's tensors, by name, as meta tensors with their shapes and dtypes.

        Raises:
            ValueError: a parameter has no entry, or an entry has no parameter.
        """
        if parameters.keys() != self.entries.keys():
            raise ValueError(
                "WeightMap: must have an entry for each parameter of the model. "
                f"Parameters without one: {sorted(parameters.keys() - self.entries.keys())}; "
                f"entries without a parameter: {sorted(self.entries.keys() - parameters.keys())}. "
                "Merge or remove parameters that were added to the model, or correct the map."
            )
        return _union(self.entries[name].unpack(empty_on("meta", parameter)) for name, parameter in parameters.items())

    def __str__(self) -> str:
        return "\n".join(f"{name} = {expression}" for name, expression in self.entries.items())


def _indices(name: str, over: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    axes = [axis for _, axis, _, _ in string.Formatter().parse(name) if axis]
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*(over[axis] for axis in axes))]


def qkv_rows(q: str, k: str, v: str, *, heads: int, kv_heads: int, head_dim: int) -> Expression:
    """Return the expression of a packed qkv projection. For each KV head, the projection has the rows of the query
    heads, of the key and of the value."""
    # Concatenate [G, n, C] of q, k and v within each of the G groups.
    groups = [Rearrange("(g n) ... -> g n ...", name, g=kv_heads) for name in (q, k, v)]
    sizes = [heads // kv_heads * head_dim, head_dim, head_dim]
    return Rearrange("g n ... -> (g n) ...", Cat(groups, dim=1, sizes=sizes), g=kv_heads)


def attention_rows(theirs: str, parameter: str, config: Any) -> Expression:
    """Return `qkv_rows` for a decoder layer whose projections are ``{theirs}.q_proj``, ``k_proj`` and ``v_proj``."""
    q, k, v = (f"{theirs}.{part}_proj.{parameter}" for part in "qkv")
    return qkv_rows(q, k, v, heads=config.num_attention_heads, kv_heads=config.kv_heads, head_dim=config.head_size)


def tower_rows(theirs: str, parameter: str, heads: int, width: int) -> Expression:
    """Like `attention_rows`, for a layer of a vision tower, which has as many KV heads as query heads."""
    q, k, v = (f"{theirs}.{part}_proj.{parameter}" for part in "qkv")
    return qkv_rows(q, k, v, heads=heads, kv_heads=heads, head_dim=width // heads)


def key_rows(q: str, k: str, *, heads: int, kv_heads: int, head_dim: int) -> Expression:
    """Like `qkv_rows`, but without the rows of the values."""
    groups = [Rearrange("(g n) ... -> g n ...", name, g=kv_heads) for name in (q, k)]
    sizes = [heads // kv_heads * head_dim, head_dim]
    return Rearrange("g n ... -> (g n) ...", Cat(groups, dim=1, sizes=sizes), g=kv_heads)


def latent_attention_entries(config: LatentDecoderConfig, theirs: str) -> dict[str, Expression | str | None]:
    """Return the weight map's entries for a `LigerLatentAttention`, to pass to `decoder_map` as ``instead``.

    Args:
        config: config of the model.
        theirs: prefix of a layer's names in the checkpoint, such as ``model.layers.{i}``.
    """
    name = f"{theirs}.self_attn"
    biased = _parameters(config.attention_bias)
    unchanged = ["kv_a_layernorm.weight", "kv_b_proj.weight", *(f"o_proj.{parameter}" for parameter in biased)]
    entries: dict[str, Expression | str | None] = {"self_attn.qkv_proj.weight": None}
    if config.q_lora_rank is None:
        unchanged.append("q_proj.weight")
        for parameter in biased:
            entries[f"self_attn.kv_a_proj.{parameter}"] = f"{name}.kv_a_proj_with_mqa.{parameter}"
    else:
        # One projection computes all latents: first the query latents, then the latents of keys and values together
        # with the shared part of the keys.
        unchanged += ["q_a_layernorm.weight", "q_b_proj.weight"]
        sizes = [config.q_lora_rank, config.kv_lora_rank + config.qk_rope_head_dim]
        for parameter in biased:
            parts = [f"{name}.q_a_proj.{parameter}", f"{name}.kv_a_proj_with_mqa.{parameter}"]
            entries[f"self_attn.qkv_a_proj.{parameter}"] = Cat(parts, dim=0, sizes=sizes)
    return entries | {f"self_attn.{own}": f"{name}.{own}" for own in unchanged}


def equal_qkv_rows(qkv: str, heads: int) -> Expression:
    """Like `fused_qkv_rows`, for equal numbers of query heads and KV heads."""
    return Rearrange("(three h d) ... -> (h three d) ...", qkv, three=3, h=heads)


def patch_rows(convolution: str, channels: int, frames: int, side: int) -> Expression:
    """Return the expression of a linear patch embedding's weight.

    In the checkpoint, the patch embedding is a convolution whose stride equals its kernel size.
    """
    pattern = "c channels frames height width -> c (channels frames height width)"
    return Rearrange(pattern, convolution, channels=channels, frames=frames, height=side)


def gate_up_rows(gate: str, up: str) -> Expression:
    """Return the expression of a packed gate and up projection. Row ``2f`` is row ``f`` of gate, and row ``2f + 1`` is
    row ``f`` of up."""
    return Rearrange("f two ... -> (f two) ...", Stack([gate, up], dim=1), two=2)


def fused_qkv_rows(qkv: str, *, heads: int, kv_heads: int, head_dim: int) -> Expression:
    """Like `qkv_rows`, for a checkpoint tensor that has the rows of all queries, then all keys, then all values."""
    sizes = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    return Split(qkv, 0, sizes, qkv_rows("q", "k", "v", heads=heads, kv_heads=kv_heads, head_dim=head_dim))


def fused_gate_up_rows(gate_up: str) -> Expression:
    """Like `gate_up_rows`, for a checkpoint tensor that has all rows of gate, then all rows of up."""
    return Rearrange("(two f) ... -> (f two) ...", gate_up, two=2)


def expert_rows(gate: str, up: str, down: str, experts: int) -> tuple[Expression, Expression]:
    """Return the expressions of the two stacked weights of a layer's experts: packed gate and up, and down.

    ``{x}`` in a name stands for the number of the expert.
    """
    numbers = [str(x) for x in range(experts)]
    gate_up = Stack([gate_up_rows(gate.replace("{x}", x), up.replace("{x}", x)) for x in numbers], dim=0)
    return gate_up, Stack([down.replace("{x}", x) for x in numbers], dim=0)


def fused_expert_rows(gate_up: str, down: str) -> tuple[Expression, Expression]:
    """Like `expert_rows`, for checkpoint tensors [X, 2F, C] (all rows of gate, then all rows of up) and [X, C, F]."""
    return Rearrange("x (two f) c -> x (f two) c", gate_up, two=2), Name(down)


def stacked_experts(
    experts: str, count: int, *, fused: bool, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[Expression, Expression]:
    """Return the expressions of the stacked weights of a layer's experts, like `expert_rows`.

    Args:
        experts: prefix of the experts' tensors.
        count: number of experts.
        fused: whether one tensor holds the same projection of all experts in a layer, as in transformers 5. Otherwise,
            each expert has its own tensors.
        names: the names of an expert's gate, up and down projection if each expert has its own tensors.
    """
    if fused:
        return fused_expert_rows(f"{experts}.gate_up_proj", f"{experts}.down_proj")
    gate, up, down = (f"{experts}.{{x}}.{name}.weight" for name in names)
    return expert_rows(gate, up, down, count)


def expert_mlps(router: str, gate_up: Expression | str, down: Expression | str) -> dict[str, Expression | str | None]:
    """Return the value of ``instead`` for `decoder_map`, for a model whose MLPs are all mixtures of experts.

    Args:
        router: name of the router's weight.
        gate_up, down: the stacked weights of a layer's experts.
    """
    return {
        "mlp.gate_up_proj.weight": None,
        "mlp.down_proj.weight": None,
        "mlp.gate.weight": router,
        "mlp.gate_up_weight": gate_up,
        "mlp.down_weight": down,
    }


def mixtral_mlps(config: Any, name: str, *, fused: bool) -> dict[str, Expression | str | None]:
    """Return `expert_mlps` for checkpoints in a layout like Mixtral's, where the MoE layer is called ``name``.

    In newer checkpoints (``fused``), one tensor holds the same projection of all experts. In older checkpoints, each
    expert has three matrices.
    """
    moe = f"model.layers.{{i}}.{name}"
    stacked = stacked_experts(f"{moe}.experts", config.num_local_experts, fused=fused, names=("w1", "w3", "w2"))
    return expert_mlps(f"{moe}.gate.weight", *stacked)


MIXTRAL_LAYOUTS = (("mlp", True), ("mlp", False), ("block_sparse_moe", True))
"""Arguments ``name`` and ``fused`` of `mixtral_mlps` for the checkpoint layouts that transformers 5 may write. The
layouts are tried in order.
"""


def sparse_mlps(
    sparse_layers: Sequence[int], num_layers: int, prefix: str, gate_up: Expression, down: Expression
) -> dict[str, Any]:
    """Return keyword arguments for `decoder_map`, for a model in which some MLPs are mixtures of experts.

    Args:
        sparse_layers: indices of the layers with experts. All other layers have a dense gated MLP.
        num_layers: number of layers.
        prefix: prefix of the checkpoint's names.
        gate_up, down: the stacked weights of a layer's experts. ``{sparse}`` in a name is the layer's index.
    """
    # Replace the entries for the MLPs of all layers with separate entries for sparse layers and for dense layers.
    sparse, dense = f"{prefix}.layers.{{sparse}}.mlp", f"{prefix}.layers.{{dense}}.mlp"
    return {
        "instead": {"mlp.gate_up_proj.weight": None, "mlp.down_proj.weight": None},
        "also": {
            "layers.{sparse}.mlp.gate.weight": f"{sparse}.gate.weight",
            "layers.{sparse}.mlp.gate_up_weight": gate_up,
            "layers.{sparse}.mlp.down_weight": down,
            "layers.{dense}.mlp.gate_up_proj.weight": gate_up_rows(
                f"{dense}.gate_proj.weight", f"{dense}.up_proj.weight"
            ),
            "layers.{dense}.mlp.down_proj.weight": f"{dense}.down_proj.weight",
        },
        "over": {
            "sparse": sparse_layers,
            "dense": [i for i in range(num_layers) if i not in sparse_layers],
        },
    }


def decoder_map(
    config: DecoderConfig,
    *,
    qkv_bias: bool | None = None,
    o_bias: bool | None = None,
    mlp_bias: bool | None = None,
    norm_bias: bool = False,
    norms: Sequence[str] = ("input_layernorm", "post_attention_layernorm"),
    plain_mlp: tuple[str, str] | None = None,
    instead: Mapping[str, Expression | str | None] | None = None,
    also: Mapping[str, Expression | str] | None = None,
    over: Mapping[str, Sequence[int]] | None = None,
    skip: Iterable[str] = (),
    kept: Iterable[str] = (),
    dropped: Iterable[str] = (),
    prefix: str = "model",
    head: str = "lm_head.weight",
) -> WeightMap:
    """Return the weight map of a decoder whose checkpoints have the same layout as Llama's.

    Args:
        config: config of the model.
        qkv_bias, o_bias, mlp_bias: whether these projections have biases. None stands for the config's
            ``attention_bias`` or ``mlp_bias``, or for False if the config has no such field.
        norm_bias: whether all norms have biases.
        norms: names of a block's norms, which are the same in the model and in the checkpoint.
        plain_mlp: the names, in the checkpoint, of the two layers of a `LigerMLP`; None for a gated MLP.
        instead: entries of a layer that differ from Llama's. Keys are the names of our model's parameters, relative to
            the layer. Values are expressions over full names in the checkpoint, such as ``model.layers.{i}. ...``, or
            None to remove an entry and its bias.
        also: additional entries with full names.
        over: the values of the indices in ``also``, except for the index ``i``.
        skip, kept, dropped: see `WeightMap`.
        prefix: prefix of all names in the checkpoint except the head's name.
        head: name of the head's weight in the checkpoint.
    """
    # Add the norms and the attention of a layer.
    attention_bias = getattr(config, "attention_bias", False)
    theirs = f"{prefix}.layers.{{i}}"
    layer: dict[str, Expression | str | None] = {
        f"{norm}.{parameter}": f"{theirs}.{norm}.{parameter}" for norm in norms for parameter in _parameters(norm_bias)
    }
    for parameter in _parameters(attention_bias if qkv_bias is None else qkv_bias):
        layer[f"self_attn.qkv_proj.{parameter}"] = attention_rows(f"{theirs}.self_attn", parameter, config)
    for parameter in _parameters(attention_bias if o_bias is None else o_bias):
        layer[f"self_attn.o_proj.{parameter}"] = f"{theirs}.self_attn.o_proj.{parameter}"

    # Add the MLP of a layer, which is plain or gated.
    for parameter in _parameters(getattr(config, "mlp_bias", False) if mlp_bias is None else mlp_bias):
        if plain_mlp is not None:
            layer |= {
                f"mlp.fc{i}.{parameter}": f"{theirs}.mlp.{name}.{parameter}" for i, name in enumerate(plain_mlp, 1)
            }
            continue
        gate, up, down = (f"{theirs}.mlp.{part}_proj.{parameter}" for part in ("gate", "up", "down"))
        layer[f"mlp.gate_up_proj.{parameter}"] = gate_up_rows(gate, up)
        layer[f"mlp.down_proj.{parameter}"] = down
    # A removed projection has no bias either, unless ``instead`` has one.
    changes = instead or {}
    removed = [name.removesuffix("weight") for name, expression in changes.items() if expression is None]
    layer |= {**{f"{name}bias": None for name in removed}, **changes}

    # Combine the layers with the embedding, the last norm and the head.
    entries: dict[str, Expression | str] = {
        "embed_tokens.weight": f"{prefix}.embed_tokens.weight",
        **{f"layers.{{i}}.{name}": expression for name, expression in layer.items() if expression is not None},
        **{f"norm.{parameter}": f"{prefix}.norm.{parameter}" for parameter in _parameters(norm_bias)},
        **(also or {}),
    }
    skip = [*skip]
    if config.tie_word_embeddings:
        skip.append(head)  # some checkpoints with tied weights store the head
    else:
        entries["lm_head.weight"] = head
    indices = {"i": range(config.num_hidden_layers), **(over or {})}
    return WeightMap(entries, over=indices, skip=skip, kept=kept, dropped=dropped)


def shared_moe_map(
    config: Any,
    *,
    fused: bool = False,
    experts: int | None = None,
    shared: str | None = "shared_experts",
    gated: bool = False,
    correction: bool = True,
    prefix: str = "model",
    instead: Mapping[str, Expression | str | None] | None = None,
    also: Mapping[str, Expression | str] | None = None,
    over: Mapping[str, Sequence[int]] | None = None,
    **more: Any,
) -> WeightMap:
    """Return the weight map of a decoder with `LigerSharedExpertMoE` in some layers and gated MLPs in the others.

    Args:
        config: a config with a method ``is_sparse(layer)``. With a `LatentDecoderConfig`, attention is
            `LigerLatentAttention`. If ``mlp_bias`` is set, dense MLPs and shared experts have biases.
        fused: whether each projection is one tensor for all experts of a layer, as in transformers 5.
        experts: number of routed experts; None for ``config.n_routed_experts``.
        shared: name of the shared experts; None if there are none and the layers are `LigerMoE`.
        gated: whether the shared experts have a gate.
        correction: whether routers have a bias that affects only the choice of experts.
        prefix: prefix of all names in the checkpoint except the head's name.
        instead, over: see `decoder_map`.
        also: additional entries, which may replace the entries of the experts. ``{sparse}`` in a name is the index of a
            layer with experts.
        more: other arguments of `decoder_map`.
    """
    layers = range(config.num_hidden_layers)
    theirs, ours = f"{prefix}.layers.{{sparse}}.mlp", "layers.{sparse}.mlp"
    count = config.n_routed_experts if experts is None else experts
    stacked = stacked_experts(f"{theirs}.experts", count, fused=fused)
    arguments = sparse_mlps([i for i in layers if config.is_sparse(i)], len(layers), prefix, *stacked)

    # The routed experts are a separate layer, and the shared experts together are one MLP.
    routed = ours if shared is None else f"{ours}.experts"
    entries = {name.replace(ours, routed): rows for name, rows in arguments["also"].items()}
    if correction:
        entries[f"{routed}.correction.bias"] = f"{theirs}.gate.e_score_correction_bias"
    if gated:
        entries[f"{ours}.shared_expert_gate.weight"] = f"{theirs}.{shared}_gate.weight"
    dense = f"{prefix}.layers.{{dense}}.mlp"
    parameters = _parameters(getattr(config, "mlp_bias", False))
    for mlp, names, kinds in (
        (f"{ours}.shared_expert", f"{theirs}.{shared}", () if shared is None else parameters),
        ("layers.{dense}.mlp", dense, parameters[1:]),
    ):
        for parameter in kinds:
            gate, up, down = (f"{names}.{part}_proj.{parameter}" for part in ("gate", "up", "down"))
            entries |= {f"{mlp}.gate_up_proj.{parameter}": gate_up_rows(gate, up), f"{mlp}.down_proj.{parameter}": down}
    entries |= also or {}
    instead = {**arguments["instead"], **(instead or {})}
    if isinstance(config, LatentDecoderConfig):
        instead |= latent_attention_entries(config, f"{prefix}.layers.{{i}}")
    over = {**(over or {}), **arguments["over"]}
    return decoder_map(config, prefix=prefix, instead=instead, also=entries, over=over, **more)


def _parameters(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)
