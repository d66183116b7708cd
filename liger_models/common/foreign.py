"""Keyword arguments that transformers has, and that this package lacks or names differently.

For each of these arguments, this module has a translation to this package's arguments, or advice for the user.
"""

import difflib
import functools
import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class Foreign(NamedTuple):
    """How one keyword argument of transformers is translated. An argument whose value is None is always dropped.

    Attributes:
        todo: advice for the user, which is part of the error message.
        defaults: values that request this package's default behavior. An argument with one of these values is dropped.
        rename: name of the equivalent argument in this package; empty if there is none.
        convert: function that maps transformers' value to the value for ``rename``, or to None if the value is
            unsupported.
    """

    todo: str
    defaults: tuple[object, ...] = ()
    rename: str = ""
    convert: Callable[[Any], Any] = lambda value: value


def _device(value: Any) -> Any:
    """Return the device of a ``device_map`` with one device, or None if the map has several devices or is invalid."""
    import torch

    from liger_models.common.device import available_device

    if isinstance(value, Mapping):
        value = value[""] if value.keys() == {""} else "several"
    if value == "auto":
        return available_device("device_map")
    try:
        return torch.device(value)
    except (RuntimeError, TypeError):
        return None


_FOUR_BITS = "Load the model, add adapters with apply_lora if it is to be trained, and call quantize_base (NF4)."
_SHARD = "To spread a model over GPUs, pass shard=apply_fsdp on all ranks."
_KERNELS = "Pass kernels=KernelOptions(...), which has a field of this name; its swiglu is for GeGLU, too."
_CACHE = "Pass cache=DecodeCache(tokens); without it generate makes its own cache."
_GENERATE = "The models of liger_models.hf have all arguments of transformers' generate."
_OUTPUT = "Pass return_logprobs=True, or call the model on the tokens that generate returned."

FOREIGN = {
    # Loading
    "torch_dtype": Foreign("Pass dtype.", rename="dtype"),
    "device_map": Foreign(f'Pass device="cuda". {_SHARD}', rename="device", convert=_device),
    "attn_implementation": Foreign(
        "There is nothing to choose: PyTorch's fastest kernel for the masks of the batch runs.",
        ("sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"),
    ),
    "load_in_4bit": Foreign(_FOUR_BITS, (False,)),
    "load_in_8bit": Foreign(_FOUR_BITS, (False,)),
    "quantization_config": Foreign(_FOUR_BITS),
    "trust_remote_code": Foreign("Leave it out: no code of a checkpoint is ever run.", (True, False)),
    "low_cpu_mem_usage": Foreign("Leave it out: weights are always loaded one by one.", (True, False)),
    "use_safetensors": Foreign("Leave it out: only safetensors are read.", (True,)),
    "use_auth_token": Foreign("Pass token.", rename="token"),
    "max_memory": Foreign(_SHARD),
    "offload_folder": Foreign(_SHARD),
    "tp_plan": Foreign("Pass shard=lambda model: apply_tp(model, ...)."),
    "ignore_mismatched_sizes": Foreign("Load the model, then call resize_token_embeddings.", (False,)),
    "state_dict": Foreign("Build the model with from_config, then call load_hf_tensors."),
    "safe_serialization": Foreign("Leave it out: only safetensors are written.", (True,)),
    "is_main_process": Foreign("Leave it out: only rank 0 writes.", (True,)),
    # Loading with Liger Kernel
    **dict.fromkeys(("rope", "rms_norm", "layer_norm", "swiglu", "geglu"), Foreign(_KERNELS, (True,))),
    "cross_entropy": Foreign(_KERNELS, (False,)),
    "fused_linear_cross_entropy": Foreign(_KERNELS, (True,)),
    # Forward
    "use_cache": Foreign(_CACHE, (False,)),
    "past_key_values": Foreign(_CACHE),
    "cache_position": Foreign(_CACHE),
    "return_dict": Foreign('The output is a named tuple: use out.loss, out["loss"] or out[0].', (True,)),
    "output_attentions": Foreign("Attention weights never exist as a whole; transformers computes them.", (False,)),
    "output_router_logits": Foreign("Router logits are always returned; the loss follows config.output_router_logits."),
    "num_logits_to_keep": Foreign("Pass logits_to_keep.", rename="logits_to_keep"),
    # Generation
    "max_length": Foreign("Pass max_new_tokens, which does not count the prompt."),
    "inputs": Foreign("Pass input_ids."),
    "streamer": Foreign("Iterate over model.stream(...), which takes the same arguments."),
    "generation_config": Foreign("Pass its entries as arguments; those of the checkpoint are the defaults."),
    "num_beams": Foreign(_GENERATE, (1,)),
    "min_length": Foreign("Pass min_new_tokens, which does not count the prompt.", (0,)),
    "stopping_criteria": Foreign(f"Break out of a loop over model.stream(...). {_GENERATE}"),
    "assistant_model": Foreign("Pass draft_model.", rename="draft_model"),
    "num_assistant_tokens": Foreign("Pass num_draft_tokens.", rename="num_draft_tokens"),
    "prompt_lookup_num_tokens": Foreign(_GENERATE),
    "synced_gpus": Foreign(_GENERATE, (False,)),
    "return_dict_in_generate": Foreign(_OUTPUT, (False,)),
    "output_scores": Foreign(_OUTPUT, (False,)),
    "output_logits": Foreign(_OUTPUT, (False,)),
    # Tokenizers
    "use_fast": Foreign("Leave it out: every tokenizer is a tokenizer.json.", (True,)),
    "padding": Foreign(
        "Batches are always padded to the longest text; encode and apply_chat_template return lists without padding.",
        (True, "longest"),
    ),
    "pad_to_multiple_of": Foreign("Pad the ids yourself: torch.nn.functional.pad."),
    "return_tensors": Foreign('Batches are always tensors of PyTorch ("pt"); encode returns lists.', ("pt",)),
    "return_attention_mask": Foreign("The mask is always returned.", (True,)),
    "return_token_type_ids": Foreign("Leave it out: no model here reads them.", (False,)),
    "return_offsets_mapping": Foreign("tokenizer.backend.encode(text).offsets has them.", (False,)),
    "return_special_tokens_mask": Foreign("tokenizer.backend.encode(text).special_tokens_mask has it.", (False,)),
    "return_assistant_tokens_mask": Foreign("Call render_answers and answer_mask.", (False,)),
    "clean_up_tokenization_spaces": Foreign("tokenizer_config.json decides it."),
    "text_pair": Foreign("Join the texts first."),
    "text_target": Foreign("Encode the target like any other text."),
    "model_max_length": Foreign("Pass max_length with truncation=True when you call the tokenizer."),
    "filename_prefix": Foreign("Save to a folder of its own."),
}  # fmt: skip
"""Maps the name of each argument of transformers to its `Foreign` entry."""


def translate(function: str, given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Rename transformers' keyword arguments to this package's names, and drop arguments that change nothing.

    Args:
        function: name of the called function, for error messages.
        given: maps the names of the keyword arguments that the caller passed to their values.
        known: names of the arguments that the function itself accepts.

    Raises:
        TypeError: an argument or its value is not supported.
    """
    accepted = {name: value for name, value in given.items() if name in known}
    for name, value in given.items():
        if name in known:
            continue
        # Drop an argument of transformers if its value requests the default, and rename it if it has an equivalent.
        foreign = FOREIGN.get(name)
        if foreign is not None:
            if value is None or (isinstance(value, str | int | float) and value in foreign.defaults):
                continue
            converted = foreign.convert(value) if foreign.rename in known else None
            if converted is not None:
                if foreign.rename in accepted:
                    raise TypeError(f"{function}: {name} and {foreign.rename} are the same, got both. Pass one.")
                accepted[foreign.rename] = converted
                continue
        # Any other argument is an error. For an argument of transformers, the message has advice. For others, it
        # suggests the most similar known name.
        near = difflib.get_close_matches(name, known, n=1)
        todo = f"Did you mean {near[0]}?" if near else f"It takes {', '.join(known)}."
        got = f" = {value!r}" if isinstance(value, str | int | float) else ""
        raise TypeError(
            f"{function}: got an unexpected keyword argument {name!r}{got}. {todo if foreign is None else foreign.todo}"
        )
    return accepted


def foreign_arguments(name: str) -> Callable[[Function], Function]:
    """Return a decorator for a method. The decorated method also accepts the arguments in `FOREIGN`, but keeps its
    signature.

    Args:
        name: name of the method in error messages.
    """

    def decorate(function: Function) -> Function:
        _, *known = inspect.signature(function).parameters
        names = frozenset(known)

        @functools.wraps(function)
        def translated(*args: Any, **options: Any) -> Any:
            for option in options:
                if option not in names:
                    return function(*args, **translate(name, options, known))
            return function(*args, **options)

        return translated  # type: ignore[return-value]

    return decorate


def is_hub_name(folder: str | os.PathLike[str]) -> bool:
    """Return whether ``folder`` has the form of a repository's name on the hub (``owner/name``) and is not an existing
    path."""
    return isinstance(folder, str) and not os.path.exists(folder) and bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", folder))
