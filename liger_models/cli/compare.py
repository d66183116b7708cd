"""Comparison with transformers' model of the same checkpoint: tensors, logits, and the first part that differs.

`liger-models verify`, `liger-models new-arch` and the tests of the architectures share it.
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
from liger_models.convert.config_map import blaming, read_config
from liger_models.convert.files import CONFIG, read_headers, read_json_config, read_model_type
from liger_models.convert.format import format_of
from liger_models.convert.load import of_whole_model, pick_map
from liger_models.layers.norm import add_norm

LIMIT = 1e-4
"""Largest accepted relative difference of logits in fp32; equal models differ by rounding, about 1e-6."""

PART_LIMIT = 1e-5
"""Largest accepted relative difference of the output of a single part, such as a norm, in fp32."""


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """The norm of the difference over the norm of ``theirs``."""
    theirs = theirs.detach().double().cpu()
    difference = ours.detach().double().cpu() - theirs
    return float(difference.norm() / theirs.norm().clamp_min(1e-30))


KINDS = ("missing", "extra", "shapes")


class TensorDifference(NamedTuple):
    """A tensor that a model and a checkpoint do not have alike.

    Attributes:
        kind: "missing" and "extra" from the checkpoint, or "shapes".
        name: name of the tensor in the checkpoint.
        shape: its shape in the checkpoint, or that of the missing tensor.
        expected: its shape in the model, for kind "shapes".
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
    """What differs between the tensors that a model expects and those that a checkpoint has.

    Args:
        expected, stored: name -> tensor, anything else with a shape, or the shape itself.
    """
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
    """What a model of transformers computes for a batch.

    Attributes:
        blocks: for each block its input and output, and those of its children by name, [B, T, C] each.
        head_input: the normed output of the last block, [B, T, C].
        logits: [B, T, V].
    """

    blocks: list[dict[str, tuple[Tensor, Tensor]]]
    head_input: Tensor
    logits: Tensor


BLOCK = ""
"""Key of the whole block in `Trace.blocks`."""


def trace(theirs: Any, **inputs: Any) -> Trace:
    """Run a model of transformers and record the inputs and outputs of its blocks and of their children.

    Args:
        theirs: a causal language model, or one with images.
        inputs: what it is called with.
    """
    blocks = getattr(theirs.get_decoder(), "layers", [])
    recorded = Trace([{} for _ in blocks], torch.empty(0), torch.empty(0))

    def record(parts: dict[str, tuple[Tensor, Tensor]], name: str, _: Any, args: Any, options: Any, out: Any) -> None:
        # Attention is called with hidden_states by name, and returns its weights, too; mixtures return router logits.
        x = args[0] if args else options.get("hidden_states", options.get("x"))
        y = out[0] if isinstance(out, tuple) else out
        if isinstance(x, Tensor) and isinstance(y, Tensor) and name not in parts:
            parts[name] = (x, y)

    def record_head(_: Any, args: tuple[Any, ...]) -> None:
        recorded.head_input = args[0]

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
    """Relative errors of the parts of a model, in the order in which they run."""

    errors: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, place: str, part: str, ours: Tensor, theirs: Tensor) -> None:
        """Note the error of a part; what runs twice counts once."""
        if ours.numel() == theirs.numel():
            self.errors.setdefault(place, {}).setdefault(part, relative_error(ours, theirs.view_as(ours)))


def part_errors(ours: CausalLM, recorded: Trace, **inputs: Any) -> dict[str, dict[str, float]]:
    """The relative error of each part of a model, when every part takes what transformers' part takes.

    Each block, norm, attention and MLP gets transformers' input, so that an error of one part is no error of the next.

    Args:
        ours: the model.
        recorded: what transformers' model of the same weights computes for the same batch.
        inputs: the batch.

    Returns:
        Place, such as ``"layers.0"``, -> name of the part -> its error, in the order in which they run. The part
        ``"output"`` is what a block adds up from its branches.
    """
    parts = _Parts()
    if len(recorded.blocks) != len(ours.layers):
        return {}

    def replace_head_input(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        parts.add("norm", "output", args[0], recorded.head_input)
        return (recorded.head_input, *args[1:])

    with ExitStack() as changes, torch.no_grad():
        for index, (block, theirs) in enumerate(zip(ours.layers, recorded.blocks, strict=True)):
            if theirs:  # a block that attends to images does not run in a text without
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
    """Let a block and its children take and return what transformers' do, and note their own errors before."""
    place = f"layers.{index}"
    stream, end = theirs[BLOCK]

    def replace_input(block: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        _, residual, *others = args
        if index == 0:
            parts.add("embed_tokens", "output", residual, stream)
        return (None, stream.view_as(residual), *others)

    def replace_output(_: Any, args: Any, out: tuple[Any, ...]) -> tuple[Any, ...]:
        x, residual, *others = out  # [B, T, C] twice, and a mixture's router logits
        total = residual if x is None else residual + x
        parts.add(place, "output", total, end)
        return (None, end.view_as(total), *others)

    def replace_norm(name: str, _: Any, args: Any, y: Any) -> Any:
        if not isinstance(y, Tensor):
            return y
        parts.add(place, name, y, theirs[name][1])
        return theirs[name][1].view_as(y)

    with ExitStack() as changes:
        changes.callback(block.register_forward_pre_hook(replace_input).remove)
        changes.callback(block.register_forward_hook(replace_output).remove)
        names = {id(child): name for name, child in block.named_children()}
        for name, child in block.named_children():
            if name not in theirs:
                continue
            if hasattr(child, "add_norm"):
                # The branches run by this method; as an attribute of the instance it hides that of the class.
                branch: Any = child
                branch.add_norm = _corrected_branch(branch.add_norm, place, name, names, theirs[name], parts)
                changes.callback(delattr, branch, "add_norm")
            else:
                changes.callback(child.register_forward_hook(partial(replace_norm, name)).remove)
        yield


def _corrected_branch(
    branch: Callable[..., Any],
    place: str,
    name: str,
    names: Mapping[int, str],
    theirs: tuple[Tensor, Tensor],
    parts: _Parts,
) -> Callable[..., Any]:
    """``add_norm`` of attention or an MLP that notes the errors of the norm and of the branch, and returns theirs."""
    taken, result = theirs

    def add_norm_and_run(norm: nn.Module | None, x: Tensor | None, residual: Tensor, *options: Any) -> Any:
        # The norm sees our stream, a sum of transformers' outputs; the branch sees what transformers' branch does.
        normed, residual = add_norm(norm, x, residual)
        parts.add(place, names.get(id(norm), f"input of {name}"), normed, taken)
        y, _, *others = branch(None, None, taken.view_as(normed), *options)
        parts.add(place, name, y, result)
        return (result.view_as(y), residual, *others)

    return add_norm_and_run


def first_difference(errors: Mapping[str, Mapping[str, float]], limit: float = PART_LIMIT) -> str:
    """The first place with an error beyond the limit, and the errors of its parts; "" if there is none.

    For instance ``layers.0: input_layernorm 2.1e-08, self_attn 3.4e-01, ... (2 of 4 places differ)``.
    """
    wrong = [place for place, parts in errors.items() if not all(error <= limit for error in parts.values())]
    if not wrong:
        return ""
    parts = ", ".join(f"{part} {error:.1e}" for part, error in errors[wrong[0]].items())
    return f"{wrong[0]}: {parts} ({len(wrong)} of {len(errors)} places differ)"


def where_it_differs(ours: CausalLM, theirs: Any, only_theirs: Mapping[str, Any] | None = None, **inputs: Any) -> str:
    """`first_difference` of a model from transformers' model of the same weights on the same batch.

    Args:
        ours, theirs: the models.
        only_theirs: inputs that only transformers' model takes.
        inputs: the batch.
    """
    recorded = trace(theirs, **inputs, **(only_theirs or {}))
    errors = part_errors(ours, recorded, **inputs)
    return first_difference(errors) or f"each part is right when it takes transformers' input: {errors}"


@dataclass
class Verification:
    """What `verify_checkpoint` has found.

    Attributes:
        tensors: number of tensors in the files.
        differences: as `tensor_differences` returns them.
        logits_error: relative difference of the logits from transformers'; None if they were not compared.
        not_compared: why they were not; "" if they were.
        place: `first_difference` where the logits differ.
    """

    tensors: int
    differences: list[TensorDifference]
    logits_error: float | None = None
    not_compared: str = ""
    place: str = ""

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences and (self.logits_error is None or self.logits_error <= LIMIT)

    def as_json(self) -> dict[str, Any]:
        """The findings for scripts: names by what is wrong with them. JSON has no NaN, so that is a string."""
        error = self.logits_error
        return {
            "tensors": self.tensors,
            **{kind: [difference.name for difference in self.differences if difference.kind == kind] for kind in KINDS},
            "logits_error": error if error is None or math.isfinite(error) else str(error),
            "place": self.place,
            "same": self.same,
        }


def verify_checkpoint(folder: Path, *, length: int, device: str, progress: bool) -> Verification:
    """Compare the tensors of a checkpoint with its config.json, and its logits with those of transformers.

    Args:
        folder: the checkpoint.
        length: tokens in each of the two random rows.
        device: where the models run, one after the other.
        progress: whether loading shows a progress bar.
    """
    name = read_model_type(read_json_config(folder))
    empty = empty_model(folder)

    # The tensors, without reading any of them.
    parameters, maps = dict(empty.named_parameters()), format_of(type(empty)).file_maps(empty.config)
    stored = of_whole_model(read_headers(folder), maps)
    weights = pick_map(maps, stored, parameters)
    expected = weights.shapes(parameters)
    read = {
        tensor: header for tensor, header in stored.items() if tensor in expected or not weights.passes_over(tensor)
    }
    result = Verification(len(stored), tensor_differences(expected, read))

    # The oracle may not be there, or be older than the model.
    try:
        transformers: Any = importlib.import_module("transformers")
        result.not_compared = "" if name in transformers.CONFIG_MAPPING else f"transformers does not know {name}"
    except ImportError:
        result.not_compared = "transformers is not installed"
    if result.differences or result.not_compared:
        return result

    # One model after the other, so that the device needs room for one; ours is read again only to find the place.
    ids = random_text(empty.config, 2, length).to(device)
    options: dict[str, Any] = {"dtype": torch.float32, "device": device}
    with torch.no_grad():
        logits = AutoLigerModel.from_pretrained(folder, progress=progress, **options).eval()(ids).logits
        auto = transformers.AutoModelForCausalLM if empty.visual is None else transformers.AutoModelForImageTextToText
        theirs = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to(device).eval()
        recorded = trace(theirs, input_ids=ids)
        del theirs
        assert logits is not None
        result.logits_error = relative_error(logits, recorded.logits)
        if not result.same:
            ours = AutoLigerModel.from_pretrained(folder, progress=progress, **options).eval()
            result.place = first_difference(part_errors(ours, recorded, input_ids=ids))
    return result


def empty_model(folder: Path) -> CausalLM:
    """The model of a checkpoint on the meta device, without weights."""
    hf_config = read_json_config(folder)
    model_class = get_arch(read_model_type(hf_config))
    config = read_config(model_class.config_class, hf_config)
    with blaming(folder / CONFIG), torch.device("meta"):
        return model_class(config)


def random_text(config: Any, rows: int, length: int) -> Tensor:
    """Random token ids [rows, length], the same in every run, without placeholders of images, videos and audio."""
    names = ("image_token_id", "video_token_id", "audio_token_id", "image_token_index")
    media = {getattr(config, name, None) for name in names}
    words = torch.tensor([token for token in range(config.vocab_size) if token not in media])
    return words[torch.randint(len(words), (rows, length), generator=torch.Generator().manual_seed(0))]
