"""Conversion of recorded experts between the formats of inference engines and the format of this package.

An engine that samples for a trainer returns the experts that the model's routers chose. The trainer's forward takes
these experts as ``routed_experts``. Engines record one row [H, K] for each token that they run: K experts for each of
the H blocks. Entries of blocks without routed experts are undefined. This package keeps only the entries of the L
layers with routed experts. An engine never runs the last token of a completion, so this token has no row.

=========  =========================================================================================================
engine     payload
=========  =========================================================================================================
vLLM       ``CompletionOutput.routed_experts``: an array [N, H, K] of uint8, or of uint16 for more than 256 experts.
           Its servers return ``choices[i].routed_experts``: the bytes of a .npy file with this array, in base64.
SGLang     ``meta_info["routed_experts"]``: the bytes of an array [N, H, K] of int32, without its shape, in base64.
           ``sglext.routed_experts`` has the same form.
prime-rl   a dict with the bytes of the array in base64 (``data``), ``shape``, ``dtype`` and ``start``.
=========  =========================================================================================================

N is the number of tokens in prompt and completion, without the last token and without the first ``start`` tokens, whose
rows an earlier turn has returned. The number ``start`` is called ``routed_experts_prompt_start`` in vLLM, and
``routed_experts_start_len`` in SGLang.

Source: vLLM 0.33.0 (``outputs.py``, ``model_executor/layers/fused_moe/routed_experts_capturer.py``,
``utils/serial_utils.py``), SGLang 0.5.23 (``srt/state_capturer``, ``srt/managers/detokenizer_manager.py``), prime-rl
0.8.0 (``inference/vllm/routed_experts.py``).
"""

import ast
import base64
import binascii
import ctypes
import struct
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from liger_models.common.device import as_tensor
from liger_models.common.errors import check_values
from liger_models.layers.decoder import Decoder
from liger_models.layers.layer import routed_layers

NPY = b"\x93NUMPY"
"""The first bytes of a .npy file."""
DTYPES = {
    torch.uint8: "|u1", torch.int8: "|i1", torch.uint16: "<u2", torch.int16: "<i2", torch.int32: "<i4",
    torch.int64: "<i8",
}  # fmt: skip
"""Maps dtypes to their names in .npy files."""


def read_routing(
    model: Decoder,
    payload: Any,
    num_tokens: int,
    *,
    start: int = 0,
    earlier: Tensor | None = None,
    missing: Literal["error", "router"] = "error",
) -> Tensor:
    """Return the experts that an engine recorded for the tokens of a prompt and its completion.

    Args:
        model: the model that replays the experts. It has H blocks, L layers with routed experts and K experts per
            token.
        payload: the payload that vLLM, SGLang or prime-rl returned for a completion (see the module docstring), or an
            integer array or tensor [N, H, K] or [N, L, K]. If the last token has a row, which some trainers add as
            padding, this row is dropped.
        num_tokens: number of tokens in prompt and completion.
        start: number of tokens at the beginning that the payload omits.
        earlier: [start or more, L, K], the result of this function for the previous turn. This result provides the
            experts of the tokens that the payload omits.
        missing: what to do if a token other than the last has no row, or a row without K different experts. "error"
            raises an error, and "router" lets the router choose experts for this token.

    Returns:
        [num_tokens, L, K] int16 on the CPU. Entries are −1 for the last token, and for tokens whose experts the
        router will choose.

    Raises:
        ValueError: the payload cannot be read, does not fit the model or ``num_tokens``, or lacks rows for tokens
            other than the last.
    """
    if missing not in ("error", "router"):
        raise ValueError(f"read_routing: missing must be 'error' or 'router', got {missing!r}.")
    indices, K = _layers_of(model, "read_routing")
    if isinstance(payload, Mapping):
        start = int(payload.get("start", start))
    rows = _decode(payload, len(model.layers), K)
    if rows.dim() != 3 or rows.shape[1] not in (len(model.layers), len(indices)) or rows.shape[2] != K:
        raise ValueError(
            f"read_routing: payload must be [tokens, {len(model.layers)} (blocks) or {len(indices)} (layers with "
            f"routed experts), {K} (experts of a token)], got {list(rows.shape)}. Sample with a checkpoint of this "
            "model."
        )
    if not 0 <= start < max(num_tokens, 1) or len(rows) > num_tokens - start:
        raise ValueError(
            f"read_routing: payload must have at most {num_tokens - start} rows (num_tokens {num_tokens}, start "
            f"{start}), got {len(rows)}. Pass the number of tokens of prompt and completion together."
        )

    # The last token has no row. If the payload has a row for it, this row is padding.
    experts = torch.full((num_tokens, len(indices), K), -1, dtype=torch.int16, device="cpu")
    rows = select_routing(model, rows[: num_tokens - 1 - start])
    if earlier is not None:
        if earlier.shape[1:] != experts.shape[1:] or len(earlier) < start:
            raise ValueError(
                f"read_routing: earlier must be [{start} or more, {len(indices)}, {K}], got {list(earlier.shape)}. "
                "Pass the result of read_routing for the turn before."
            )
        experts[:start] = earlier[:start]
    experts[start : start + len(rows)] = rows
    unknown = (experts[:-1, :, 0] < 0).any(1).nonzero().flatten().tolist()
    if unknown and missing == "error":
        raise ValueError(
            f"read_routing: payload must have {K} different experts for every token but the last, got none for "
            f"{len(unknown)} of {num_tokens} tokens, the first at {unknown[0]}. Pass the tokens of the turn before as "
            "earlier, or missing='router' to let the router choose."
        )
    return experts


def select_routing(model: Decoder, experts: Tensor) -> Tensor:
    """Drop the entries of blocks without routed experts. Set −1 wherever a token lacks K different experts in a layer.

    Args:
        model: a model with H blocks, L layers with routed experts and K experts for each token.
        experts: [..., H, K] or [..., L, K] integers. Rows of zeros, which engines and trainers use as padding, do not
            have K different experts if K > 1.

    Returns:
        [..., L, K] int16.

    Raises:
        ValueError: an entry is not an expert of the model.
    """
    indices, _ = _layers_of(model, "select_routing")
    experts = experts.to(torch.int32)
    if experts.shape[-2] == len(model.layers):
        layers = experts.unbind(-2)
        experts = torch.stack([layers[index] for index in indices], -2)
    X = model.routers[0].num_experts
    check_values(
        (experts < X).all(),
        f"select_routing: experts must be below {X}, the number of experts of the model, got greater ones. Pass the "
        "experts that a checkpoint of this model has chosen.",
    )
    ordered = experts.sort(-1).values
    valid = (ordered[..., :1] >= 0) & (ordered.diff(dim=-1) > 0).all(-1, keepdim=True)
    return experts.masked_fill(~valid, -1).to(torch.int16)


def routing_rows(model: Decoder, experts: Tensor, *, start: int = 0) -> Tensor:
    """Return recorded experts in the form that engines store: the inverse of `read_routing`.

    Args:
        model: the model that recorded the experts. It has H blocks, L layers with routed experts and K experts per
            token.
        experts: [T, L, K] integers: ``Completion.routed_experts`` from `rollout`, or the result of `read_routing`.
        start: number of tokens at the beginning to omit.

    Returns:
        [T − 1 − start, H, K] in uint8 for up to 256 experts, otherwise in uint16. Blocks without routed experts have
        zeros. ``routing_rows(...).numpy()`` has the form of vLLM's ``CompletionOutput.routed_experts``. For the text
        that a server returns, use `encode_routing`.

    Raises:
        ValueError: ``experts`` has another shape, or a token other than the last has no experts.
    """
    indices, K = _layers_of(model, "routing_rows")
    if experts.dim() != 3 or list(experts.shape[1:]) != [len(indices), K]:
        raise ValueError(
            f"routing_rows: experts must be [tokens, {len(indices)}, {K}], got {list(experts.shape)}. Pass "
            "routed_experts of a completion."
        )
    rows = experts[start:-1].cpu()
    if (rows < 0).any():
        token = start + int((rows < 0).flatten(1).any(1).nonzero()[0])
        raise ValueError(
            f"routing_rows: experts must be known for every token but the last, got none for token {token}. "
            "Engines have no value for it; drop the tokens from there on."
        )
    blocks = torch.zeros(len(rows), len(model.layers), K, dtype=torch.int32, device="cpu")
    blocks[:, indices] = rows.to(torch.int32)
    return blocks.to(torch.uint8 if model.routers[0].num_experts <= 256 else torch.uint16)


def encode_routing(model: Decoder, experts: Tensor, engine: Literal["vllm", "sglang"], *, start: int = 0) -> str:
    """Return recorded experts as the text that a server of vLLM or SGLang returns.

    Args:
        model, experts, start: see `routing_rows`.
        engine: "vllm" for a .npy file in base64, "sglang" for int32 in base64.

    Raises:
        ValueError: ``engine`` is neither "vllm" nor "sglang"; see also `routing_rows`.
    """
    if engine not in ("vllm", "sglang"):
        raise ValueError(f"encode_routing: engine must be 'vllm' or 'sglang', got {engine!r}.")
    rows = routing_rows(model, experts, start=start)
    content = _write_npy(rows) if engine == "vllm" else _bytes_of(rows.to(torch.int32))
    return base64.b64encode(content).decode("ascii")


def _layers_of(model: Decoder, where: str) -> tuple[list[int], int]:
    """Return the indices of the blocks with routed experts, and K, the number of experts per token."""
    counts = [len(routed_layers(block)) for block in model.layers]
    if not any(counts) or max(counts) > 1 or not model.replays_routing:
        raise ValueError(
            f"{where}: model must have blocks with one layer of routed experts that replays routing, got "
            f"{type(model).__name__}."
        )
    return [index for index, count in enumerate(counts) if count], model.routers[0].top_k


def _decode(payload: Any, blocks: int, K: int) -> Tensor:
    """Decode an engine's payload into a tensor, usually [N, H, K]."""
    data, dtype, shape = payload, torch.int32, [-1, blocks, K]
    if isinstance(payload, Mapping):
        names = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
        absent = {"data", "shape", "dtype"} - payload.keys()
        if absent or payload["dtype"] not in names:
            raise ValueError(
                f"read_routing: payload must be a dict with data, shape and dtype (an integer type), got "
                f"{sorted(payload)} and dtype {payload.get('dtype')!r}."
            )
        data, dtype, shape = payload["data"], names[payload["dtype"]], list(payload["shape"])
    if not isinstance(data, str | bytes):
        rows = as_tensor(data)
        if rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
            raise ValueError(f"read_routing: payload must be integers, got {rows.dtype}.")
        return rows.cpu()
    if isinstance(data, str):
        try:
            data = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"read_routing: payload must be base64, got {payload!r:.40}: {error}.") from error
    if data.startswith(NPY):
        data, dtype, shape = _read_npy(data)
    if not data:
        return torch.empty(0, blocks, K, dtype=torch.int32, device="cpu")
    try:
        return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"read_routing: payload must be {dtype} of shape {shape}, got {len(data)} bytes. Sample with a checkpoint "
            "of this model."
        ) from error


def _read_npy(content: bytes) -> tuple[bytes, torch.dtype, list[int]]:
    """Return the data, dtype and shape of a .npy file.

    Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html.
    """
    try:
        wide = content[6] > 1  # from version 2 on, the length of the header has 4 bytes
        begin = 12 if wide else 10
        end = begin + struct.unpack_from("<I" if wide else "<H", content, 8)[0]
        header = ast.literal_eval(content[begin:end].decode("utf-8" if content[6] > 2 else "latin1"))
        dtype = {name: dtype for dtype, name in DTYPES.items()}[header["descr"]]
        shape = [int(size) for size in header["shape"]]
        is_transposed = header["fortran_order"]
    except (IndexError, KeyError, SyntaxError, TypeError, ValueError, struct.error) as error:
        raise ValueError(
            f"read_routing: payload must be a file .npy of integers, got a header that cannot be read: {error!r}."
        ) from error
    if is_transposed:
        raise ValueError("read_routing: payload must be in C order, got Fortran order. Save a contiguous array.")
    return content[end:], dtype, shape


def _write_npy(rows: Tensor) -> bytes:
    """Return the bytes of the .npy file that ``numpy.save`` writes for a tensor."""
    header = f"{{'descr': '{DTYPES[rows.dtype]}', 'fortran_order': False, 'shape': {tuple(rows.shape)}, }}"
    header += " " * (-(10 + len(header) + 1) % 64) + "\n"  # the data begin at a multiple of 64
    return NPY + b"\x01\x00" + struct.pack("<H", len(header)) + header.encode("latin1") + _bytes_of(rows)


def _bytes_of(rows: Tensor) -> bytes:
    rows = rows.contiguous()
    return ctypes.string_at(rows.data_ptr(), rows.nbytes) if rows.nbytes else b""
