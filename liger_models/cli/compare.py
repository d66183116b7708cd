"""Comparison with transformers' model for the same checkpoint: tensors, logits, and the first part that differs.

`liger-models verify`, `liger-models new-arch` and the tests of the architectures use this comparison.
"""

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_models.arch.auto import AutoLigerModel, get_arch
from liger_models.base.causal_lm import CausalLM
from liger_models.base.vision_language import placeholder_ids
from liger_models.convert.config_map import blaming, read_config
from liger_models.convert.files import CONFIG, read_headers, read_json_config, read_model_type, read_quantization
from liger_models.convert.format import format_of
from liger_models.convert.load import of_whole_model, pick_map
from liger_models.layers.norm import add_norm
from liger_models.retrieval.settings import has_settings

LIMIT = 1e-4
"""Largest accepted relative difference of logits in fp32. Due to rounding, equal models differ by about 1e-6."""

PART_LIMIT = 1e-5
"""Largest accepted relative difference of the output of a single part, such as a norm, in fp32."""


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Return the norm of ``ours − theirs``, divided by the norm of ``theirs``."""
    # Compute the difference in float64, so that rounding of the difference itself does not matter.
    theirs = theirs.detach().double().cpu()
    difference = ours.detach().double().cpu() - theirs
    return float(difference.norm() / theirs.norm().clamp_min(1e-30))


KINDS = ("missing", "extra", "shapes")


class TensorDifference(NamedTuple):
    """A difference between a model's tensors and a checkpoint's tensors.

    Attributes:
        kind: "missing" if the checkpoint lacks the tensor, "extra" if the model lacks it, "shapes" if the shapes
            differ.
        name: name of the tensor in the checkpoint.
        shape: shape in the checkpoint or, for a missing tensor, in the model.
        expected: shape in the model, if the shapes differ.
    """

    kind: str
    name: str
    shape: list[int]
    expected: list[int] | None = None

    def __str__(self) -> str:
        if self.expected is None:
            return f"{self.kind} {self.name} {self.shape}"
        return f"wrong shape {self.name} {self.shape}, expected {self.expected}"


def tensor_differences(expected: Mapping[str, Any], stored: Mapping[str, Any]) -> list[TensorDifference]:
    """List the differences between the tensors that a model expects and the tensors of a checkpoint.

    Args:
        expected, stored: mappings from names to tensors, to other objects with a ``shape``, or to shapes.
    """
    # Missing tensors are listed in the order of the model. Extra tensors are sorted by name, because files have no
    # order.
    ours, theirs = ({name: _shape(tensor) for name, tensor in tensors.items()} for tensors in (expected, stored))
    missing = [TensorDifference("missing", name, shape) for name, shape in ours.items() if name not in theirs]
    extra = [TensorDifference("extra", name, theirs[name]) for name in sorted(theirs.keys() - ours.keys())]
    reshaped = [
        TensorDifference("shapes", name, theirs[name], shape)
        for name, shape in ours.items()
        if theirs.get(name, shape) != shape
    ]
    return missing + extra + reshaped


def _shape(tensor: Any) -> list[int]:
    return list(getattr(tensor, "shape", tensor))


@dataclass
class Trace:
    """The intermediate and final results of a transformers model for a batch.

    Attributes:
        blocks: for each block, maps the name of each child module, and `BLOCK` for the block itself, to (input,
            output), each [B, T, C].
        head_input: the normalized output of the last block, [B, T, C].
        logits: [B, T, V].
    """

    blocks: list[dict[str, tuple[Tensor, Tensor]]]
    head_input: Tensor
    logits: Tensor


BLOCK = ""
"""Key in `Trace.blocks` that stands for a block itself, not for one of its child modules."""


def trace(theirs: Any, **inputs: Any) -> Trace:
    """Run a transformers model, and record the inputs and outputs of its blocks and their child modules.

    Args:
        theirs: a causal language model, or a vision-language model.
        inputs: arguments of the model's forward.
    """
    decoder = theirs.get_decoder()  # for a model with images, the result may be a language model with a head
    blocks = getattr(getattr(decoder, "model", decoder), "layers", [])
    recorded = Trace([{} for _ in blocks], torch.empty(0, device="cpu"), torch.empty(0, device="cpu"))

    def record(parts: dict[str, tuple[Tensor, Tensor]], name: str, _: Any, args: Any, options: Any, out: Any) -> None:
        # Attention layers get `hidden_states` as a keyword argument, and also return attention weights. Mixtures of
        # experts also return router logits.
        x = args[0] if args else options.get("hidden_states", options.get("x"))
        y = out[0] if isinstance(out, tuple) else out
        if isinstance(x, Tensor) and isinstance(y, Tensor) and name not in parts:
            # If there are several streams [n, B, T, C], the first one is the residual stream.
            parts[name] = (x[0], y[0]) if name == BLOCK and x.dim() == y.dim() == 4 else (x, y)

    def record_head(_: Any, args: tuple[Any, ...]) -> None:
        recorded.head_input = args[0]

    # For one forward, set hooks on all blocks, their child modules and the head.
    with ExitStack() as hooks, torch.no_grad():
        for parts, block in zip(recorded.blocks, blocks, strict=True):
            for name, module in [(BLOCK, block), *block.named_children()]:
                handle = module.register_forward_hook(partial(record, parts, name), with_kwargs=True)
                hooks.callback(handle.remove)
        hooks.callback(theirs.get_output_embeddings().register_forward_pre_hook(record_head).remove)
        recorded.logits = theirs(**inputs).logits
    return recorded


@dataclass
class _Parts:
    """Collects the relative errors of a model's parts (such as norms, attention and MLPs) in the order of execution."""

    errors: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, path: str, part: str, ours: Tensor, theirs: Tensor) -> None:
        """Record the error of a part. If a part runs twice, only the first run counts."""
        # If the outputs differ in size, as for packed projections, the part has no counterpart in transformers.
        if ours.numel() == theirs.numel():
            self.errors.setdefault(path, {}).setdefault(part, relative_error(ours, theirs.view_as(ours)))


def part_errors(ours: CausalLM, recorded: Trace, **inputs: Any) -> dict[str, dict[str, float]]:
    """Compute the relative error of each part of a model.

    Each part gets the input that the same part has in transformers. An error in one block, norm, attention or MLP
    therefore causes no error in the parts that follow.

    Args:
        ours: the model.
        recorded: the results of transformers' model with the same weights for the same batch.
        inputs: the batch.

    Returns:
        A mapping from paths, such as ``"layers.0"``, to mappings from names of parts to errors, in the order in which
        the parts run. The part ``"output"`` of a block is the residual stream after the block.
    """
    # If the numbers of blocks differ, there is nothing to compare.
    parts = _Parts()
    if len(recorded.blocks) != len(ours.layers):
        return {}

    def replace_head_input(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        parts.add("norm", "output", args[0], recorded.head_input)
        return (recorded.head_input, *args[1:])

    # Run one forward in which each part gets transformers' input.
    with ExitStack() as changes, torch.no_grad():
        for index, (block, theirs) in enumerate(zip(ours.layers, recorded.blocks, strict=True)):
            if theirs:  # a block that attends to images does not run without images
                changes.enter_context(_corrected_block(block, index, theirs, parts))
        changes.callback(ours.lm_head.register_forward_pre_hook(replace_head_input).remove)
        logits = ours(**inputs).logits
    assert logits is not None
    parts.add("lm_head", "output", logits, recorded.logits)
    return parts.errors


@contextmanager
def _corrected_block(
    block: nn.Module, index: int, theirs: Mapping[str, tuple[Tensor, Tensor]], parts: _Parts
) -> Iterator[None]:
    """Context manager that replaces the inputs and outputs of a block and its child modules with the values in
    transformers.

    The error of an output is recorded before the output is replaced.
    """
    path = f"layers.{index}"
    stream, end = theirs[BLOCK]

    # A block takes and returns (output of the last branch, stream). If the output is None, nothing is added to the
    # stream.
    def replace_input(block: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        _, residual, *rest = args
        if index == 0:
            parts.add("embed_tokens", "output", residual, stream)
        return (None, stream.view_as(residual), *rest)

    def replace_output(_: Any, args: Any, out: tuple[Any, ...]) -> tuple[Any, ...]:
        x, residual, *rest = out  # [B, T, C] twice, and a mixture's router logits
        total = residual if x is None else residual + x
        parts.add(path, "output", total, end)
        return (None, end.view_as(total), *rest)

    def replace_norm(name: str, _: Any, args: Any, y: Any) -> Any:
        if not isinstance(y, Tensor):
            return y
        parts.add(path, name, y, theirs[name][1])
        return theirs[name][1].view_as(y)

    # All changes are undone at the end, even after an error.
    with ExitStack() as changes:
        changes.callback(block.register_forward_pre_hook(replace_input).remove)
        changes.callback(block.register_forward_hook(replace_output).remove)
        names = {id(child): name for name, child in block.named_children()}
        for name, child in block.named_children():
            if name not in theirs:
                continue
            if hasattr(child, "add_norm"):
                # Blocks run a branch through this method. An attribute of the instance hides the method of the class.
                branch: Any = child
                branch.add_norm = _corrected_branch(branch.add_norm, path, name, names, theirs[name], parts)
                changes.callback(delattr, branch, "add_norm")
            else:
                changes.callback(child.register_forward_hook(partial(replace_norm, name)).remove)
        yield


def _corrected_branch(
    branch: Callable[..., Any],
    path: str,
    name: str,
    names: Mapping[int, str],
    theirs: tuple[Tensor, Tensor],
    parts: _Parts,
) -> Callable[..., Any]:
    """Return a function that runs a norm and the branch after it, records the errors of both, and returns the output
    of the branch in transformers."""
    branch_input, branch_output = theirs

    def add_norm_and_run(norm: nn.Module | None, x: Tensor | None, residual: Tensor, *options: Any) -> Any:
        # The norm gets our stream, which is a sum of transformers' outputs. The branch gets transformers' input.
        normed, residual = add_norm(norm, x, residual)
        parts.add(path, names.get(id(norm), f"input of {name}"), normed, branch_input)
        y, _, *rest = branch(None, None, branch_input.view_as(normed), *options)
        parts.add(path, name, y, branch_output)
        return (branch_output.view_as(y), residual, *rest)

    return add_norm_and_run


def first_difference(errors: Mapping[str, Mapping[str, float]], limit: float = PART_LIMIT) -> str:
    """Describe the first module that has an error above ``limit``: its path and the errors of its parts. If no error is
    above ``limit``, the result is "".

    An example of a result is ``layers.0: input_layernorm 2.1e-08, self_attn 3.4e-01, ... (2 of 4 places differ)``.
    """
    # This is not written as `error > limit`, because NaN must also count as wrong.
    wrong = [path for path, parts in errors.items() if not all(error <= limit for error in parts.values())]
    if not wrong:
        return ""
    parts = ", ".join(f"{part} {error:.1e}" for part, error in errors[wrong[0]].items())
    return f"{wrong[0]}: {parts} ({len(wrong)} of {len(errors)} places differ)"


def where_it_differs(ours: CausalLM, theirs: Any, only_theirs: Mapping[str, Any] | None = None, **inputs: Any) -> str:
    """Describe where a model and transformers' model with the same weights first differ; see `first_difference`.

    Args:
        ours, theirs: the models.
        only_theirs: inputs for transformers' model alone.
        inputs: the batch.
    """
    recorded = trace(theirs, **inputs, **(only_theirs or {}))
    errors = part_errors(ours, recorded, **inputs)
    return first_difference(errors) or f"each part is right when it takes transformers' input: {errors}"


@dataclass
class Verification:
    """The result of `verify_checkpoint`.

    Attributes:
        tensors: number of tensors in the files.
        differences: the result of `tensor_differences`.
        logits_error: relative difference between our logits and transformers' logits; None if they were not compared.
        not_compared: the reason why logits were not compared; "" if they were compared.
        place: the result of `first_difference` if the logits differ.
    """

    tensors: int
    differences: list[TensorDifference]
    logits_error: float | None = None
    not_compared: str = ""
    place: str = ""

    @property
    def same(self) -> bool:
        """Whether tensors and logits are the same."""
        return not self.differences and (self.logits_error is None or self.logits_error <= LIMIT)

    def as_json(self) -> dict[str, Any]:
        """Return the result for scripts, with tensor names grouped by kind of difference. NaN becomes a string."""
        error = self.logits_error
        return {
            "tensors": self.tensors,
            **{kind: [difference.name for difference in self.differences if difference.kind == kind] for kind in KINDS},
            "logits_error": error if error is None or math.isfinite(error) else str(error),
            "place": self.place,
            "same": self.same,
        }


def verify_checkpoint(folder: Path, *, length: int, device: str, progress: bool) -> Verification:
    """Compare the tensors of a checkpoint with its config.json, and its logits with transformers' logits.

    Args:
        folder: the checkpoint.
        length: number of tokens in each of the two random rows.
        device: device on which the models run, one after the other.
        progress: whether loading shows a progress bar.
    """
    name = read_model_type(read_json_config(folder))
    empty = empty_model(folder)

    # Compare the tensors, reading only the headers of the files.
    parameters, maps = dict(empty.named_parameters()), format_of(type(empty)).file_maps(empty.config)
    stored = of_whole_model(read_headers(folder), maps)
    weights = pick_map(maps, stored, parameters)
    expected = weights.shapes(parameters)
    # An embedding model may have been saved without its head.
    head = {name for name in expected if name.endswith("lm_head.weight")}
    headless = has_settings(folder) and not head & stored.keys() and bool(head)
    if headless:
        expected = {name: tensor for name, tensor in expected.items() if name not in head}
    read = {
        tensor: header for tensor, header in stored.items() if tensor in expected or not weights.passes_over(tensor)
    }
    result = Verification(len(stored), tensor_differences(expected, read))

    if headless:
        result.not_compared = "the checkpoint has no language-model head"
        return result

    # transformers may not be installed, or may be older than the model.
    try:
        transformers: Any = importlib.import_module("transformers")
        result.not_compared = unknown_to(transformers, name, read_quantization(folder))
    except ImportError:
        result.not_compared = "transformers is not installed"
    if result.differences or result.not_compared:
        return result

    # Run one model after the other, so that the device holds only one. Our model is loaded again only if the logits
    # differ, to find the first part that differs.
    ids = random_text(empty.config, 2, length).to(device)
    options: dict[str, Any] = {"dtype": torch.float32, "device": device}
    with torch.no_grad():
        logits = AutoLigerModel.from_pretrained(folder, progress=progress, **options).eval()(ids).logits
        auto = transformers.AutoModelForCausalLM if empty.visual is None else transformers.AutoModelForImageTextToText
        try:
            theirs = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to(device).eval()
        except ImportError as error:  # the library of a quantized format is missing
            result.not_compared = f"transformers can't load the checkpoint: {error}"
            return result
        recorded = trace(theirs, input_ids=ids)
        del theirs  # its memory is needed if ours is loaded again
        assert logits is not None
        result.logits_error = relative_error(logits, recorded.logits)
        if not result.same:
            ours = AutoLigerModel.from_pretrained(folder, progress=progress, **options).eval()
            result.place = first_difference(part_errors(ours, recorded, input_ids=ids))
    return result


def unknown_to(transformers: Any, model_type: str, quantization: Mapping[str, Any]) -> str:
    """Return a sentence if transformers does not know a checkpoint's model type or quantization; otherwise "".

    This check is needed because transformers reads the codes of an unknown quantization as if they were weights.
    """
    if model_type not in transformers.CONFIG_MAPPING:
        return f"transformers does not know {model_type}"
    method = str(quantization.get("quant_method"))
    formats = importlib.import_module(f"{transformers.__name__}.quantizers.auto").AUTO_QUANTIZATION_CONFIG_MAPPING
    if quantization and not any(known == method or known.startswith(f"{method}_") for known in formats):
        return f"transformers does not know quant_method {method!r}"
    return ""


def empty_model(folder: Path) -> CausalLM:
    """Return the model of a checkpoint on the meta device, without weights."""
    # The constructor of the config checks the values, and its errors name the file.
    hf_config = read_json_config(folder)
    model_class = get_arch(read_model_type(hf_config))
    config = read_config(model_class.config_class, hf_config)
    with blaming(folder / CONFIG), torch.device("meta"):
        return model_class(config)


def random_text(config: Any, rows: int, length: int) -> Tensor:
    """Return random ids [rows, length] that are the same in every run and contain no image, video or audio
    placeholders.
    """
    media = placeholder_ids(config)
    words = torch.tensor([token for token in range(config.vocab_size) if token not in media], device="cpu")
    return words[torch.randint(len(words), (rows, length), generator=torch.Generator().manual_seed(0), device="cpu")]
