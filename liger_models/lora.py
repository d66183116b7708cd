"""Low-rank adapters (LoRA, rsLoRA, DoRA): a frozen model, and two small trained matrices beside each adapted one.

    y = W x + s · B A x          s = alpha / r (LoRA), alpha / sqrt(r) (rsLoRA)
    y = m · (W x + s · B A x) / ‖W + s · B A‖      row by row; the norm has no gradient (DoRA)

Adapters belong to the matrices of a Hugging Face checkpoint (q_proj, gate_proj, ...), of which a packed projection
holds several; the weight map says which of its rows are whose. Their files are PEFT's.

Source: https://arxiv.org/abs/2106.09685, https://arxiv.org/abs/2312.03732, https://arxiv.org/abs/2402.09353.
"""

import contextlib
import dataclasses
import difflib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from einops import EinopsError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from .convert import get_module_map, model_type_of
from .convert.checkpoint import open_safetensors, read_json
from .convert.ranks import agreeing, this_rank
from .convert.weight_map import Expression, Name
from .kernels.collectives import Ranks
from .kernels.dispatch import check
from .kernels.nf4_linear import nf4_linear
from .layers.causal_lm import CausalLM
from .layers.head import LigerLMHead
from .layers.moe import LigerMoE
from .layers.tensor_parallel import is_cut
from .layers.vision_language import VisionLanguageModel

if TYPE_CHECKING:
    from typing_extensions import Self

Model = TypeVar("Model", bound=CausalLM)

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Of the names in PEFT's files."""

NF4_BLOCK = 64
"""Weights with one scale."""

REFUSED = (
    "alora_invocation_tokens", "alpha_pattern", "arrow_config", "exclude_modules", "fan_in_fan_out", "kasa_config",
    "layer_replication", "layers_to_transform", "lora_bias", "modules_to_save", "monteclora_config", "rank_pattern",
    "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora", "velora_config",
)  # fmt: skip
"""Keys of an adapter_config.json that ask for what is not implemented, unless they are empty."""
INITIAL = (True, False, None, "gaussian", "orthogonal", "eva")
"""Its ``init_lora_weights`` that leave the base as it is: with others (PiSSA, OLoRA, LoftQ) PEFT changes it, too."""


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """What is adapted, and how; names and defaults are PEFT's, but for ``target_modules``.

    Args:
        r: rank.
        lora_alpha: the adapter is multiplied by ``lora_alpha / r``.
        lora_dropout: probability of dropping an element of an adapter's input in training; adapters of one packed
            projection drop the same ones.
        target_modules: names as in a Hugging Face checkpoint, or ends of them, such as "q_proj"; a text is a regular
            expression that a whole name must match. "all-linear" is all linear layers of the blocks.
        use_rslora: multiply by ``lora_alpha / sqrt(r)``.
        use_dora: learn the norms of the adapted matrices' rows, too.
    """

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    target_modules: Sequence[str] | str = "all-linear"
    use_rslora: bool = False
    use_dora: bool = False

    def __post_init__(self) -> None:
        check(self.r >= 1, f"LoRAConfig: r must be at least 1, got {self.r}.")
        check(0 <= self.lora_dropout < 1, f"LoRAConfig: lora_dropout must be in [0, 1), got {self.lora_dropout}.")

    @property
    def scaling(self) -> float:
        """Factor of B A."""
        return self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r)


class Adapter(nn.Module):
    """The trained tensors beside one matrix of a checkpoint: A [r, C], B [O, r] and, with DoRA, magnitudes [O]."""

    def __init__(self, out_features: int, in_features: int, config: LoRAConfig, like: Tensor) -> None:
        super().__init__()
        # Adapters are small and take small steps: bf16 would lose them.
        made: dict[str, Any] = {"device": like.device, "dtype": torch.promote_types(like.dtype, torch.float32)}
        self.lora_A = nn.Parameter(torch.empty(config.r, in_features, **made))
        self.lora_B = nn.Parameter(torch.empty(out_features, config.r, **made))
        self.lora_magnitude_vector = nn.Parameter(torch.empty(out_features, **made)) if config.use_dora else None


class LoRALinear(nn.Linear):
    """A linear layer with a frozen weight [O, C], and an adapter for some of the checkpoint's matrices in it."""

    config: LoRAConfig
    expression: Expression
    """Of the weight, over the checkpoint's names."""
    sizes: dict[str, int]
    """Rows of each of the checkpoint's matrices."""
    lora: nn.ModuleDict
    dropout: nn.Dropout
    active: bool = True
    """False for the frozen weight alone, see `without_adapters`."""
    plain: nn.Linear
    """The layer without adapters and without parameters; `nn.Module` does not see it."""

    @classmethod
    def of(cls, linear: nn.Linear, expression: Expression, names: Sequence[str], config: LoRAConfig) -> "Self":
        """The layer with the parameters of another, and new adapters for the matrices ``names``."""
        layer = cls.__new__(cls)
        layer.__dict__ = {**linear.__dict__, "_parameters": dict(linear._parameters), "_modules": {}}
        plain = type(linear).__new__(type(linear))
        plain.__dict__ = {**linear.__dict__, "_parameters": dict.fromkeys(linear._parameters)}
        layer.__dict__["plain"] = plain
        layer.config, layer.expression = config, expression
        rows = expression.unpack(torch.empty(linear.out_features, device="meta"))
        layer.sizes = {name: len(part) for name, part in rows.items()}
        layer.dropout = nn.Dropout(config.lora_dropout)
        made = {_short(name): Adapter(layer.sizes[name], linear.in_features, config, linear.weight) for name in names}
        layer.lora = nn.ModuleDict(made)
        layer.reset_adapters()
        return layer

    @torch.no_grad()
    def reset_adapters(self) -> None:
        """Draw A anew, set B to 0 and the magnitudes to the norms of the weight's rows: nothing is adapted yet.

        Of sharded adapters the first rank's draws count.
        """
        parts: dict[str, Tensor] = {}
        if self.config.use_dora:
            weight = self.dense_weight()
            norms: Any = _row_norms(weight.to(torch.promote_types(weight.dtype, torch.float32)))
            parts = self.expression.unpack(norms.full_tensor() if is_cut(norms) else norms)
        for name, adapter in self.adapters():
            drawn = torch.empty(adapter.lora_A.shape, dtype=adapter.lora_A.dtype, device=adapter.lora_A.device)
            _fill(adapter.lora_A, nn.init.kaiming_uniform_(drawn, a=5**0.5))
            nn.init.zeros_(adapter.lora_B)
            if adapter.lora_magnitude_vector is not None:
                _fill(adapter.lora_magnitude_vector, parts[name])

    def adapters(self) -> Iterator[tuple[str, Adapter]]:
        """The checkpoint's names of the adapted matrices, in the order in which they stand in `factors`."""
        for name in self.sizes:
            if _short(name) in self.lora:
                adapter: Any = self.lora[_short(name)]
                yield name, adapter

    def dense_weight(self) -> Tensor:
        """The frozen weight [O, C], of NF4 its values."""
        weight: Any = self.weight
        dense: Tensor = weight.get_original_weight() if _is_nf4(weight) else weight
        return dense

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A [R, C] and s · B [O, R] of all adapters together, B zero where a row is not an adapter's: R = r · adapters.

        One small product for all, and its rows are in the packed order like the weight's.
        """
        adapters = dict(self.adapters())
        r, R = self.config.r, self.config.r * len(adapters)
        first = next(iter(adapters.values())).lora_B
        columns = {}
        for name, size in self.sizes.items():
            if name in adapters:
                k = list(adapters).index(name)
                columns[name] = F.pad(adapters[name].lora_B * self.config.scaling, (k * r, R - (k + 1) * r))
            else:
                columns[name] = first.new_zeros(size, R)
        A = torch.cat([adapter.lora_A for adapter in adapters.values()])
        return A.to(dtype), self.expression.pack(columns).to(dtype)

    def scale(self, A: Tensor, B: Tensor) -> Tensor | None:
        """DoRA's factor of each row [O], in fp32; 1 where a row is not adapted. None without DoRA."""
        if not self.config.use_dora:
            return None
        with torch.no_grad():
            W, A, B = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in (self.dense_weight(), A, B))
            # ‖W + B A‖² by rows, without the sum of the two in memory
            cross = ((W @ A.T) * B).sum(1) * 2
            norms = (_row_norms(W).square() + cross + ((B @ (A @ A.T)) * B).sum(1)).clamp_min(0).sqrt()
        parts = self.expression.unpack(norms)
        adapters = dict(self.adapters())
        scales = {}
        for name, norm in parts.items():
            magnitude = adapters[name].lora_magnitude_vector if name in adapters else None
            scales[name] = torch.ones_like(norm) if magnitude is None else magnitude.to(norm.dtype) / norm
        return self.expression.pack(scales)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] -> [..., O]."""
        product = nf4_linear if _is_nf4(self.weight) else F.linear
        if not self.active:
            return product(x, self.weight, self.bias)
        A, B = self.factors(x.dtype)
        scale = self.scale(A, B)
        y = product(x, self.weight, self.bias if scale is None else None)
        low = F.linear(self.dropout(x), A)
        y = torch.addmm(y.flatten(0, -2), low.flatten(0, -2).to(y.dtype), B.T.to(y.dtype)).view_as(y)
        if scale is not None:
            y = y * scale.to(y.dtype)
            y = y if self.bias is None else y + self.bias.to(y.dtype)
        return y

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The weight [O, C] that alone does what the frozen one and the adapters do, in its dtype."""
        weight = self.dense_weight()
        wide = torch.promote_types(weight.dtype, torch.float32)
        A, B = self.factors(wide)
        scale, total = self.scale(A, B), torch.addmm(weight.to(wide), B, A)
        return (total if scale is None else total * scale[:, None]).to(weight.dtype)


class LoRALMHead(LoRALinear, LigerLMHead):
    """`LigerLMHead` with an adapter, which its loss sees: inputs and weight have r more columns, A x and s · B."""

    forward = LigerLMHead.forward  # type: ignore[assignment]

    def cut(self, ranks: Ranks) -> dict[str, int]:
        """Adapters have no parts."""
        raise ValueError("LoRALMHead: the head must not be cut over ranks, got apply_tp. Use FSDP.")

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., C + r] and the weight [V, C + r] whose product are the logits."""
        if not self.active:
            return super().operands(x)
        A, B = self.factors(x.dtype)
        scale = self.scale(A, B)
        weight = torch.cat([self.weight.to(x.dtype), B], 1)
        if scale is not None:
            weight = weight * scale.to(x.dtype)[:, None]
        return torch.cat([x, F.linear(self.dropout(x), A).to(x.dtype)], -1), weight


def apply_lora(model: Model, config: LoRAConfig | None = None) -> Model:
    """Freeze a model and add adapters, in place. Only they get gradients; B starts at 0, so nothing changes yet.

    Adapt first, then shard (`apply_fsdp`) and compile. Adapters are float32 (in fp64 models float64), whatever the
    model is, and are computed with in its dtype. Routers, experts and the embedding have no adapters.

    Args:
        model: the same ``torch.manual_seed`` gives each rank the same adapters. On the meta device within
            ``from_pretrained(folder, shard=lambda model: apply_fsdp(apply_lora(model, config)))``, which then reads
            each rank's part only and draws the adapters itself.
        config: by default rank 8 for all linear layers of the blocks.

    Returns:
        ``model``, which `adapter_config` tells from others.

    Raises:
        ValueError: a name that fits no linear layer, a model with adapters, or one that is sharded or cut already.
    """
    config = config or LoRAConfig()
    check(
        adapter_config(model) is None,
        f"apply_lora: {type(model).__name__} must not have adapters yet, got one that has. Merge them first.",
    )
    check(
        not any(map(is_cut, model.parameters())),
        f"apply_lora: {type(model).__name__} must hold whole weights, got sharded ones. Add the adapters, then shard.",
    )
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    others = {type(each).__name__ for each in linears if type(each) not in (nn.Linear, LigerLMHead)}
    check(
        not others,
        f"apply_lora: linear layers must be nn.Linear, got {', '.join(sorted(others))}. Add "
        "the adapters before layers are replaced.",
    )
    layers = _linears(model)
    chosen = _choose([name for _, expression in layers.values() for name in expression.names()], model, config)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for path, (linear, expression) in layers.items():
        names = [name for name in expression.names() if name in chosen]
        if names:
            kind = LoRALMHead if isinstance(linear, LigerLMHead) else LoRALinear
            _put(model, path, kind.of(linear, expression, names, config))
    return model


def adapter_config(model: nn.Module) -> LoRAConfig | None:
    """With what a model is adapted; None without (or with merged) adapters."""
    return next((layer.config for _, layer in _adapted(model)), None)


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Within it a model computes as if it had no adapters: the reference of a preference loss, without a second model.

    A backward of what is computed in it must be in it, too; mostly there is none (``torch.no_grad()``).

    Raises:
        ValueError: there are no adapters.
    """
    layers = [layer for _, layer in _adapted(model)]
    check(
        bool(layers), f"without_adapters: {type(model).__name__} must have adapters, got none. Call apply_lora first."
    )
    before = [layer.active for layer in layers]
    for layer in layers:
        layer.active = False
    try:
        yield
    finally:
        for layer, active in zip(layers, before, strict=True):
            layer.active = active


def merge_lora(model: Model, *, reversible: bool = False) -> Model:
    """Put the adapters into the weights, in place: a plain model again, as fast, which `save_pretrained` takes.

    The model stays frozen. A tied head that is adapted is untied.

    Args:
        model: with adapters; not sharded.
        reversible: keep the weights as they were in host memory for `unmerge_lora`.

    Raises:
        ValueError: no adapters, or a sharded model.
    """
    layers = _adapted(model)
    check(bool(layers), f"merge_lora: {type(model).__name__} must have adapters, got none. Call apply_lora first.")
    check(
        not any(is_cut(parameter) for parameter in model.parameters()),
        "merge_lora: the model must not be sharded. Save the adapters, and merge them in a process of its own.",
    )
    kept: dict[str, tuple[LoRALinear, Tensor]] = {}
    config = model.config
    for path, layer in layers:
        merged = layer.merged()
        plain = layer.plain
        plain.weight = nn.Parameter(merged, requires_grad=False)
        plain.bias = layer.bias
        if path == "lm_head" and config.tie_word_embeddings:
            model.config = dataclasses.replace(config, tie_word_embeddings=False)
        _put(model, path, plain)
        if reversible:
            kept[path] = layer, layer.weight.detach().cpu()
            layer._parameters["weight"] = None
    model.__dict__["_unmerged"] = (config, kept)
    return model


def unmerge_lora(model: Model) -> Model:
    """Take the adapters out of the weights again, which have every bit as before `merge_lora(reversible=True)`.

    Raises:
        ValueError: nothing to take out.
    """
    config, kept = model.__dict__.pop("_unmerged", (None, {}))
    check(bool(kept), "unmerge_lora: the model must come from merge_lora(model, reversible=True), got another.")
    model.config = config
    for path, (layer, weight) in kept.items():
        plain = model.get_submodule(path)
        assert isinstance(plain, nn.Linear)
        layer.to(plain.weight.device)
        layer.weight = nn.Parameter(weight.to(plain.weight.device), requires_grad=False)
        plain._parameters = dict.fromkeys(plain._parameters)
        _put(model, path, layer)
    model.tie_weights()
    return model


def save_adapter(model: CausalLM, folder: str | os.PathLike[str], *, base: str | None = None) -> None:
    """Write the adapters as PEFT does, adapter_config.json and adapter_model.safetensors; every rank calls it.

    Args:
        model: with adapters, sharded or not.
        folder: made if it does not exist.
        base: name on the hub, or folder, of the model that was adapted; PEFT and vLLM read it.

    Raises:
        ValueError: no adapters.
    """
    config = adapter_config(model)
    check(config is not None, f"save_adapter: {type(model).__name__} must have adapters, got none (or merged ones).")
    assert config is not None
    tensors, names = {}, set()
    for _, layer in _adapted(model):
        for name, adapter in layer.adapters():
            names.add(name.removesuffix(".weight"))
            for theirs, parameter in _files_names(name, adapter).items():
                whole: Any = parameter.detach()
                whole = whole.full_tensor() if is_cut(whole) else whole
                tensors[theirs] = whole.cpu().contiguous()
    targets: Sequence[str] | str = config.target_modules
    if targets == "all-linear" and not isinstance(model, VisionLanguageModel):
        targets = sorted(set(map(_short, names)))
    elif isinstance(targets, str) or isinstance(model, VisionLanguageModel):
        # What is adapted, and not what else PEFT would find: in a tower names end alike in layers and others ("proj").
        targets = sorted(names)
    keys: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        **{field.name: getattr(config, field.name) for field in dataclasses.fields(config)},
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    place = Path(folder)
    with agreeing():
        if this_rank() == 0:
            place.mkdir(parents=True, exist_ok=True)
            for name in (WEIGHTS, CONFIG):
                temporary = place / f".{name}.tmp"
                if name == WEIGHTS:
                    save_file(tensors, temporary, metadata={"format": "pt"})
                else:
                    temporary.write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")
                temporary.replace(place / name)


def load_adapter(model: Model, folder: str | os.PathLike[str]) -> Model:
    """Add the adapters of a folder that PEFT or `save_adapter` wrote, in place, to go on training or to merge them.

    Args:
        model: as `apply_lora`.
        folder: holds adapter_config.json and adapter_model.safetensors.

    Raises:
        FileNotFoundError: one of the two is missing.
        ValueError: another kind of adapter, or adapters of another model; ``model`` is then as it was.
    """
    place = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (place / name).is_file():
            raise FileNotFoundError(f"{place}: must hold {name}, got no such file. Give the folder of PEFT adapters.")
    keys = read_json(place / CONFIG)
    check(
        keys.get("peft_type") == "LORA" and keys.get("bias", "none") == "none",
        f"{place / CONFIG}: peft_type must be LORA and bias none, got {keys.get('peft_type')!r} and "
        f"{keys.get('bias')!r}. Other adapters are not implemented.",
    )
    for name in REFUSED:
        check(not keys.get(name), f"{place / CONFIG}: {name} must be empty, got {keys.get(name)!r}. Merge it by PEFT.")
    initial, targets = keys.get("init_lora_weights"), keys.get("target_modules")
    check(
        initial in INITIAL,
        f"{place / CONFIG}: init_lora_weights must be one of {INITIAL}, which leave the base as it is, got "
        f"{initial!r}. Convert it by PEFT: save_pretrained(..., path_initial_model_for_weight_conversion=...).",
    )
    check(
        isinstance(targets, str | list),
        f"{place / CONFIG}: target_modules must be a list of names or a text, got {targets!r}. Write what is adapted.",
    )
    with open_safetensors(place / WEIGHTS) as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if isinstance(targets, list):
        # PEFT wants one of the names to fit: lists that are written for many models have names that some lack.
        modules = [name.removesuffix(".weight") for _, entry in _linears(model).values() for name in entry.names()]
        modules += [name.partition(".lora_")[0] for name in stored]
        keys["target_modules"] = [each for each in targets if any(_fits(name, each) for name in modules)] or targets
    known = {field.name for field in dataclasses.fields(LoRAConfig)}
    config = LoRAConfig(**{name: value for name, value in keys.items() if name in known})
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    apply_lora(model, config)
    try:
        _fill_adapters(model, stored, place / WEIGHTS)
    except ValueError:  # the model as it was, for the adapters that were meant
        for path, layer in _adapted(model):
            layer.plain._parameters = layer._parameters
            _put(model, path, layer.plain)
        for parameter in learning:
            parameter.requires_grad_(True)
        raise
    return model


def _fill_adapters(model: CausalLM, stored: dict[str, Tensor], file: Path) -> None:
    """Copy a file's tensors into the adapters, which must be the same ones."""
    head = stored.pop(f"{PREFIX}lm_head.base_layer.weight", None)  # PEFT writes it along with the head's adapter
    check(
        head is None or torch.equal(head.to(model.lm_head.weight), model.lm_head.weight),
        f"{file}: the head's weight must be the model's own, got another. Load the model that was adapted.",
    )
    wanted = {
        theirs: parameter
        for _, layer in _adapted(model)
        for name, adapter in layer.adapters()
        for theirs, parameter in _files_names(name, adapter).items()
    }
    odd = sorted(wanted.keys() ^ stored.keys())
    check(
        not odd,
        f"{file}: must hold exactly the adapters that {CONFIG} describes for {type(model).__name__}, got "
        f"{len(odd)} too many or too few: {', '.join(odd[:3])}. Load them into the model that they were made for.",
    )
    for name, parameter in wanted.items():
        check(
            stored[name].shape == parameter.shape,
            f"{file}: {name} must be {list(parameter.shape)}, got {list(stored[name].shape)}. Load it into "
            "the model that it was made for.",
        )
        parameter.data.copy_(stored[name])


def quantize_base(model: Model) -> Model:
    """Keep the frozen weights of adapted layers of the blocks in 4 bits (NF4, as in QLoRA), in place; needs torchao.

    About 4.1 bits per weight: blocks of 64 share a scale, the scales are 8 bits. The head stays as it is.

    Args:
        model: with adapters, on the device that it will train on.

    Raises:
        ImportError: torchao is not installed.
        ValueError: no adapters, or a weight that is not made of whole blocks.

    Source: https://arxiv.org/abs/2305.14314.
    """
    try:
        from torchao.quantization import to_nf4
    except ImportError as error:
        raise ImportError(
            "quantize_base: torchao must be installed, got none. Run: pip install 'liger_models[lora]'"
        ) from error
    layers = [layer for _, layer in _adapted(model) if not isinstance(layer, LoRALMHead)]
    check(bool(layers), f"quantize_base: {type(model).__name__} must have adapters, got none. Call apply_lora first.")
    for layer in layers:
        check(not _is_nf4(layer.weight), "quantize_base: weights must not be in 4 bits yet, got some. Call it once.")
        size = layer.weight.numel()
        check(
            size % NF4_BLOCK == 0,
            f"quantize_base: weights must have a multiple of {NF4_BLOCK} elements, got {list(layer.weight.shape)}.",
        )
        values = to_nf4(layer.weight.detach(), NF4_BLOCK, math.gcd(size // NF4_BLOCK, 256))
        layer.weight = nn.Parameter(values, requires_grad=False)
    return model


def _fill(parameter: Tensor, values: Tensor) -> None:
    if is_cut(parameter):
        from torch.distributed.tensor import distribute_tensor

        sharded: Any = parameter
        values = distribute_tensor(values.to(parameter.dtype), sharded.device_mesh, sharded.placements)
    parameter.copy_(values)


def _is_nf4(weight: Any) -> bool:
    return hasattr(weight, "get_original_weight")


def _row_norms(weight: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(weight, dim=1)
    return norms


def _short(name: str) -> str:
    """q_proj of model.layers.0.self_attn.q_proj.weight."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _files_names(name: str, adapter: Adapter) -> dict[str, nn.Parameter]:
    stem = PREFIX + name.removesuffix(".weight")
    named = {f"{stem}.lora_A.weight": adapter.lora_A, f"{stem}.lora_B.weight": adapter.lora_B}
    if adapter.lora_magnitude_vector is not None:
        named[f"{stem}.lora_magnitude_vector"] = adapter.lora_magnitude_vector
    return named


def _adapted(model: nn.Module) -> list[tuple[str, LoRALinear]]:
    return [(path, layer) for path, layer in model.named_modules() if isinstance(layer, LoRALinear)]


def _put(model: nn.Module, path: str, layer: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, layer)


def _entries(model: CausalLM) -> dict[str, Expression]:
    """Of the weight map whose names PEFT's files have."""
    return get_module_map(model_type_of(type(model)))(model.config).entries


def _linears(model: CausalLM) -> dict[str, tuple[nn.Linear, Expression]]:
    """The linear layers that can be adapted, by their path, with the weight map's entry."""
    entries = _entries(model)
    routers = {id(module.gate) for module in model.modules() if isinstance(module, LigerMoE)}
    found = {
        path: (layer, entries.get(f"{path}.weight", Name(f"{path}.weight")))  # a tied head has no entry
        for path, layer in model.named_modules()
        if type(layer) in (nn.Linear, LigerLMHead) and id(layer) not in routers
    }
    return {path: pair for path, pair in found.items() if _of_rows(*pair)}


def _of_rows(linear: nn.Linear, expression: Expression) -> bool:
    """Whether a weight is made of whole rows of the checkpoint's; that of a patch embedding is a convolution there."""
    try:
        return all(part.dim() == 1 for part in expression.unpack(linear.weight.new_empty(len(linear.weight))).values())
    except (EinopsError, IndexError):
        return False


def _fits(module: str, target: str) -> bool:
    return module == target or module.endswith("." + target)


def _choose(names: list[str], model: CausalLM, config: LoRAConfig) -> set[str]:
    modules = {name.removesuffix(".weight"): name for name in names}
    targets = config.target_modules
    if targets == "all-linear":
        return {name for module, name in modules.items() if module != "lm_head"}
    short = sorted(set(map(_short, names)))
    entries = _entries(model)
    others = {_short(name) for expression in entries.values() for name in expression.names()} - set(short)
    chosen: set[str] = set()
    check(len(targets) > 0, f"apply_lora: target_modules must name linear layers ({', '.join(short)}), got none.")
    for target in [targets] if isinstance(targets, str) else targets:
        if isinstance(targets, str):
            try:
                found = {name for module, name in modules.items() if re.fullmatch(target, module)}
            except re.error as error:
                message = (
                    f"apply_lora: target_modules must be a regular expression, got {target!r}: {error}. Correct it."
                )
                raise ValueError(message) from error
        else:
            found = {name for module, name in modules.items() if _fits(module, target)}
        near = difflib.get_close_matches(target, short, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        if isinstance(targets, str):
            hint = f" A text is a regular expression of a whole name; ends of names go into a list: [{target!r}]."
        if target.rpartition(".")[2] in others:
            hint = " Experts, routers, norms and the embedding have no adapters."
        check(
            bool(found),
            f"apply_lora: target_modules must name linear layers of {type(model).__name__} ({', '.join(short)}), "
            f"got {target!r}.{hint}",
        )
        chosen |= found
    return chosen
