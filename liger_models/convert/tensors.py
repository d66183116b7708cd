"""Conversion between a model in memory and the named tensors of a Hugging Face checkpoint, one tensor at a time."""

import contextlib
import dataclasses
import difflib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import compress
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from liger_models.convert.encodings import FLOATS, Encoding
from liger_models.convert.files import as_dtype, open_files, some
from liger_models.convert.format import format_of
from liger_models.convert.sharded import Part, fill_part, gather_to
from liger_models.convert.weight_map import Expression, WeightMap
from liger_models.distributed.ranks import raise_on_all_ranks, world_size
from liger_models.distributed.ranks import rank as this_rank
from liger_models.kernels.frozen.weight import FrozenWeight
from liger_models.layers.decoder import Decoder
from liger_models.layers.frozen import FrozenParameters, frozen_weights
from liger_models.layers.layer import Layer, named_layers
from liger_models.layers.linear import is_sharded


def hf_tensors(
    model: Decoder, dtype: torch.dtype | str | None = None, *, merge: bool = True, rank: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the model's weights, with the names and shapes of the tensors in a Hugging Face checkpoint.

    The tensors are bitwise identical to the tensors that `save_pretrained` writes. Weights that the model keeps
    quantized (``keep_quantized``) are an exception: this function yields them dequantized. The order is: the vision
    tower (if any), the embedding, the layers, the norm, and the head. A tied head is not yielded. The iterator can be
    passed to ``load_weights`` of vLLM and SGLang.

    If the model is sharded, all ranks must call this function and read the iterator to the end, because each parameter
    is gathered when its first tensor is read. At any time, memory holds only the model, one gathered parameter (at most
    the experts of a layer) and the last yielded tensor. Read all tensors before the next optimizer step. A yielded
    tensor may share memory with a parameter. Therefore, do not write to a yielded tensor, and copy each tensor that you
    keep.

    Args:
        model: the model, which may be sharded by `apply_fsdp`, ``fully_shard``, `apply_tp` or `apply_ep`.
        dtype: dtype of the tensors; None for the dtype of each parameter.
        merge: whether to add LoRA adapters to the yielded weights. The model does not change. If a tied head has an
            adapter, the merged head is yielded as a separate tensor, with a warning.
        rank: the only rank that gets the tensors. On all other ranks, the iterator sends the rank's shards and yields
            nothing, so these ranks need no memory for gathered parameters. Default: all ranks.

    Returns:
        An iterator over pairs of a name and a tensor. The tensors are contiguous and on the device of the parameters.

    Raises:
        ValueError: parameters are on the meta device or not in the weight map, ``dtype`` is not a supported dtype for
            weights, or there is no such ``rank``.
    """
    dtype = None if dtype is None else as_dtype("hf_tensors: dtype", dtype)
    _check_rank("hf_tensors", rank)
    stored = as_stored("hf_tensors", model, merge=merge).narrowed(model)
    return stored.unpack(stored.gather(rank), dtype)


def get_hf_state_dict(
    model: Decoder,
    dtype: torch.dtype | str | None = None,
    *,
    merge: bool = True,
    device: torch.device | str | None = None,
    rank: int | None = None,
) -> dict[str, Tensor]:
    """Return copies of all tensors that `hf_tensors` yields, in a dict. Further training does not change the copies.

    Args:
        model, dtype, merge: see `hf_tensors`. All ranks of a sharded model must call this function.
        device: device of the copies; None for the device of the parameters. On "meta", the tensors have shapes and
            dtypes but no values. Nothing is then gathered, and every rank gets the meta tensors.
        rank: the only rank that gets the tensors; other ranks get an empty dict. Default: all ranks.

    Raises:
        ValueError: see `hf_tensors`.
    """
    dtype = None if dtype is None else as_dtype("get_hf_state_dict: dtype", dtype)
    _check_rank("get_hf_state_dict", rank)
    stored = as_stored("get_hf_state_dict", model, merge=merge).narrowed(model)
    if device is not None and torch.device(device).type == "meta":
        return stored.shapes(dtype)

    # Copy the tensors that were not already copied by gathering or by moving to the device.
    plain = (tensor for tensor in map(_local, model.parameters()) if type(tensor) in (nn.Parameter, Tensor))
    storages = {tensor.untyped_storage().data_ptr() for tensor in plain}
    state = {}
    for name, tensor in stored.unpack(stored.gather(rank), dtype):
        moved = tensor.to(device)
        state[name] = moved.clone() if moved.untyped_storage().data_ptr() in storages else moved
    return state


def hf_gradients(
    model: Decoder, dtype: torch.dtype | str | None = None, *, rank: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the gradients, with the names and shapes that `hf_tensors` uses for the weights.

    Call this function after the backward and before the gradients are set to None. Parameters without a gradient, such
    as frozen parameters, are skipped. Adapters are skipped as well, because they have no name in a checkpoint. If the
    model is sharded, all ranks must call this function and read the iterator to the end. The yielded gradients are
    unsharded. Like the gradients that the optimizer uses, the yielded gradients are averaged over the ranks.

    Args:
        model: the model, which may be sharded by `apply_fsdp`, ``fully_shard``, `apply_tp` or `apply_ep`.
        dtype: dtype of the tensors; None for the dtype of each gradient.
        rank: see `hf_tensors`.

    Returns:
        An iterator over pairs of a name and a contiguous tensor. A tensor may share memory with the gradient of a
        parameter, so do not write to it.

    Raises:
        ValueError: no parameter of the checkpoint has a gradient; see also `hf_tensors`.
    """
    dtype = None if dtype is None else as_dtype("hf_gradients: dtype", dtype)
    _check_rank("hf_gradients", rank)
    stored = as_stored("hf_gradients", model, merge=False)
    parameters = stored.parameters.items()
    gradients = {name: parameter.grad.detach() for name, parameter in parameters if parameter.grad is not None}
    if len(gradients) == 0:
        if any(layer.adapted for _, layer in named_layers(model)):
            raise ValueError(
                "hf_gradients: weights of the checkpoint must have gradients, got a model whose adapters alone are "
                "trained, which have no name there. Read parameter.grad of model.named_parameters()."
            )
        raise ValueError(
            "hf_gradients: parameters of the model must have gradients, got none. Call it between backward and "
            "zero_grad."
        )
    gathered = ((name, _gather(gradient, rank)) for name, gradient in gradients.items())
    return stored.unpack(((name, whole) for name, whole in gathered if whole is not None), dtype)


def load_hf_tensors(model: Decoder, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
    """Load tensors with the names and shapes of a Hugging Face checkpoint into a model, in place.

    Parameters keep their dtype, device and sharding, so an optimizer that holds them stays valid. Adapters are not
    changed. If checkpoints of the model exist in several layouts, the tensors may have any of these layouts. If the
    model is sharded, all ranks must call this function, each with all tensors, and an error on one rank is raised on
    all ranks.

    An iterable is read one tensor at a time. This function keeps each tensor until it has read all tensors of the same
    parameter, so do not reuse the memory of a tensor before then. If the tensors are in the order of a checkpoint, only
    the tensors of one parameter are kept at a time. A mapping is checked before anything changes. An iterable is
    checked while it is read. After an error, the model may therefore have a mixture of old and new weights, in which
    case the error message says so.

    Args:
        model: the model, which may be sharded by `apply_fsdp`, ``fully_shard``, `apply_tp` or `apply_ep`.
        tensors: a mapping, or an iterable of pairs of a name and a tensor, such as `hf_tensors` of another model. The
            tensors may be on any device and have any floating-point dtype.

    Raises:
        ValueError: a tensor is missing, unexpected, duplicate or sharded, or has a wrong shape or dtype; a tied head
            differs from the embedding; or parameters are on the meta device.
    """
    stored = as_stored("load_hf_tensors", model, merge=False)
    config = stored.config
    frozen = stored.frozen
    if stored.kept:
        raise ValueError(
            "load_hf_tensors: weights must not be kept quantized, got a model that was loaded with keep_quantized. "
            "Load it without."
        )

    # Check a whole mapping before anything changes. An iterable can be read only once, so it is checked later.
    names = _Names(format_of(type(model)).weight_maps(config), {n: stored.dense(n) for n in stored.parameters})
    agreed = raise_on_all_ranks if stored.is_sharded else contextlib.nullcontext
    if isinstance(tensors, Mapping):
        with agreed():
            for name, tensor in tensors.items():
                names.accept(name, tensor)
            names.check_complete()
        names.read.clear()
        tensors = tensors.items()

    # Collect the tensors of each parameter, and write the parameter when its last tensor has been read.
    with torch.no_grad(), agreed():
        held: dict[str, dict[str, Tensor]] = {}  # name of a parameter -> its tensors read so far
        heads: dict[str, Tensor] = {}
        loaded: set[str] = set()
        try:
            for name, tensor in tensors:
                weights = names.accept(name, tensor)
                if weights.passes_over(name):
                    if config.tie_word_embeddings and name.endswith("lm_head.weight"):
                        heads[name] = tensor
                    continue
                ours, count = names.parameter_of(name)
                held.setdefault(ours, {})[name] = tensor
                if len(held[ours]) == count:
                    _place(stored.parameters[ours], frozen.get(ours), weights.entries[ours], held.pop(ours))
                    loaded.add(ours)
            names.check_complete()
            for name, head in heads.items():
                _check_head(name, head, stored.parameters["embed_tokens.weight"])
        except ValueError as error:
            if not loaded:
                raise
            raise ValueError(
                f"{error} {len(loaded)} of {len(stored.parameters)} parameters hold new weights already: load all "
                "again before you use the model."
            ) from error
    for weight in frozen.values():
        weight.finish()


class CheckpointTensors(NamedTuple):
    """The parameters of a model, and everything needed to compute a checkpoint's tensors from them.

    Attributes:
        config: a copy of the model's config, in which ``tie_word_embeddings`` says whether the head and the embedding
            are actually one tensor.
        weights: the weight map, which determines the names and shapes of the checkpoint's tensors.
        parameters: the parameters by their names in the model, in the order in which they are stored.
        adapted: maps the name of a parameter with adapters to the layer that has the adapters.
        merge: whether adapters are added to the weights.
        frozen: for each parameter that holds the codes of a quantized weight, maps the name of the parameter to the
            other tensors of the weight.
        encodings: how quantized tensors are stored, by name. Weights that are kept quantized are stored unchanged.
            Dense weights are encoded with the scales in the file, which must represent the values exactly. Tensors
            without an encoding are stored dense.
        dtypes: maps names of parameters to the dtypes in which they are stored, if these differ from the parameters'
            own dtypes.
    """

    config: Any
    weights: WeightMap
    parameters: dict[str, Tensor]
    adapted: dict[str, Layer]
    merge: bool
    frozen: dict[str, FrozenParameters]
    encodings: Mapping[str, Encoding] = MappingProxyType({})
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({})

    def narrowed(self, model: Decoder) -> "CheckpointTensors":
        """Return a copy of this object that stores parameters of `Layer.wide` in the dtypes of the loaded checkpoint.

        A parameter is stored in its checkpoint dtype only under two conditions: all parameters outside of `Layer.wide`
        have this dtype, and this dtype represents all values of the parameter exactly, as it does if the model was not
        trained. If the model is sharded, all ranks must call this function.
        """
        dtype = self.parameters["embed_tokens.weight"].dtype
        names = [name for name, read in model.read_dtypes.items() if name in self.parameters and read == dtype]
        fits = [_fits(self.parameters[name], dtype) for name in names]
        if names and self.is_sharded:
            answers: list[Any] = [None] * world_size()
            dist.all_gather_object(answers, fits)
            fits = [all(answer) for answer in zip(*answers, strict=True)]
        return self._replace(dtypes=dict.fromkeys(compress(names, fits), dtype))

    @property
    def is_sharded(self) -> bool:
        """Whether any parameter is sharded, so that all ranks must gather the parameters together."""
        return any(is_sharded(parameter) for parameter in self.parameters.values())

    @property
    def kept(self) -> list[str]:
        """The names of the parameters that are kept quantized with the scales from a checkpoint."""
        return [name for name in self.parameters if name in self.frozen and self.frozen[name].format.is_kept]

    def shapes(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Return the checkpoint's tensors on the meta device, in ``dtype``; None for each parameter's own dtype."""
        shapes = self.weights.shapes({name: self.dense(name, dtype) for name in self.parameters})
        for name, encoding in self.encodings.items():
            del shapes[name]
            shapes |= encoding.written()
        return shapes

    def names_of(self, name: str) -> list[str]:
        """Return the names of the tensors in which a parameter is stored."""
        tensors = ((theirs, self.encodings.get(theirs)) for theirs in self.weights.entries[name].names())
        return [part for theirs, encoding in tensors for part in (encoding.written() if encoding else [theirs])]

    def dense(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a parameter on the meta device, in ``dtype`` or its own dtype. If the parameter holds the codes of a
        quantized weight, return the dense weight."""
        like = self.frozen.get(name) or self.parameters[name]
        return torch.empty(like.shape, dtype=dtype or self.dtypes.get(name, like.dtype), device="meta")

    def gather(self, reader: int | Callable[[str], int | None] | None = None) -> Iterator[tuple[str, Any]]:
        """Yield the name and the gathered value of each parameter. With ``merge``, adapters are added to the value.

        Args:
            reader: the only rank that gets the values, or a function that takes a parameter's name and returns the
                only rank that gets its value. The function must return the same result on all ranks. With None, all
                ranks get all values.
        """
        for name, parameter in self.parameters.items():
            rank = reader(name) if callable(reader) else reader
            whole = {part: _gather(tensor, rank) for part, tensor in self._sharded_as(name, parameter).items()}
            if rank is None or rank == this_rank():
                # Only the reader may hold references to the values, so that their memory is freed when the reader
                # drops them.
                values = self._values(name, whole)
                whole.clear()
                while values:
                    yield values.pop(0)

    def _sharded_as(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        """Return the tensors that must be gathered before the value of a parameter can be computed from them."""
        layer, weight = self.adapted.get(name), self.frozen.get(name)
        if layer is not None:
            attribute = name.rpartition(".")[2]
            return {
                f"layer.{member}": tensor.detach()
                for member, tensor in layer.named_parameters()
                if is_sharded(tensor) and (member == attribute or member.startswith(("lora.", "stored.")))
            }
        return {"": parameter.detach()} if weight is None else weight.tensors(parameter.detach())

    def _values(self, name: str, whole: dict[str, Any]) -> list[tuple[str, Any]]:
        """Compute the value of a parameter from its gathered tensors."""
        layer, weight = self.adapted.get(name), self.frozen.get(name)
        if layer is not None:
            # The layer computes the weight. For this call, the layer's shards are replaced with gathered tensors.
            adapted = _AdaptedWeight(layer, name.rpartition(".")[2], self.merge)
            return [(name, torch.func.functional_call(adapted, whole, ()))]
        if weight is None:
            return [(name, whole[""])]
        frozen = weight.of_gathered(whole)
        is_stored = weight.format.is_kept and self.encodings.keys() >= {*self.weights.entries[name].names()}
        return [(name, frozen if is_stored else frozen.dense())]

    def unpack(self, gathered: Iterator[tuple[str, Any]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Convert the values that `gather` yields to contiguous checkpoint tensors in ``dtype``."""
        # After the reader has dropped a tensor, no local variable may refer to the tensor, so that its memory is freed.
        for ours, whole in gathered:
            tensors = self._unpacked(self.weights.entries[ours], whole)
            del whole
            target = dtype or self.dtypes.get(ours)
            while tensors:
                name = next(iter(tensors))
                tensor = tensors.pop(name)
                yield name, _contiguous(tensor.to(target) if tensor.is_floating_point() else tensor)
                del tensor

    def _unpacked(self, expression: Expression, whole: Tensor | FrozenWeight) -> dict[str, Tensor]:
        """Convert the value of a parameter to the tensors in the file, by name."""
        if isinstance(whole, FrozenWeight):
            parts = {part: expression.unpack(tensor) for part, tensor in whole.format.pack(whole).items()}
            written = (
                self.encodings[name].write({part: tensors[name] for part, tensors in parts.items()})
                for name in expression.names()
            )
            return {name: tensor for tensors in written for name, tensor in tensors.items()}
        tensors = expression.unpack(whole)
        for name in [name for name in tensors if name in self.encodings]:
            with open_files() as files:
                encoded = self.encodings[name].encode(files, tensors.pop(name))
            if encoded is None:
                raise ValueError(
                    f"{name}: the values must be those of the checkpoint in {self.encodings[name].format.upper()}, got "
                    "others. They were trained or merged: save without mxfp4."
                )
            tensors |= encoded
        return tensors


def _fits(parameter: Tensor, dtype: torch.dtype) -> bool:
    """Return whether ``dtype`` represents all values of this rank's part of a parameter exactly."""
    values = _local(parameter).detach()
    return values.device.type != "meta" and torch.equal(values.to(dtype).to(values.dtype), values)


def _contiguous(tensor: Tensor) -> Tensor:
    """Return ``tensor.contiguous()``. If possible, copy 16 bytes at a time.

    If rows are not adjacent in memory, PyTorch copies them element by element. Copying larger elements is faster.
    """
    # Rows must be aligned to 16 bytes, the size of complex128, and their length must be a multiple of 16 bytes.
    wide = 16 // tensor.itemsize
    sizes = (*tensor.shape[-1:], *tensor.stride()[:-1], tensor.storage_offset())
    if tensor.is_contiguous() or tensor.stride(-1) != 1 or any(size % wide for size in sizes):
        return tensor.contiguous()
    return tensor.view(torch.complex128).contiguous().view(tensor.dtype)


def is_tied(head: Tensor, embedding: Tensor) -> bool:
    """Return whether a head and an embedding, sharded or not, are the same tensor."""
    return head is embedding or _local(head).data_ptr() == _local(embedding).data_ptr() != 0


def as_stored(
    where: str, model: Decoder, *, merge: bool, parameters: Mapping[str, Tensor] | None = None
) -> CheckpointTensors:
    """Collect the model's parameters that a checkpoint contains. Parameters that FSDP has left gathered are resharded
    first.

    Args:
        where: name of the calling function, for error messages.
        model: the model.
        merge: whether adapters are added to the weights.
        parameters: tensors by name to use instead of the model's parameters.

    Raises:
        ValueError: parameters are on the meta device or not in the weight map.
    """
    if not isinstance(model, Decoder):
        raise ValueError(
            f"{where}: model must be one of this package, got {type(model).__name__}. Pass the model inside of it "
            "(DistributedDataParallel: model.module; LigerMedusa: model.model)."
        )
    for module in model.modules() if parameters is None else ():
        reshard: Any = getattr(module, "reshard", None)
        if reshard is not None:  # after an evaluation, FSDP leaves weights gathered
            reshard()

    # `stored` has all names of tied parameters, and `once` only the first name of each.
    once = dict(model.named_parameters() if parameters is None else parameters)
    stored = dict(model.named_parameters(remove_duplicate=False) if parameters is None else parameters)
    absent = [name for name, parameter in stored.items() if parameter.is_meta]
    if absent:
        raise ValueError(
            f"{where}: parameters must hold weights, got {some(absent)} on the meta device. Load or initialize the "
            "model first."
        )

    # The weights, not the config, determine whether the head is tied. With a merged adapter, the head is a separate
    # tensor.
    layers = {path: layer for path, layer in named_layers(model) if layer.adapted}
    head, embedding = stored.get("lm_head.weight"), stored["embed_tokens.weight"]
    tied = head is None or is_tied(head, embedding)
    tied = tied and not (merge and "lm_head" in layers)
    if tied != model.config.tie_word_embeddings:
        warnings.warn(
            f"{where}: tie_word_embeddings is {model.config.tie_word_embeddings} in the config, but lm_head and "
            f"embed_tokens are {'one tensor' if tied else 'two tensors'}. Taken as they are, with tie_word_embeddings "
            f"{tied}.",
            stacklevel=4,
        )
    config = dataclasses.replace(model.config, tie_word_embeddings=tied)
    if tied:
        stored.pop("lm_head.weight", None)

    # Take the parameters that are in the weight map. Adapters and the additional tensors of frozen weights are left
    # out. Any other parameter is an error.
    weights = format_of(type(model)).weight_map(config)
    frozen = {} if parameters is not None else frozen_weights(model)
    added = tuple(f"{path}.lora." for path in layers)
    added += tuple(f"{name.rpartition('.')[0]}.stored." for name in frozen)
    stored = {
        name: parameter
        for name, parameter in stored.items()
        if name in weights.entries or (name in once and not name.startswith(added))
    }
    extra = sorted(stored.keys() - weights.entries.keys())
    if extra:
        raise ValueError(
            f"{where}: every parameter must have a name in a checkpoint of {type(model).__name__}, got {some(extra)}. "
            "Save LoRA adapters with save_adapter, or merge them with merge_lora; remove other additions."
        )
    adapted = {f"{path}.{name}": layer for path, layer in layers.items() for name in layer.adapted}
    return CheckpointTensors(config, weights, stored, adapted, merge, frozen)


class _AdaptedWeight(nn.Module):
    """A module whose forward computes a parameter with adapters. With `functional_call`, the forward reads gathered
    tensors instead of the shards."""

    def __init__(self, layer: Layer, name: str, merge: bool) -> None:
        super().__init__()
        self.layer, self.name, self.merge = layer, name, merge

    def forward(self) -> Tensor:
        return self.layer.adapted_weight(self.name, merge=self.merge)


class _Names:
    """Finds the weight map that fits the tensors of a checkpoint, which are read one by one.

    Each tensor that is read rules out the weight maps that have no tensor of the same name and shape.
    """

    def __init__(self, maps: list[WeightMap], parameters: Mapping[str, Tensor]) -> None:
        empty = {name: torch.empty(parameter.shape, device="meta") for name, parameter in parameters.items()}
        self.layouts = [(weights, weights.shapes(empty), *_owners(weights)) for weights in maps]
        self.read: set[str] = set()

    def accept(self, name: str, tensor: Tensor) -> WeightMap:
        """Return a weight map that fits this tensor and all tensors that were read before.

        Raises:
            ValueError: no weight map fits, or the tensor was already read.
        """
        where = "load_hf_tensors"
        if not isinstance(tensor, Tensor) or is_sharded(tensor) or tensor.dtype not in FLOATS.values():
            raise ValueError(
                f"{where}: {name} must be a whole tensor of one of the dtypes {', '.join(map(str, FLOATS.values()))}, "
                f"got {type(tensor).__name__} {getattr(tensor, 'dtype', '')}. Gather or dequantize it."
            )

        # Find the layouts that have this name, and among these the layouts that have this shape.
        named = [layout for layout in self.layouts if name in layout[1] or layout[0].passes_over(name)]
        if not named:
            similar = difflib.get_close_matches(name, self.layouts[0][1], n=1)
            hint = f" Did you mean {similar[0]}?" if similar else ""
            raise ValueError(f"{where}: tensors must have the names in a checkpoint of the model, got {name}.{hint}")
        fitting = [layout for layout in named if name not in layout[1] or layout[1][name].shape == tensor.shape]
        if not fitting:
            raise ValueError(
                f"{where}: {name} must have shape {tuple(named[0][1].get(name, tensor).shape)}, got "
                f"{tuple(tensor.shape)}. Pass the weights of a model with the same config."
            )
        if name in self.read:
            raise ValueError(f"{where}: each tensor must be given once, got {name} twice.")

        # Keep only the layouts that match all tensors so far.
        self.layouts = fitting
        self.read.add(name)
        return fitting[0][0]

    def parameter_of(self, name: str) -> tuple[str, int]:
        """Return the name of the parameter that a checkpoint tensor belongs to, and the number of tensors that form
        this parameter."""
        _, _, owners, counts = self.layouts[0]
        return owners[name], counts[owners[name]]

    def check_complete(self) -> None:
        """Raise ValueError unless all tensors of the weight map have been read."""
        missing = [name for name in self.layouts[0][1] if name not in self.read]
        if missing:
            raise ValueError(
                "load_hf_tensors: all tensors of a checkpoint of the model must be given, got none of the name "
                f"{some(missing)}. Pass the weights of a model with the same config."
            )


def _owners(weights: WeightMap) -> tuple[dict[str, str], Counter[str]]:
    """Return a dict that maps each checkpoint tensor to its parameter, and the number of tensors of each parameter."""
    owners = {name: ours for ours, expression in weights.entries.items() for name in expression.names()}
    return owners, Counter(owners.values())


def _local(tensor: Any) -> Tensor:
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def _full(tensor: Any) -> Tensor:
    """Gather a DTensor on the device of its mesh; return any other tensor unchanged."""
    if not is_sharded(tensor):
        return tensor  # type: ignore[no-any-return]
    # FSDP with cpu_offload keeps shards on the CPU, which the backend of the mesh may not support.
    whole: Tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()
    return whole


def _gather(tensor: Any, rank: int | None) -> Tensor | None:
    """Gather a tensor on all ranks, or only on ``rank``. Ranks that do not get the tensor return None."""
    if rank is None:
        return _full(tensor)
    if is_sharded(tensor):
        return gather_to(rank, tensor)
    return tensor if rank == this_rank() else None


def _check_rank(where: str, rank: int | None) -> None:
    """Raise ValueError unless ``rank`` is None or a rank of the default process group."""
    if rank is not None and not (type(rank) is int and 0 <= rank < world_size()):
        raise ValueError(f"{where}: rank must be 0 to {world_size() - 1}, or None for all ranks, got {rank!r}.")


def _place(
    parameter: Any, weight: FrozenParameters | None, expression: Expression, tensors: Mapping[str, Tensor]
) -> None:
    """Copy the checkpoint's tensors into a parameter. If the parameter is sharded, copy only this rank's rows.

    If the parameter holds the codes of a quantized weight, ``weight`` has the weight's other tensors, and this function
    quantizes the checkpoint's tensors.
    """
    local = _local(parameter)
    dtype = local.dtype if weight is None else None

    def whole() -> Tensor:
        return expression.pack({name: tensor.to(local.device, dtype) for name, tensor in tensors.items()})

    if not is_sharded(parameter) and weight is None:
        quantize = getattr(local, "from_hp", None)  # for float8 weights of torchao, whose copy_ does not quantize
        local.copy_(whole() if quantize is None else quantize(whole()))
        return

    def read(name: str, first: int, last: int) -> Tensor:
        return tensors[name][first:last].to(local.device, dtype)

    fill_part(parameter, weight, expression, {name: tensor.shape for name, tensor in tensors.items()}, read, whole)


def _check_head(name: str, head: Tensor, embedding: Any) -> None:
    """Raise ValueError if the given head differs from the embedding to which the model ties its head."""
    local, same_shape = _local(embedding), head.shape == embedding.shape
    if same_shape and is_sharded(embedding):
        offset, shape = Part.of(embedding)
        for dim in range(head.dim()):
            head = head.narrow(dim, offset[dim], shape[dim])
    if not same_shape or not torch.equal(head.to(local.device, local.dtype), local):
        raise ValueError(
            f"load_hf_tensors: {name} must be equal to the embedding, which the model's head is tied to, got another "
            "tensor. Leave it out, or load into a model whose config has tie_word_embeddings=False."
        )
