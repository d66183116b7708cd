"""Writes a model and its tokenizer as a GGUF file for llama.cpp.

The layout follows llama.cpp's script ``convert_hf_to_gguf.py``. The script's class for an architecture shows what
metadata llama.cpp reads, and which tensors must have other values than in the Hugging Face checkpoint. The package
``gguf`` provides the names, the quantizers and the writer.
"""

import hashlib
import itertools
import json
import math
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_models.convert.config_map import write_config
from liger_models.convert.files import CONFIG, write_json
from liger_models.convert.folder import reporting, reserved
from liger_models.convert.format import format_of
from liger_models.convert.tensors import CheckpointTensors, as_stored
from liger_models.distributed.ranks import run_on_rank_zero
from liger_models.layers.decoder import Decoder
from liger_models.layers.layer import named_layers
from liger_models.layers.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RotaryEmbedding,
    YarnScaling,
    longrope_attention_factor,
    yarn_attention_factor,
    yarn_mscale,
)

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

QUANTIZATIONS = ("q8_0", "f16", "bf16")
"""The data types in which `save_gguf` can write matrices."""

ARCHITECTURES = {
    "gemma": "GEMMA",
    "gemma2": "GEMMA2",
    "gemma3_text": "GEMMA3",
    "llama": "LLAMA",
    "mistral": "LLAMA",
    "phi3": "PHI3",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
}
"""Maps each ``model_type`` that `save_gguf` can write to its name in ``gguf.MODEL_ARCH``."""

_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
"""Maps a ``model_type`` to the number of layers of the 27B model. If a model has this number of layers, llama.cpp
scales attention scores by (hidden size / number of heads)^-0.5 instead of (head size)^-0.5.
"""

_PERIOD = {"gemma2": 2, "gemma3_text": 6}
"""Maps a ``model_type`` to a number n. In llama.cpp, one of every n layers has no attention window."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PRE_TOKENIZERS: dict[tuple[tuple[str, ...], bool], str] = {
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "dbrx",
    ((_QWEN2,), False): "qwen2",
    ((_TEKKEN,), True): "tekken",
    ((_GPT4O,), False): "gpt-4o",
    (("ByteLevel",), False): "gpt-2",
    (("Digits", "ByteLevel"), False): "smollm",
}
"""Maps (the steps of a pre-tokenizer, ``ignore_merges`` of the BPE model) to llama.cpp's name for the pre-tokenizer."""

PROBE = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶\u200d🌫️ (multiple emojis concatenated) ✅ 🦙🦙 "
    "3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 "
    "?我想在apple工作1314151天\uff5e ------======= нещо на Български ''''''```````\"\"\"\"......!!!!!!?????? "
    "I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, 'D you like some tea? We'Ve a'lL"
)
"""A text whose token ids identify the pre-tokenizer of a released model. llama.cpp's converter uses the same text."""

RELEASED = {
    "0ef9807a4087ebef797fc749390439009c3b9eda9ad1a097abbe738f486c01e5": "llama-bpe",
    "c136ed14d01c2745d4f60a9596ae66800e2b61fa45643e72436041855ad4089d": "smaug-bpe",
    "a8594e3edff7c29c003940395316294b2c623e09894deebbc65f33f1515df79e": "dbrx",
    "e636dc30a262dcc0d8c323492e32ae2b70728f4df7dfe9737d9f920a282b8aea": "qwen2",
    "d4540891389ea895b53b399da6ac824becc30f2fba0e9ddbb98f92e55ca0e97c": "qwen2",
    "b3f499bb4255f8ca19fccd664443283318f2fd2414d5e0b040fbdd0cc195d6c5": "deepseek-r1-qwen",
    "049ecf7629871e3041641907f3de7c733e4dbfdc736f57d882ba0b0845599754": "deepseek-llm",
    "347715f544604f9118bb75ed199f68779f423cabb20db6de6f31b908d04d7821": "deepseek-coder",
    "63b97e4253352e6f357cc59ea5b583e3a680eaeaf2632188c2b952de2588485e": "tekken",
    "0e9433cbbb161f89e264eb32e8e64bfe69e834973ffca5d41d3948a604a3e2a3": "pixtral",
    "9d032fcbd5501f4a38150912590928bfb36091efb5df11b8e2124b0390e3fb1e": "falcon3",
    "855059429035d75a914d1eda9f10a876752e281a054a7a3d421ef0533e5b6249": "smollm",
    "ccc2ef013c104be7bae2965776d611e1d7a8a2a9c547dd93a682c9a9fc80352e": "gpt-4o",
}
"""Maps the SHA-256 of `PROBE`'s token ids, written as a Python list, to llama.cpp's name for the pre-tokenizer."""


def save_gguf(model: Decoder, file: str | os.PathLike[str], quantization: str, *, name: str | None = None) -> None:
    """Write a model and its tokenizer as a GGUF file for llama.cpp.

    The file is written next to its target and renamed when it is complete. If a process is killed, the next call with
    the same target removes the files that the killed process left behind. Norms, biases and other one-dimensional
    tensors are written in float32, and matrices in the given type. In q8_0, the row length of a matrix must be a
    multiple of 32. Matrices with other row lengths are then written in f16, as in llama.cpp's converter.

    In a process group, only rank 0 writes, and the other ranks wait for it.

    Args:
        model: the model, whose tokenizer.json must have been loaded with it. Its ``model_type`` must be one of
            `ARCHITECTURES`.
        file: the file, whose name ends in .gguf. An existing file is replaced.
        quantization: the data type of the matrices, "q8_0", "f16" or "bf16".
        name: name of the model in the metadata. Default: the name of the file without .gguf.

    Raises:
        ImportError: the package ``gguf`` is not installed.
        ValueError: the family, a setting of the config, or the tokenizer has no equivalent in llama.cpp; the weights
            are quantized or sharded, have adapters, or do not fit into float16; there is no tokenizer.json, or it has
            more tokens than the embedding has rows; or an argument is wrong.
        OSError: the file cannot be written.
    """
    path = check_target(file, quantization)
    import gguf

    family = format_of(type(model)).model_type
    if family not in ARCHITECTURES:
        raise ValueError(
            f"save_gguf: model must be one of {', '.join(ARCHITECTURES)}, got {family}. Save it with save_pretrained, "
            "and convert the folder with llama.cpp's convert_hf_to_gguf.py."
        )
    stored = as_stored("save_gguf", model, merge=False)
    _check_weights(model, stored)
    _check_config(family, stored.config)

    def write() -> None:
        with reporting(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with reserved(path.parent / f".{path.name}.saving", path) as place, reporting(path):
            # The package gguf reads special tokens, the chat template and the model card from a folder.
            folder = place / (name or path.stem)
            folder.mkdir()
            for asset, content in model.current_assets().items():
                (folder / asset).write_bytes(content)
            write_json(folder / CONFIG, write_config(stored.config, model.hf_config, model.dtype))
            writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[ARCHITECTURES[family]]])
            _add_config(writer, family, stored.config, json.loads((folder / CONFIG).read_text()))
            _add_tokenizer(writer, model, stored.config.vocab_size, folder)
            _write(writer, family, stored, quantization, folder, place / "new.gguf")
            os.replace(place / "new.gguf", path)

    run_on_rank_zero(f"save_gguf {path}", write)


def check_target(file: str | os.PathLike[str], quantization: str) -> Path:
    """Return the path that `save_gguf` writes to. Raise ImportError or ValueError as `save_gguf` does."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "save_gguf: needs the package gguf, which is not installed. Run: pip install 'liger_models[gguf]'"
        ) from error
    if quantization not in QUANTIZATIONS:
        raise ValueError(
            f"save_gguf: quantization must be one of {', '.join(QUANTIZATIONS)}, got {quantization!r}. Choose one of "
            "them; llama-quantize makes smaller files of a bf16 file."
        )
    path = Path(os.path.realpath(file))
    if path.suffix != ".gguf" or path.is_dir():
        raise ValueError(
            f"save_gguf: file must be a file whose name ends in .gguf, got {path}{' (a folder)' * path.is_dir()}. "
            "Choose another name."
        )
    return path


def _check_weights(model: Any, stored: CheckpointTensors) -> None:
    """Raise ValueError unless all weights are unsharded and dense, and the model has a head and a tokenizer."""
    problem = ""
    if any(layer.adapted for _, layer in named_layers(model)):
        problem = "must not have adapters, got some. Merge them with merge_lora."
    elif stored.frozen:
        problem = f"must have dense weights, got quantized ones, such as {next(iter(stored.frozen))}. Load it dense."
    elif stored.is_sharded:
        problem = "must not be sharded. Save it with save_pretrained, and convert the folder in one process."
    elif not model.has_head or model.bidirectional:
        problem = "must be a causal language model with its head, got an embedding model. Load the whole model."
    elif "tokenizer.json" not in model.current_assets():
        problem = (
            "must have a tokenizer.json, got none. Write one with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
        )
    if problem:
        raise ValueError(f"save_gguf: model {problem}")


def _check_config(family: str, config: Any) -> None:
    """Raise ValueError for settings that llama.cpp does not support. Warn about settings that llama.cpp ignores."""

    def refuse(setting: str, must: str) -> None:
        raise ValueError(
            f"save_gguf: {setting} must be {must} for {family}, because llama.cpp has nothing else, got "
            f"{getattr(config, setting, None)!r}. Use another engine; save_pretrained writes the model for vLLM."
        )

    # Rotary frequencies.
    scaling, allowed = config.rope_scaling, [LinearScaling, YarnScaling]
    if family in ("llama", "mistral"):
        allowed.append(Llama3Scaling)
    if family == "phi3":
        allowed = [LongRopeScaling]
    if scaling is not None and type(scaling) not in allowed:
        refuse("rope_scaling", f"null or {' or '.join(kind.__name__ for kind in allowed)}")
    if isinstance(scaling, YarnScaling):
        plain = yarn_mscale(scaling.factor, 1.0)
        if not scaling.truncate or not math.isclose(yarn_attention_factor(scaling), plain):
            refuse("rope_scaling", f"YarnScaling with truncate and an attention_factor of {plain}")
    if isinstance(scaling, LongRopeScaling) and (scaling.short_mscale or scaling.long_mscale):
        refuse("rope_scaling", "LongRopeScaling without short_mscale and long_mscale")

    # Attention and its windows.
    if getattr(config, "use_bidirectional_attention", None):
        refuse("use_bidirectional_attention", "false")
    if family not in ("llama", "qwen2") and getattr(config, "attention_bias", False):
        refuse("attention_bias", "false")
    layers = config.num_hidden_layers
    if family in _PERIOD:
        wide = layers == _LAYERS_OF_27B[family]
        expected = config.hidden_size // config.num_attention_heads if wide else config.head_size
        if config.query_pre_attn_scalar != expected:
            refuse("query_pre_attn_scalar", str(expected))
        windows = [bool((layer + 1) % _PERIOD[family]) for layer in range(layers)]
        if config.sliding_window is None or [_is_sliding(config, layer) for layer in range(layers)] != windows:
            refuse("layer_types", f"sliding_attention except in every layer {_PERIOD[family]} of {_PERIOD[family]}")
        for setting in ("attn_logit_softcapping", "final_logit_softcapping"):
            if family == "gemma2" and getattr(config, setting) is None:
                refuse(setting, "a number")
    elif family in ("mistral", "phi3", "qwen2", "qwen3"):
        lengths = [config.sliding_window] if family == "phi3" else list(map(config.window, range(layers)))
        window = next((length for length in lengths if length is not None), None)
        if window is not None and window < config.max_position_embeddings:
            warnings.warn(
                f"save_gguf: llama.cpp has no sliding window for {family}: the model's answers to texts longer than "
                f"{window} tokens differ there.",
                stacklevel=4,
            )
    if family in ("gemma", "gemma2") and not config.tie_word_embeddings:
        refuse("tie_word_embeddings", "true")


def _is_sliding(config: Any, layer: int) -> bool:
    """Return whether a layer of Gemma 2 or 3 uses sliding-window attention."""
    if hasattr(config, "layer_type"):
        return bool(config.layer_type(layer) == "sliding_attention")
    return config.window(layer) is not None


def _add_config(writer: "GGUFWriter", family: str, config: Any, hf: dict[str, Any]) -> None:
    """Add the metadata from which llama.cpp builds the model."""
    import gguf

    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    # Sizes.
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)

    # Rotary embedding.
    writer.add_rope_dimension_count(config.rotary_width)
    writer.add_rope_freq_base(config.rope_theta)
    scaling = config.rope_scaling
    match scaling:
        case LinearScaling():
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(scaling.factor)
        case YarnScaling():
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(scaling.factor)
            writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position_embeddings)
            writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
            writer.add_rope_scaling_yarn_beta_slow(scaling.beta_slow)
        case LongRopeScaling():
            writer.add_rope_scaling_attn_factors(longrope_attention_factor(scaling, config.max_position_embeddings))
    if family == "phi3":
        original = hf.get("original_max_position_embeddings", config.original_length)
        writer.add_rope_scaling_orig_ctx_len(original if scaling is None else scaling.original_max_position_embeddings)
        writer.add_sliding_window(config.sliding_window or 0)

    # Gemma.
    if family in _PERIOD:
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma3_text":
        writer.add_rope_freq_base_swa(config.rope_local_base_freq)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None) is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_tokenizer(writer: "GGUFWriter", model: Any, rows: int, folder: Path) -> None:
    """Add the tokens, their merges or scores, the special tokens and the chat template to the metadata."""
    import gguf

    tokenizer = model.tokenizer
    content = json.loads(tokenizer.backend.to_str())
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    if max(vocabulary.values()) >= rows:
        raise ValueError(
            f"save_gguf: tokenizer must have at most {rows} tokens, one for each row of the embedding, got the id "
            f"{max(vocabulary.values())}. Call model.resize_token_embeddings(len(model.tokenizer))."
        )
    if content["model"]["type"] != "BPE":
        raise ValueError(
            f"save_gguf: tokenizer must be a BPE, byte-level or with byte_fallback, got {content['model']['type']}. "
            "Use a model with such a tokenizer."
        )

    # Byte-level BPE has merges. SentencePiece BPE has scores, which determine the order of the merges.
    is_sentencepiece = bool(content["model"].get("byte_fallback"))
    scores = _scores(content["model"]) if is_sentencepiece else {}
    tokens, types = [f"[PAD{i}]" for i in range(rows)], [gguf.TokenType.UNUSED] * rows
    values = [-10000.0] * rows
    added = tokenizer.backend.get_added_tokens_decoder()
    for token, index in vocabulary.items():
        types[index] = gguf.TokenType.NORMAL
        values[index] = scores.get(token, 0.0)
        if index in added:
            # llama.cpp looks for added tokens in the raw text, before any normalization.
            if not is_sentencepiece and not added[index].normalized:
                token = tokenizer.decode(tokenizer.encode(token, add_special_tokens=False), skip_special_tokens=False)
            is_control = added[index].special or _looks_special(token)
            types[index] = gguf.TokenType.CONTROL if is_control else gguf.TokenType.USER_DEFINED
            token, values[index] = token if is_control else token.replace("▁", " "), -1000.0
        elif is_sentencepiece and token == content["model"]["unk_token"]:
            types[index] = gguf.TokenType.UNKNOWN
        elif is_sentencepiece and token.startswith("<0x") and len(token) == 6:
            types[index] = gguf.TokenType.BYTE
        tokens[index] = token
    writer.add_tokenizer_model("llama" if is_sentencepiece else "gpt2")
    writer.add_tokenizer_pre("default" if is_sentencepiece else pre_tokenizer(tokenizer, content))
    writer.add_token_list(tokens)
    if is_sentencepiece:
        writer.add_token_scores(values)
        writer.add_add_space_prefix(tokenizer.backend.encode("a", add_special_tokens=False).tokens[0].startswith("▁"))
    writer.add_token_types(types)

    # llama.cpp must add the same special tokens to a text as the tokenizer does.
    special = gguf.SpecialVocab(folder, load_merges=not is_sentencepiece, n_vocab=rows)
    text = tokenizer.encode("a")
    special.add_special_token["bos"] = text[0] == special.special_token_ids.get("bos")
    special.add_special_token["eos"] = text[-1] == special.special_token_ids.get("eos")
    special.add_to_gguf(writer, quiet=True)


def pre_tokenizer(tokenizer: Any, content: dict[str, Any]) -> str:
    """Return llama.cpp's name for the pre-tokenizer of a byte-level tokenizer with the tokenizer.json ``content``.

    Raises:
        ValueError: llama.cpp has no such pre-tokenizer, or this function does not know llama.cpp's name for it.
    """
    digest = hashlib.sha256(str(tokenizer.encode(PROBE)).encode()).hexdigest()
    if digest in RELEASED:
        return RELEASED[digest]
    first = content["pre_tokenizer"] or {"type": "none"}
    names = []
    for step in first.get("pretokenizers", [first]):
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            names.append(next(iter(step["pattern"].values())))
        elif step["type"] != "ByteLevel" or step["use_regex"] or step["add_prefix_space"]:
            names.append("ByteLevel with add_prefix_space" if step.get("add_prefix_space") else step["type"])
    ignores_merges = bool(content["model"].get("ignore_merges"))
    if (tuple(names), ignores_merges) not in PRE_TOKENIZERS:
        raise ValueError(
            f"save_gguf: the pre_tokenizer of tokenizer.json must be one of {', '.join(PRE_TOKENIZERS.values())}, got "
            f"{names} with ignore_merges {ignores_merges}. Use llama.cpp's convert_hf_to_gguf.py."
        )
    return PRE_TOKENIZERS[tuple(names), ignores_merges]


def _scores(bpe: dict[str, Any]) -> dict[str, float]:
    """Return a score for each token of a SentencePiece BPE tokenizer, except for the unknown token and byte tokens.

    The tokenizer first merges the pair whose merged token has the highest score. The token of the first merge has the
    score 0, the token of the second merge has the score -1, and so on. Tokens that no merge produces have the lowest
    scores.
    """
    merged = dict.fromkeys("".join(pair if isinstance(pair, list) else pair.split(" ")) for pair in bpe["merges"])
    others = [token for token in sorted(bpe["vocab"], key=bpe["vocab"].get) if not _is_reserved(token, bpe)]
    return {token: -float(rank) for rank, token in enumerate(dict.fromkeys([*merged, *others]))}


def _is_reserved(token: str, bpe: dict[str, Any]) -> bool:
    return token == bpe["unk_token"] or (token.startswith("<0x") and len(token) == 6)


def _looks_special(token: str) -> bool:
    """Return whether an added token looks like a control token. llama.cpp's converter treats such a token as a control
    token even if tokenizer.json does not mark it as special.
    """
    return (
        token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (token.startswith(("<|", "<｜")) and token.endswith(("|>", "｜>")))  # noqa: RUF001
        or (token.startswith("<unused") and token.endswith(">"))
    )


def _extra_tensors(config: Any) -> dict[str, Tensor]:
    """Return the tensors that GGUF has in addition to the checkpoint's: the divisors of the rotary frequencies."""
    scaling = config.rope_scaling
    if isinstance(scaling, Llama3Scaling):
        plain = RotaryEmbedding(config.rotary_width, config.rope_theta).inv_freq
        scaled = RotaryEmbedding(config.rotary_width, config.rope_theta, scaling).inv_freq
        return {"rope_freqs.weight": plain / scaled}
    if isinstance(scaling, LongRopeScaling):
        return {
            "rope_factors_long.weight": torch.tensor(scaling.long_factor, dtype=torch.float32, device="cpu"),
            "rope_factors_short.weight": torch.tensor(scaling.short_factor, dtype=torch.float32, device="cpu"),
        }
    return {}


def _as_llama_cpp(family: str, config: Any, name: str, tensor: Tensor) -> Tensor:
    """Convert a tensor of a checkpoint to the values that llama.cpp expects. The result is in float32."""
    tensor = tensor.detach().float().cpu()
    if family.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
    if heads and ARCHITECTURES[family] == "LLAMA":
        # llama.cpp rotates pairs of neighboring dimensions of a head. In checkpoints, a pair has one dimension from
        # each half.
        halves = tensor.view(heads, 2, -1, *tensor.shape[1:])  # [H, 2, D / 2, ...]
        return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor


def _write(
    writer: "GGUFWriter", family: str, stored: CheckpointTensors, quantization: str, folder: Path, target: Path
) -> None:
    """Add the remaining metadata and write the file, one tensor at a time."""
    import gguf
    import numpy as np

    types = gguf.GGMLQuantizationType
    wanted = types[quantization.upper()]
    config = stored.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[ARCHITECTURES[family]], config.num_hidden_layers)

    def type_of(name: str, shape: torch.Size) -> "GGMLQuantizationType":
        if len(shape) < 2 or name.endswith("_norm.weight"):
            return types.F32
        return types.F16 if wanted is types.Q8_0 and shape[-1] % 32 else wanted

    # The header is written first, and contains the name, shape and type of every tensor.
    extra = _extra_tensors(config)
    shapes = {**extra, **stored.shapes(torch.float32)}
    encodings = {}  # name in the checkpoint -> data type
    for theirs, tensor in shapes.items():
        name = theirs if theirs in extra else names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ValueError(f"save_gguf: every tensor must have a name in llama.cpp, got {theirs}. Leave it out.")
        encodings[theirs] = encoding = type_of(name, tensor.shape)
        dtype = np.dtype({types.F32: np.float32, types.F16: np.float16}.get(encoding, np.uint8))
        row_shape = tensor.shape if dtype != np.uint8 else gguf.quant_shape_to_byte_shape(tensor.shape, encoding)
        writer.add_tensor_info(name, row_shape, dtype, math.prod(row_shape) * dtype.itemsize, encoding)

    # The model card may contain a license and other metadata.
    count = sum(tensor.numel() for tensor in shapes.values())
    metadata = gguf.Metadata.load(None, folder, folder.name, count)
    metadata.size_label = metadata.size_label or gguf.size_label(count, count, 0, 0)
    metadata.set_gguf_meta_model(writer)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{quantization.upper()}"])

    # The tensors follow in the order of the header.
    gathered = ((name, _as_llama_cpp(family, config, name, t)) for name, t in stored.unpack(stored.gather(), None))
    try:
        writer.write_header_to_file(target)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for (theirs, tensor), expected in zip(itertools.chain(extra.items(), gathered), shapes, strict=True):
            assert theirs == expected, (theirs, expected)
            if encodings[theirs] is types.F16 and tensor.abs().max() > torch.finfo(torch.float16).max:
                raise ValueError(
                    f"save_gguf: quantization must be bf16 or q8_0 for weights beyond ±65504, got {quantization!r} and "
                    f"such weights in {theirs}. Choose bf16."
                )
            writer.write_tensor_data(gguf.quants.quantize(tensor.contiguous().numpy(), encodings[theirs]))
    finally:
        writer.close()
