"""`liger-models verify --packing`: checks that documents in one packed row do not depend on each other."""

import copy
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_models.arch.auto import get_arch, list_model_types, load_by_name
from liger_models.base.causal_lm import CausalLM
from liger_models.cli.compare import LIMIT, random_text, relative_error
from liger_models.generation.deterministic import deterministic_forward, refusal
from liger_models.layers.layer import named_layers

LENGTHS = (65, 1, 64, 2, 130, 63)
"""Lengths of the documents in tokens.

Most lengths are close to multiples of the sizes of kernel tiles and of chunks in linear attention. Short documents
follow long ones, so that a leak from a long document to a short one would show.
"""

HALF_LIMIT = 5e-2
"""Largest accepted relative difference of bfloat16 gradients. The gradients of a packed row are summed in another order
than the gradients of single documents.
"""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
WIDTHS = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size", "intermediate_size_mlp", "num_attention_heads", "num_key_value_heads",
    "num_global_key_value_heads", "linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads",
    "mamba_d_ssm", "num_heads", "out_hidden_size", "n_groups",
)  # fmt: skip
"""Fields of a language model's config that `_narrow` divides."""
LARGEST = {"sliding_window": 48, "attention_chunk_size": 48, "vocab_size": 1024, "vocab_size_per_layer_input": 1024}
"""Maps fields to their largest values in a reduced model. Windows must be shorter than documents to have an effect."""
FITTING: dict[str, dict[str, Any]] = {"glm4v": {"partial_rotary_factor": 0.5}, "glm4v_moe": {"head_dim": 128}}
"""Values from released checkpoints, for families whose default sizes are inconsistent (also in transformers)."""


class Check(NamedTuple):
    """The result of one check.

    Attributes:
        text: what was compared, and the differences.
        passed: whether the differences are within the limits.
    """

    text: str
    passed: bool

    def __str__(self) -> str:
        return f"{'same' if self.passed else 'DIFFERS'}: {self.text}"


def empty_default(model_type: str) -> CausalLM:
    """Return the model with the default sizes of a family, on the meta device."""
    model_class = get_arch(model_type)
    with torch.device("meta"):
        return model_class(default_config(model_class.config_class, FITTING.get(model_type, {})))


def model_to_pack(name: str, empty: CausalLM, device: str, *, progress: bool) -> tuple[CausalLM, str]:
    """Load the model that is to be checked, or build a smaller one.

    A checkpoint is loaded if its weights and their gradients fit into the free memory of the device. The model is
    bfloat16 if it is on an accelerator and `deterministic_forward` supports it; otherwise, it is float32.

    Args:
        name: a folder, a name on the hub, or a model type, for which a smaller model is built.
        empty: the model on the meta device.
        device: the device.
        progress: whether loading shows a progress bar.

    Returns:
        The model, and the reason why it is a smaller model with random weights; "" if it has the weights of ``name``.
    """
    dtype = torch.float32 if device == "cpu" or refusal(empty) else torch.bfloat16
    needed, free = int(2.2 * empty.num_parameters() * dtype.itemsize), free_memory(device)
    if Path(name).exists() and not any(Path(name).glob("*.safetensors")):
        reason = f"{name} has no safetensors"
    elif not Path(name).exists() and name in list_model_types():
        reason = f"{name} is a model type"
    elif free is not None and needed > free:
        reason = f"the whole model needs {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free on {device}"
    else:
        return load_by_name(name, dtype=dtype, device=device, progress=progress), ""
    return reduced(type(empty), empty.config, dtype, device), reason


def free_memory(device: str) -> int | None:
    """Return the number of free bytes of a device, or None if it is unknown."""
    if device != "cpu":
        ask = getattr(torch.get_device_module(device), "mem_get_info", None)
        return None if ask is None else int(ask(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        names = getattr(os, "sysconf_names", {})
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 if "SC_PHYS_PAGES" in names else None


def default_config(config_class: Any, values: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return a family's config with default values, even if the defaults of its vision tower are inconsistent.

    Inconsistent tower sizes do no harm, because the tower does not run. ``values`` replace some of the defaults.

    Raises:
        ValueError: a field has no default, which only happens in custom architectures.
    """
    config = object.__new__(config_class)
    for field in dataclasses.fields(config_class):
        value = field.default
        if field.default_factory is not dataclasses.MISSING:
            nested = dataclasses.is_dataclass(field.default_factory)
            value = default_config(field.default_factory) if nested else field.default_factory()
        if value is dataclasses.MISSING:
            raise ValueError(
                f"verify: {config_class.__name__}.{field.name} must have a default, got none. Give a folder with "
                "config.json instead of the model type."
            )
        object.__setattr__(config, field.name, values.get(field.name, value))
    with suppress(ValueError):  # the checks of the language model come first and pass
        config.__post_init__()
    return config


def reduced(model_class: type[CausalLM], config: Any, dtype: torch.dtype, device: str) -> CausalLM:
    """Build a smaller model that has random weights and each kind of block that the whole model has.

    The smaller model has only as many blocks as are needed to include every kind. Its layers are narrower, it has fewer
    experts, a smaller vocabulary and shorter windows, and its vision tower has no weights.
    """
    for divisor in (16, 8, 4, 2):
        try:
            model = _build(model_class, _narrow(config, divisor), dtype, device)
            with torch.no_grad():
                model(torch.zeros(1, 4, dtype=torch.int64, device=device))
        except (AssertionError, RuntimeError, ValueError):  # the narrow layers do not fit together
            continue
        return model
    return _build(model_class, _narrow(config, 1), dtype, device)


def _build(model_class: type[CausalLM], config: Any, dtype: torch.dtype, device: str) -> CausalLM:
    with torch.device("meta"):
        model = model_class(config).to(dtype)
    kinds = [_kind(block) for block in model.layers]
    del model.layers[max(map(kinds.index, set(kinds))) + 1 :]
    # The tower stays on the meta device.
    tower, model.visual = model.visual, None
    model.to_empty(device=device)
    torch.manual_seed(0)
    model.reset_parameters()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Matrices are drawn so that activations keep their size. Norms and biases are moved away from their initial
            # values.
            noise = torch.randn_like(parameter)
            parameter.copy_(noise / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else parameter + 0.1 * noise)
            if name.endswith("A_log"):  # with the initial decay, states would vanish within a few tokens
                parameter.sub_(4)
    model.visual = tower
    return model


def _narrow(config: Any, divisor: int) -> Any:
    """Return a copy of a config with smaller sizes.

    The constructor's checks do not run, so a tower's sizes may be inconsistent.
    """
    sizes, changes = vars(config), {}
    for name in WIDTHS:
        if isinstance(sizes.get(name), int):
            changes[name] = max(sizes[name] // divisor, 1)
    for name, largest in LARGEST.items():
        if sizes.get(name):
            changes[name] = min(sizes[name], largest)

    # Keep at most about twice as many experts as a token uses. All groups of experts have the same size.
    chosen = sizes.get("num_experts_per_tok") or sizes.get("top_k_experts") or 8
    groups = sizes.get("n_group") or 1
    for name in EXPERTS:
        if sizes.get(name):
            changes[name] = min(sizes[name], -(-2 * chosen // groups) * groups)

    narrow = copy.copy(config)
    for name, value in changes.items():
        object.__setattr__(narrow, name, value)
    if (sizes.get("pad_token_id") or 0) >= changes["vocab_size"]:
        object.__setattr__(narrow, "pad_token_id", None)
    return narrow


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """Describe the layers of a block. Blocks that treat documents in the same way have equal descriptions."""
    kinds = []
    for path, layer in named_layers(block):
        spec = layer.attention
        attention = spec and (spec.window, spec.chunk, spec.rotary is None, spec.cache_slot is None)
        kinds.append((path, type(layer).__name__, attention))
    return tuple(kinds)


def check_packing(model: CausalLM, lengths: tuple[int, ...] = LENGTHS) -> Iterator[Check]:
    """Compare documents in a packed row with the same documents alone.

    Each document must have the same logits, and the same gradients of its embeddings, in the packed row and alone. The
    gradients of a document's logits with respect to the embeddings of all other documents must be exactly 0, so a leak
    is found even if it is smaller than rounding errors. The loss of the packed row must equal the sum of the documents'
    losses, and the parameters' gradients must equal the sums of the gradients from the single documents. Within
    `deterministic_forward`, logits must be bitwise identical.

    Args:
        model: the model. The gradients of its parameters are overwritten.
        lengths: the number of tokens in each document.

    Yields:
        `Check`, one for each document, one for the loss and one for the parameters.
    """
    model.eval()
    model.zero_grad()
    device, n = model.device, len(lengths)
    half = model.dtype != torch.float32
    limit = HALF_LIMIT if half else LIMIT
    exact = half and refusal(model) is None
    context = deterministic_forward(model) if exact else nullcontext()
    ids = random_text(model.config, 1, sum(lengths)).to(device)
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0)
    spans = [slice(start, end) for start, end in pairwise(bounds.tolist())]

    with context, _embeddings(model) as embeds:
        # Run the packed row. Each document has a separate backward, so that gradients show which documents it read.
        logits = model(ids, cu_seqlens=bounds).logits
        assert logits is not None
        torch.manual_seed(1)
        upstream = torch.randn(logits.shape, dtype=torch.float32, device="cpu").to(device)
        (packed,) = embeds
        own, read = [], []
        for j, span in enumerate(spans):
            (logits[:, span].float() * upstream[:, span]).sum().backward(retain_graph=j < n - 1)
            own.append(packed.grad[:, span])
            read.append([k + 1 for k, other in enumerate(spans) if k != j and bool(packed.grad[:, other].any())])
            packed.grad = None
        norms = {name: p.grad.norm() for name, p in model.named_parameters() if p.grad is not None}

        # Run each document alone. Its gradients are subtracted from the gradients of the packed row.
        for j, span in enumerate(spans):
            embeds.clear()
            alone = model(ids[:, span]).logits
            assert alone is not None
            (alone.float() * upstream[:, span]).sum().neg().backward()
            yield _compare(j + 1, logits[:, span], alone, (own[j], -embeds[0].grad), read[j], limit, exact)

        yield _loss(model, ids, bounds, spans, limit)
    yield _parameters(model, norms, limit)


@contextmanager
def _embeddings(model: CausalLM) -> Iterator[list[Any]]:
    """Context manager that yields a list. Each forward appends the embeddings of its tokens to this list."""
    embeds: list[Tensor] = []

    def keep(_: Any, args: Any, out: Tensor) -> None:
        if torch.is_grad_enabled():
            out.requires_grad_().retain_grad()
            embeds.append(out)

    handle = model.embed_tokens.register_forward_hook(keep)
    try:
        yield embeds
    finally:
        handle.remove()


def _compare(
    number: int,
    packed: Tensor,
    alone: Tensor,
    gradients: tuple[Tensor, Tensor],
    read: list[int],
    limit: float,
    exact: bool,
) -> Check:
    """Compare the logits [1, T, V] and gradients [1, T, C] of a document in the packed row and alone."""
    logits_error, error = relative_error(packed, alone), relative_error(*gradients)
    same = torch.equal(packed, alone) if exact else logits_error <= limit
    words = "bit for bit" if exact and same else f"{logits_error:.1e}"
    T = packed.shape[1]
    text = f"document {number}, {T} token{'s' * (T > 1)}: logits {words}, gradients {error:.1e}, "
    numbers = ", ".join(map(str, read))
    text += f"it reads document{'s' * (len(read) > 1)} {numbers}" if read else "it reads no other document"
    return Check(text, same and error <= limit and not read)


def _loss(model: CausalLM, ids: Tensor, bounds: Tensor, spans: list[slice], limit: float) -> Check:
    """Compare the loss of the packed row with the sum of its documents' losses.

    Neither loss includes the load-balancing loss.
    """

    def summed(tokens: Tensor, **options: Any) -> Tensor:
        out = model(tokens, labels=tokens, num_items_in_batch=1, **options)
        loss: Tensor = out.loss
        return loss if out.aux_loss is None else loss - out.aux_loss

    with torch.no_grad():
        packed = summed(ids, cu_seqlens=bounds)
        documents = [summed(ids[:, span]) for span in spans if span.stop - span.start > 1]
    error = relative_error(packed, torch.stack(documents).sum())
    return Check(f"loss: {error:.1e} from the sum over the documents", error <= limit)


def _parameters(model: CausalLM, norms: dict[str, Tensor], limit: float) -> Check:
    """Compare the gradients of the parameters with the sums of the gradients from the single documents.

    The attribute ``grad`` of each parameter holds the difference: the gradient from the packed row minus this sum.
    ``norms`` are the norms of the gradients from the packed row.
    """
    total = math.sqrt(sum(float(norm) ** 2 for norm in norms.values()))
    elements = sum(model.get_parameter(name).numel() for name in norms)
    worst, place = 0.0, ""
    for name, norm in norms.items():
        parameter = model.get_parameter(name)
        assert parameter.grad is not None
        # Divide the difference by the gradient's norm or, if this norm is nearly 0, by a thousandth of the average norm
        # of gradients of this size.
        least = 1e-3 * total * math.sqrt(parameter.numel() / elements)
        error = float(parameter.grad.float().norm()) / max(float(norm), least, 1e-30)
        if not error <= worst:  # NaN counts as the largest error
            worst, place = error if error == error else math.inf, f", at most for {name}"
    text = f"gradients of {len(norms)} parameters: {worst:.1e} from the sum over the documents{place}"
    return Check(text, worst <= limit)
