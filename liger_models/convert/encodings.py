"""How checkpoints store quantized weights: which tensors a format has in a file, and how they form a frozen weight.

`recognize` uses the ``quantization_config`` in config.json to find the tensors that form one quantized weight, and
joins them into one `StoredTensor`. This `StoredTensor` has the shape of the dense weight and an `Encoding`. The
encoding reads rows of the weight, either dequantized or in the format of `FrozenWeight`. The encoding also converts a
`FrozenWeight` back to the tensors in the file.

In memory, each row has its own scales. A byte holds the 4-bit codes of two neighboring columns. The code of the first
column is in the lower half of the byte.

In a file, a weight called NAME is stored in these tensors::

    quant_method         weights                                              class
    fp8                  NAME, NAME_scale_inv                                 Float8
    compressed-tensors   NAME, NAME_scale                                     Float8
                         NAME_packed, NAME_scale, NAME_shape                  PackedInt4
                         NAME_packed, NAME_scale, NAME_global_scale           PackedNVFP4
    modelopt             NAME, NAME_scale                                     Float8
                         NAME, NAME_scale, NAME_scale_2                       PackedNVFP4
    mxfp4                NAME_blocks, NAME_scales                             Mxfp4
    bitsandbytes         NAME, NAME.absmax, NAME.quant_map, ...               BitsAndBytes
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from liger_models.convert.fp8 import block_size
from liger_models.kernels.frozen.groups import NUMBERS, check_width
from liger_models.kernels.frozen.weight import FORMATS, FrozenWeight

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Maps the names of dtypes in headers of safetensors files to PyTorch's dtypes."""
FLOAT8 = "F8_E4M3"
"""Name of the dtype of float8 weights in headers of safetensors files."""
SCALES = "_scale_inv"
"""Suffix of DeepSeek's scales: the tensor with the scales of a weight has the weight's name plus this suffix."""
EXTRAS = (".input_scale", ".input_global_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale", ".weight_shape")
"""Suffixes of tensors that describe activations, caches and shapes, and are not part of a weight."""


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file, as described in the header of the file.

    Attributes:
        file: path of the file.
        name: name of the tensor in the file.
        shape, dtype: shape and dtype of the tensor. For a quantized tensor, ``shape`` is the shape of the dense weight.
        encoding: how a quantized tensor is stored; None for a dense tensor.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    encoding: "Encoding | None" = None


Files = Mapping[Path, Any]
"""Maps paths to open safetensors files."""


def read_slice(files: Files, file: Path, name: str, first: int, last: int) -> Tensor:
    """Read rows ``first`` to ``last - 1`` of a tensor to the CPU, without dequantizing them."""
    with torch.device("cpu"):  # safetensors creates slices, unlike whole tensors, on the default device
        rows: Tensor = files[file].get_slice(name)[first:last]
    return rows


@dataclass(frozen=True)
class Encoding(ABC):
    """The tensors in which a checkpoint stores a quantized weight [O, C], or the weights [X, O, C] of experts.

    In memory, the weight is a `FrozenWeight`. The methods convert between the tensors in the files and the tensors of
    this `FrozenWeight`.

    Attributes:
        shape: shape of the dense weight.
        parts: the tensors in the files, by the part names that the subclass defines.
        extras: tensors in the files that belong to the same layer but do not affect the weight, such as activation
            scales.
    """

    shape: tuple[int, ...]
    parts: Mapping[str, StoredTensor]
    extras: tuple[StoredTensor, ...] = ()
    format: ClassVar[str]
    """Name of the format of the `FrozenWeight`."""

    @property
    @abstractmethod
    def layout(self) -> list[int]:
        """The integers that are needed to interpret the tensors of the `FrozenWeight`; see `Format.layout`."""

    @property
    @abstractmethod
    def widths(self) -> dict[str, tuple[int, torch.dtype]]:
        """Maps the name of each tensor of the `FrozenWeight` to (its number of elements per row, its dtype)."""

    @abstractmethod
    def read(self, files: Files, part: str, first: int, last: int) -> Tensor:
        """Return the rows (for experts: the matrices) ``first`` to ``last - 1`` of the tensor ``part`` of the
        `FrozenWeight`."""

    @abstractmethod
    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the unsharded tensors of the `FrozenWeight` to the tensors in the file, by name."""

    def written(self) -> dict[str, Tensor]:
        """Return the tensors that `write` would return, on the meta device."""
        like = {
            part: torch.empty(*self.shape[:-1], width, dtype=dtype, device="meta")
            for part, (width, dtype) in self.widths.items()
        }
        return {name: tensor.to("meta") for name, tensor in self.write(like).items()}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the dense weight."""
        return torch.bfloat16

    def dense(self, files: Files, first: int, last: int) -> Tensor:
        """Read rows ``first`` to ``last - 1``, dequantized to the dtype of the dense weight."""
        tensors = tuple(self.read(files, part, first, last) for part in self.widths)
        shape = torch.Size([last - first, *self.shape[1:]])
        format_ = FORMATS[self.format]
        return format_.reference(FrozenWeight(format_, tensors, shape, self.layout, self.dtype))

    def encode(self, files: Files, values: Tensor) -> dict[str, Tensor] | None:
        """Encode dense values with the scales in the file. Return the tensors of the file by name.

        If no codes represent the values exactly with these scales, return None. The default implementation always
        returns None.
        """
        return None

    def moved(self, to: Callable[[Path], Path]) -> "Encoding":
        """Return a copy of this encoding in which each file has the path ``to(old path)``."""
        parts = {name: part._replace(file=to(part.file)) for name, part in self.parts.items()}
        return replace(self, parts=parts, extras=tuple(extra._replace(file=to(extra.file)) for extra in self.extras))

    def _rows(self, files: Files, part: str, first: int, last: int) -> Tensor:
        return read_slice(files, self.parts[part].file, self.parts[part].name, first, last)

    def _whole(self, files: Files, part: str) -> Tensor:
        whole: Tensor = files[self.parts[part].file].get_tensor(self.parts[part].name)
        return whole

    def _named(self, **tensors: Tensor) -> dict[str, Tensor]:
        return {self.parts[part].name: tensor.reshape(self.parts[part].shape) for part, tensor in tensors.items()}


@dataclass(frozen=True)
class Float8(Encoding):
    """Codes [..., O, C] in e4m3, with one scale for each block, row or matrix.

    Attributes:
        block: (number of rows, number of columns) that share a scale. The number of columns is 0 if all columns of a
            row share a scale.
    """

    block: tuple[int, int] = (1, 1)
    format = "blocks"

    @property
    def layout(self) -> list[int]:
        return [self.block[1]]

    @property
    def widths(self) -> dict[str, tuple[int, torch.dtype]]:
        columns = self.shape[-1]
        scales = -(-columns // (self.block[1] or columns)), FLOATS[self.parts["scales"].dtype]
        return {"codes": (columns, torch.float8_e4m3fn), "scales": scales}

    def read(self, files: Files, part: str, first: int, last: int) -> Tensor:
        if part == "codes":
            return self._rows(files, part, first, last)
        (*before, rows, columns), (height, width) = self.shape, self.block
        grid = (*before, -(-rows // height), -(-columns // (width or columns)))
        stored = self.parts["scales"].shape
        if before:  # the rows are whole matrices
            scales = self._rows(files, part, first, last) if stored == grid else self._whole(files, part)
            scales = scales if stored == grid else scales.reshape(grid)[first:last]
            return scales.repeat_interleave(height, 1)[:, :rows]
        begin, end = first // height, -(-last // height)
        if stored == grid:
            scales = self._rows(files, part, begin, end)
        else:
            scales = self._whole(files, part).reshape(grid)[begin:end]
        return scales.repeat_interleave(height, 0)[first - begin * height :][: last - first]

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # In memory, each row of a block has a copy of the block's scales. Write the scales of only one row per block.
        return self._named(codes=tensors["codes"], scales=tensors["scales"][..., :: self.block[0], :])


@dataclass(frozen=True)
class Mxfp4(Encoding):
    """Blocks of codes [..., C / 32, 16] and scales [..., C / 32], both uint8, as in GPT-OSS."""

    format = "mxfp4"

    @property
    def layout(self) -> list[int]:
        return [32]

    @property
    def widths(self) -> dict[str, tuple[int, torch.dtype]]:
        columns = self.shape[-1]
        return {"codes": (columns // 2, torch.uint8), "scales": (columns // 32, torch.uint8)}

    def read(self, files: Files, part: str, first: int, last: int) -> Tensor:
        rows = self._rows(files, part, first, last)
        return rows.flatten(-2) if part == "codes" else rows

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._named(**tensors)

    def encode(self, files: Files, values: Tensor) -> dict[str, Tensor] | None:
        # Encode one expert at a time to save memory.
        scales, codes = self._whole(files, "scales"), []
        magnitudes = torch.tensor(NUMBERS["e2m1"][:8], dtype=torch.float32, device="cpu")
        constants = FORMATS[self.format]
        for value, scale in zip(values.cpu(), scales, strict=True):
            power = torch.ldexp(torch.ones_like(scale, dtype=torch.float32), 127 - scale.int())
            scaled = value.float().unflatten(-1, (-1, 32)) * power.unsqueeze(-1)
            code = torch.searchsorted(magnitudes, scaled.abs().contiguous()).clamp_(max=7)
            code = (code + 8 * scaled.signbit()).to(torch.uint8).flatten(-2)
            code = code[..., 0::2] | (code[..., 1::2] << 4)
            codes.append(code)

            # Compare the signs, too, because -0 equals 0.
            again = constants.reference(FrozenWeight(constants, (code, scale), value.shape, [32], value.dtype))
            if not torch.equal(again, value) or not torch.equal(again.signbit(), value.signbit()):
                return None
        return self._named(codes=torch.stack(codes), scales=scales)


@dataclass(frozen=True)
class PackedNVFP4(Encoding):
    """Codes [O, C / 2] uint8, scales [O, C / 16] in e4m3, and one factor for the whole matrix.

    Attributes:
        divides: whether the scales are divided by the factor, as in compressed-tensors, instead of multiplied by it.
    """

    divides: bool = False
    format = "nvfp4"

    @property
    def layout(self) -> list[int]:
        return [16, int(self.divides)]

    @property
    def widths(self) -> dict[str, tuple[int, torch.dtype]]:
        columns = self.shape[-1]
        return {
            "codes": (columns // 2, torch.uint8),
            "scales": (columns // 16, torch.float8_e4m3fn),
            "factors": (1, torch.float32),
        }

    def read(self, files: Files, part: str, first: int, last: int) -> Tensor:
        if part != "factors":
            return self._rows(files, part, first, last)
        return self._whole(files, part).float().reshape(1, 1).expand(last - first, 1)

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        factor = tensors["factors"][:1].to(FLOATS[self.parts["factors"].dtype])
        return self._named(codes=tensors["codes"], scales=tensors["scales"], factors=factor)


@dataclass(frozen=True)
class PackedInt4(Encoding):
    """Codes [O, C / 8] int32, eight codes in each int32 (lowest bits first), and floating-point scales [O, groups]."""

    format = "int4"

    @property
    def layout(self) -> list[int]:
        return [self.shape[-1] // self.parts["scales"].shape[-1]]

    @property
    def widths(self) -> dict[str, tuple[int, torch.dtype]]:
        scales = self.parts["scales"]
        return {"codes": (self.shape[-1] // 2, torch.uint8), "scales": (scales.shape[-1], FLOATS[scales.dtype])}

    def read(self, files: Files, part: str, first: int, last: int) -> Tensor:
        rows = self._rows(files, part, first, last)
        return rows.contiguous().view(torch.uint8) if part == "codes" else rows

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._named(codes=tensors["codes"].contiguous().view(torch.int32), scales=tensors["scales"])


@dataclass(frozen=True)
class BitsAndBytes(Encoding):
    """Codes [O · C / 2, 1] uint8 and one scale for every ``blocksize`` codes. A byte holds two codes, with the first
    code in the upper half.

    If the scales are also quantized (``nested``), each scale is stored as a code. The scale is then equal to the table
    entry for this code, times the factor of the scale's block, plus an offset.

    Attributes:
        state: the content of the tensor ``quant_state``.
    """

    state: Mapping[str, Any] = field(default_factory=dict)
    format = "bnb_nf4"

    @property
    def layout(self) -> list[int]:
        return [self.state["blocksize"], int(self.dtype == torch.float16)]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.state["dtype"] == "float16" else torch.bfloat16

    @property
    def widths(self) -> dict[str, tuple[int, torch.dtype]]:
        columns = self.shape[-1]
        return {
            "codes": (columns // 2, torch.uint8), "scales": (columns // self.state["blocksize"], torch.float32)
        }  # fmt: skip

    def read(self, files: Files, part: str, first: int, last: int) -> Tensor:
        width = self.widths[part][0]
        rows = self._rows(files, part, first * width, last * width)
        if part == "codes":
            return ((rows << 4) | (rows >> 4)).view(-1, width)
        if "nested" not in self.parts:
            return rows.view(-1, width)
        blocks = torch.arange(first * width, last * width, device="cpu") // self.state["nested_blocksize"]
        table, nested = self._whole(files, "nested_table"), self._whole(files, "nested")
        scales = table[rows.int()] * nested[blocks] + float(self.state["nested_offset"])
        return scales.view(-1, width)

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Write the scales in fp32, as bitsandbytes does for a weight without double quantization.
        codes, scales = tensors["codes"], tensors["scales"]
        state = {key: value for key, value in self.state.items() if not key.startswith("nested")}
        text = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8, device=codes.device)
        return {
            self.parts["codes"].name: ((codes << 4) | (codes >> 4)).reshape(-1, 1),
            self.parts["scales"].name: scales.flatten(),
            self.parts["table"].name: torch.tensor(NUMBERS["nf4"], dtype=torch.float32, device=codes.device),
            self.parts["state"].name: text,
        }


Stored = dict[str, StoredTensor]
Read = Callable[[StoredTensor], Tensor]


def recognize(stored: Stored, quantization: Mapping[str, Any], read: Read) -> Stored:
    """For each quantized weight of a checkpoint, join the tensors that store it into one entry.

    Args:
        stored: the tensors in the headers of the files, by name.
        quantization: ``quantization_config`` of config.json; empty if there is none.
        read: function that reads a small tensor.

    Returns:
        The tensors by name. Each quantized weight is a single entry with an encoding.

    Raises:
        ValueError: the format is not supported, or shapes or dtypes do not match the format.
    """
    method = quantization.get("quant_method")
    if method is None or method == "fp8":
        return _recognize_blocks(stored, quantization)
    check_quantization(quantization)
    stored = dict(stored)
    match method:
        case "mxfp4":
            for name in [name for name in stored if name.endswith("_blocks")]:
                _join(stored, name, name, _mxfp4, scales=name.removesuffix("_blocks") + "_scales")
        case "bitsandbytes":
            for name in [name.removesuffix(".absmax") for name in stored if name.endswith(".absmax")]:
                _join_bitsandbytes(stored, name, read)
        case _:
            for name in [name for name in stored if name.endswith((".weight", ".weight_packed"))]:
                owner = name.removesuffix("_packed")
                scales = f"{owner}_scale"
                if f"{owner}_scale_2" in stored:
                    _join(stored, owner, name, _nvfp4, scales=scales, factors=f"{owner}_scale_2")
                elif f"{owner}_global_scale" in stored:
                    _join(stored, owner, name, _nvfp4_over, scales=scales, factors=f"{owner}_global_scale")
                elif name != owner:
                    _join(stored, owner, name, _int4, scales=scales)
                elif scales in stored:
                    weights = [group["weights"] for group in _groups(quantization)]
                    blocks = [each.get("block_structure") for each in weights]
                    block = next((block for block in blocks if _is_block(block)), None)
                    _join(stored, owner, name, partial(_float8, block=block), scales=scales)
            _take_extras(stored)
    return stored


def check_quantization(quantization: Any) -> None:
    """Raise ValueError unless checkpoints with this ``quantization_config`` can be read."""
    method = quantization.get("quant_method", quantization) if isinstance(quantization, Mapping) else quantization
    why = ""
    match method:
        case "fp8":
            block_size(quantization)
            return
        case "mxfp4":
            return
        case "compressed-tensors":
            for group in _groups(quantization):
                kind = group["weights"].get("type"), group["weights"].get("num_bits")
                symmetric = group["weights"].get("symmetric", True)
                if kind not in (("float", 8), ("float", 4), ("int", 4)) or not symmetric:
                    why = f" with weights {kind[0]}{kind[1]}{'' if symmetric else ' and zero points'}"
                elif group["weights"].get("actorder"):
                    why = " with actorder"
                elif group.get("format", quantization.get("format")) == "mxfp4-pack-quantized":
                    why = " with format mxfp4-pack-quantized"
            if not why and _groups(quantization):
                return
        case "modelopt":
            algorithm = (quantization.get("quantization") or quantization).get("quant_algo")
            if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4"):
                return
            why = f" with quant_algo {algorithm}"
        case "bitsandbytes":
            kind = quantization.get("bnb_4bit_quant_type", "fp4")
            if quantization.get("load_in_4bit") and kind == "nf4":
                return
            why = f" with {f'type {kind}' if quantization.get('load_in_4bit') else '8 bits'}"
    raise ValueError(
        f"config.json: the checkpoint must not be quantized, got quantization_config ({method}{why}). Supported are "
        "fp8 with weight_block_size; compressed-tensors in symmetric FP8, NVFP4 or INT4 without actorder; modelopt in "
        "FP8 or NVFP4; mxfp4 (GPT-OSS); and bitsandbytes in NF4. Load the original checkpoint in 16 bits instead, and "
        "call quantize_base or train with lora_4bit for 4-bit weights; or dequantize this checkpoint with the library "
        "that wrote it, and save it in bfloat16."
    )


def quantization_of(hf_config: Mapping[str, Any]) -> Any:
    """Return the ``quantization_config`` in a config.json, under any of its possible names; None if there is none."""
    text = hf_config.get("text_config")
    configs = hf_config, text if isinstance(text, Mapping) else {}
    keys = "quantization_config", "compression_config"
    return next((config[key] for config in configs for key in keys if config.get(key)), None)


def _is_block(block: Any) -> bool:
    return isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)


def _groups(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = quantization.get("config_groups")
    groups = groups.values() if isinstance(groups, Mapping) else ()
    return [group for group in groups if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)]


def _join(stored: Stored, owner: str, codes: str, make: Callable[..., Encoding], **others: str) -> None:
    """In ``stored``, replace the tensors that form one weight with a single entry, which has the name ``owner`` and an
    encoding."""
    missing = [name for name in others.values() if name not in stored]
    if missing:
        raise ValueError(
            f"{stored[codes].file}: must hold {missing[0]}, the scales of {codes}, got no tensor of this name. "
            "Download the index and the files of one commit."
        )
    parts = {"codes": stored.pop(codes)} | {part: stored.pop(name) for part, name in others.items()}
    encoding = make(parts)
    stored[owner] = parts["codes"]._replace(shape=encoding.shape, encoding=encoding)


def _check(codes: StoredTensor, dtype: str, others: Mapping[str, tuple[StoredTensor, Any, Any]]) -> None:
    """Check that the codes have dtype ``dtype``, and that every other tensor has an allowed shape and dtype."""
    if codes.dtype != dtype:
        raise ValueError(f"{codes.file}: {codes.name} must have one of the dtypes {dtype}, got {codes.dtype}.")
    for tensor, shapes, dtypes in others.values():
        if tensor.dtype not in dtypes:
            raise ValueError(
                f"{tensor.file}: {tensor.name} must have one of the dtypes {', '.join(dtypes)}, got {tensor.dtype}. "
                "Download the files of one commit."
            )
        if tensor.shape not in shapes:
            raise ValueError(
                f"{tensor.file}: {tensor.name} must have shape {' or '.join(map(str, shapes))} for {codes.name} "
                f"{codes.shape}, got {tensor.shape}. Download the files of one commit."
            )


def _mxfp4(parts: dict[str, StoredTensor]) -> Encoding:
    codes, scales = parts["codes"], parts["scales"]
    _check(codes, "U8", {"scales": (scales, [codes.shape[:-1]], ["U8"])})
    if codes.shape[-1:] != (16,):
        raise ValueError(f"{codes.file}: {codes.name} must have shape (..., 16) in MXFP4, got {codes.shape}.")
    return Mxfp4((*codes.shape[:-2], 32 * codes.shape[-2]), parts)


def _nvfp4(parts: dict[str, StoredTensor], divides: bool = False) -> Encoding:
    codes, scales, factor = parts["codes"], parts["scales"], parts["factors"]
    rows, columns = codes.shape if len(codes.shape) == 2 else (0, 0)
    shapes = [(rows, columns // 8)]
    _check(codes, "U8", {"scales": (scales, shapes, [FLOAT8]), "factors": (factor, [(), (1,)], ["F32"])})
    check_width(codes.name, 2 * columns, 16)
    return PackedNVFP4((rows, 2 * columns), parts, divides=divides)


def _nvfp4_over(parts: dict[str, StoredTensor]) -> Encoding:
    return _nvfp4(parts, divides=True)


def _int4(parts: dict[str, StoredTensor]) -> Encoding:
    codes, scales = parts["codes"], parts["scales"]
    rows, columns = codes.shape if len(codes.shape) == 2 else (0, 0)
    groups = scales.shape[-1] if len(scales.shape) == 2 else 1
    _check(codes, "I32", {"scales": (scales, [(rows, groups)], FLOATS)})
    check_width(codes.name, 8 * columns, 8 * columns // max(groups, 1))
    return PackedInt4((rows, 8 * columns), parts)


def _float8(parts: dict[str, StoredTensor], block: list[int] | None = None) -> Encoding:
    codes, scales = parts["codes"], parts["scales"]
    *before, rows, columns = codes.shape if len(codes.shape) > 1 else (0, 0)
    by_matrix = {tuple(before), (*before, 1), (*before, 1, 1), (1,) if not before else (*before, 1, 1)}
    by_row = {(*before, rows, 1), (*before, rows)}
    grid = (*before, -(-rows // block[0]), -(-columns // block[1])) if block else None
    _check(codes, FLOAT8, {"scales": (scales, [*by_matrix, *by_row, *([grid] if grid else [])], FLOATS)})
    if grid is not None and block is not None and scales.shape == grid:
        size = block[0], block[1]
    else:
        size = (1 if scales.shape in by_row and math.prod(scales.shape) > math.prod(before) else rows), 0
    return Float8(codes.shape, parts, block=size)


def _recognize_blocks(stored: Stored, quantization: Mapping[str, Any]) -> Stored:
    """Join DeepSeek's block scales with the float8 tensors to which they belong."""
    names = [name for name in stored if name.endswith(SCALES)]
    if not names:
        return stored

    # A tensor of scales must have one element for each block of the weight.
    block = block_size(quantization)
    tensors = {name: tensor for name, tensor in stored.items() if not name.endswith(SCALES)}
    for name in names:
        owner, scales = name.removesuffix(SCALES), stored[name]
        weight = tensors.get(owner, scales)  # a missing weight fails the check below
        *before, rows, columns = weight.shape if len(weight.shape) > 1 else (0, 0)
        shape = (*before, -(-rows // block[0]), -(-columns // block[1]))
        if weight.dtype != FLOAT8 or scales.dtype not in FLOATS or scales.shape != shape:
            raise ValueError(
                f"{scales.file}: {name} must be floating-point numbers {list(shape)} for blocks of {list(block)} of "
                f"{owner} in {FLOAT8}, got {list(scales.shape)} in {scales.dtype}, and {weight.dtype} for {owner}. "
                "Download the files of one commit."
            )
        parts = {"codes": weight, "scales": scales}
        tensors[owner] = weight._replace(encoding=Float8(weight.shape, parts, block=block))
    return tensors


def _join_bitsandbytes(stored: Stored, name: str, read: Read) -> None:
    """Join the tensors of a bitsandbytes weight. The shape of the weight is in ``quant_state``."""
    names = {"scales": f"{name}.absmax", "table": f"{name}.quant_map", "state": f"{name}.quant_state.bitsandbytes__nf4"}
    if f"{name}.nested_absmax" in stored:
        names |= {"nested": f"{name}.nested_absmax", "nested_table": f"{name}.nested_quant_map"}
    missing = [each for each in (name, *names.values()) if each not in stored]
    if missing:
        raise ValueError(
            f"{stored[f'{name}.absmax'].file}: must hold {missing[0]}, a part of {name} in NF4, got no tensor of this "
            "name. Download the files of one commit."
        )
    state = _state_of(stored[names["state"]], read)
    rows, columns = state["shape"]
    check_width(name, columns, state["blocksize"])
    table = read(stored[names["table"]]).float()
    if not torch.allclose(table, torch.tensor(NUMBERS["nf4"], dtype=torch.float32, device="cpu"), rtol=0, atol=1e-7):
        raise ValueError(f"{stored[name].file}: {names['table']} must hold the numbers of NF4, got {table.tolist()}.")

    def make(parts: dict[str, StoredTensor]) -> Encoding:
        scales = parts["scales"]
        shapes, dtypes = [(rows * columns // state["blocksize"],)], ["U8"] if "nested" in parts else ["F32"]
        _check(parts["codes"], "U8", {"scales": (scales, shapes, dtypes)})
        if math.prod(parts["codes"].shape) != rows * columns // 2:
            raise ValueError(
                f"{scales.file}: {name} must have {rows * columns // 2} bytes for shape {[rows, columns]}, got "
                f"{list(parts['codes'].shape)}. Download the files of one commit."
            )
        return BitsAndBytes((rows, columns), parts, state=state)

    _join(stored, name, name, make, **names)


def _state_of(tensor: StoredTensor, read: Read) -> dict[str, Any]:
    """Return the content of a ``quant_state`` tensor, whose bytes are JSON."""
    try:
        state = json.loads(bytes(read(tensor).flatten().tolist()))
    except (ValueError, TypeError):
        state = None
    state = state if isinstance(state, dict) else {}
    shape, sizes = state.get("shape"), [state.get("blocksize"), state.get("nested_blocksize", 1)]
    numbers = [*(shape if isinstance(shape, list) else ()), *sizes]
    offset = state.get("nested_offset", 0.0)
    if len(numbers) != 4 or not all(type(n) is int and n > 0 for n in numbers) or not isinstance(offset, int | float):
        raise ValueError(
            f"{tensor.file}: {tensor.name} must hold JSON with the shape of a matrix and positive block sizes, got "
            f"{state}. Download the files of one commit."
        )
    return {"dtype": "bfloat16", **state}


def _take_extras(stored: Stored) -> None:
    """Move each tensor that describes activations, caches or shapes into the entry of its layer's weight. If the weight
    is not quantized, drop the tensor."""
    for name in [name for name in stored if name.endswith(EXTRAS)]:
        owner = name.rpartition(".")[0] + ".weight"
        extra = stored.pop(name)
        encoding = stored[owner].encoding if owner in stored else None
        if encoding is not None:
            joined = replace(encoding, extras=(*encoding.extras, extra))
            stored[owner] = stored[owner]._replace(encoding=joined)
