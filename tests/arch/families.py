"""Every registered architecture with its tiny configurations, and the same model in transformers for comparison.

A case is a family and one of its variants. Two markers leave out tests that would repeat what other tests show:
`beyond_kinds` for tests that depend on a family only through its layers, and `beyond_settings` for tests in which a
setting of a configuration has the same effect in all families. ``make test-matrix`` runs these tests, too.
"""

import copy
import functools
import importlib
import json
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from liger_models import AutoLigerModel
from liger_models.arch import built_in, get_arch
from liger_models.base.causal_lm import CausalLM
from liger_models.cli.compare import relative_error as error
from liger_models.cli.compare import tensor_differences
from liger_models.convert import format_of
from liger_models.convert.load import pick_map
from liger_models.kernels.dispatch import reference_backend
from liger_models.layers.layer import Layer

from ..late import transformers

DATA = Path(__file__).parents[1] / "fixtures"
ARCHS = built_in()


def tiny(arch: str) -> dict[str, dict]:
    """Map each variant to keyword arguments of transformers' configuration class, read from the family's tiny.json."""
    file = json.loads((DATA / arch / "tiny.json").read_text())
    return {name: merged(file["base"], changes) for name, changes in file["variants"].items()}


def merged(base: dict, changes: dict) -> dict:
    """Return ``base`` with ``changes``, which are merged key by key, also in nested configurations."""
    parts = {key: {**base[key], **value} for key, value in changes.items() if key.endswith("_config")}
    return {**base, **changes, **parts}


def text_sizes(arch: str, variant: str) -> dict:
    """Return the part of a configuration that describes the language model."""
    sizes = tiny(arch)[variant]
    return sizes.get("text_config", sizes)


def variants(arch: str) -> dict[str, dict]:
    """Return `tiny`. A family without test data has one variant, so that its tests are collected and fail."""
    return tiny(arch) if (DATA / arch / "tiny.json").exists() else {"without_test_data": {}}


CASES = [(arch, variant) for arch in ARCHS for variant in variants(arch)]
FIRST_CASES = [(arch, next(iter(variants(arch)))) for arch in ARCHS]
VISION_CASES = [(arch, variant) for arch, variant in CASES if "vision_config" in variants(arch)[variant]]


@cache
def properties(arch: str) -> frozenset[str]:
    """Return the names of the classes of a family's layers, and the properties of its attention layers.

    A layer that contains attention layers, such as a block or a tower, is left out: every family has its own.
    """
    if not (DATA / arch / "tiny.json").exists():
        return frozenset()
    model = AutoLigerModel.from_config({"model_type": arch, **next(iter(tiny(arch).values()))}, device="meta")
    found = set()
    for layer in model.modules():
        attention = [part for part in layer.modules() if getattr(part, "attention", None) is not None]
        if not isinstance(layer, Layer) or set(attention) - {layer}:
            continue
        found.add(type(layer).__name__)
        if attention:
            spec = layer.attention
            found |= {name for name in ("window", "needs_mask", "needs_flash", "rotary") if getattr(spec, name)}
            found |= {f"no {name}" for name in ("cache_slot", "rotary") if getattr(spec, name) is None}
    return frozenset(found)


def simplest_with(name: str) -> str:
    """Return the simplest family (see `simplicity`) that has the property ``name``."""
    return min((arch for arch in ARCHS if name in properties(arch)), key=simplicity)


def simplicity(arch: str) -> tuple[int, int, str]:
    """Return the sort key of a family. The simplest families come first: few properties, then many variants."""
    return len(properties(arch)), -len(variants(arch)), arch


@cache
def one_of_each_kind() -> frozenset[str]:
    """Return families that together have every property: of the families from the simplest on, each with a new one."""
    seen: set[str] = set()
    chosen = set()
    for arch in sorted(ARCHS, key=simplicity):
        if properties(arch) - seen:
            seen |= properties(arch)
            chosen.add(arch)
    return frozenset(chosen)


@cache
def one_of_each_setting() -> frozenset[tuple[str, str]]:
    """Return the first case of each family and, for each further setting of a configuration, a case that has it."""
    chosen = list(FIRST_CASES)
    seen = set().union(*(settings(case) for case in chosen))
    for case in sorted(CASES, key=lambda case: simplicity(case[0])):
        if settings(case) - seen:
            seen |= settings(case)
            chosen.append(case)
    return frozenset(chosen)


def settings(case: tuple[str, str]) -> set[tuple[str, Any]]:
    """Return the keys in which a case differs from its family's base, with values, or types of numbers and lists."""
    arch, variant = case
    file = DATA / arch / "tiny.json"
    parts = [json.loads(file.read_text())["variants"][variant]] if file.exists() else []
    found: set[tuple[str, Any]] = set()
    while parts:
        for key, value in parts.pop().items():
            if isinstance(value, dict):
                parts.append(value)
            else:
                found.add((key, value if isinstance(value, bool | str | None) else type(value)))
    return found


def beyond_kinds(arch: str) -> Any:
    """Return the marker ``matrix`` for all families that are not in `one_of_each_kind`.

    It is for tests that are costly and depend on a family only through the family's layers.
    """
    return () if arch in one_of_each_kind() else pytest.mark.matrix


def of_each_kind(cases: Iterable[Any]) -> list[Any]:
    """Return families, or cases, as parameters of a test, with the markers of `beyond_kinds`."""
    return [pytest.param(case, marks=beyond_kinds(case if isinstance(case, str) else case[0])) for case in cases]


def beyond_settings(case: tuple[str, str]) -> Any:
    """Return the marker ``matrix`` for all cases that are not in `one_of_each_setting`.

    It is for tests in which a setting has the same effect in all families. Comparisons with transformers and exports
    run for all cases.
    """
    return () if case in one_of_each_setting() else pytest.mark.matrix


def beyond_first(case: tuple[str, str]) -> Any:
    """Return the marker ``matrix`` for all cases but the first of each family."""
    return () if case in FIRST_CASES else pytest.mark.matrix


every_case = pytest.mark.parametrize("pair", CASES, indirect=True, ids="-".join)
one_case_each = pytest.mark.parametrize("pair", FIRST_CASES, indirect=True, ids="-".join)
one_case_of_each_family = pytest.mark.parametrize(
    "pair", [pytest.param(case, marks=beyond_first(case)) for case in CASES], indirect=True, ids="-".join
)
one_case_of_each_setting = pytest.mark.parametrize(
    "pair", [pytest.param(case, marks=beyond_settings(case)) for case in CASES], indirect=True, ids="-".join
)
one_case_of_each_kind = pytest.mark.parametrize("pair", of_each_kind(FIRST_CASES), indirect=True, ids="-".join)

one_text_case_of_each_kind = pytest.mark.parametrize(
    "pair", of_each_kind(case for case in FIRST_CASES if case not in VISION_CASES), indirect=True, ids="-".join
)
MROPE_CASES = [(arch, variant) for arch, variant in VISION_CASES if "mrope_section" in str(tiny(arch)[variant])]
"""Families with positions of time, row and column."""
VIDEO_CASES = [case for case in VISION_CASES if case in MROPE_CASES or case[0] == "muse_glimmer"]
"""Families with images and videos as patches with a grid of frames, rows and columns."""
every_video_case = pytest.mark.parametrize("pair", VIDEO_CASES, indirect=True, ids="-".join)
one_video_case_each = pytest.mark.parametrize(
    "pair", [case for case in FIRST_CASES if case in VIDEO_CASES], indirect=True, ids="-".join
)
one_mrope_case_each = pytest.mark.parametrize(
    "pair", [case for case in FIRST_CASES if case in MROPE_CASES], indirect=True, ids="-".join
)
one_video_case_of_each_kind = pytest.mark.parametrize(
    "pair", of_each_kind(case for case in FIRST_CASES if case in VIDEO_CASES), indirect=True, ids="-".join
)

LIMIT = 1e-5
"""Largest relative error in fp32."""


@cache
def make_folder(arch: str, variant: str, root: Path) -> Path:
    folder = root / f"{arch}-{variant}"
    config = transformers.AutoConfig.for_model(arch, **tiny(arch)[variant])
    with torch.random.fork_rng([]):  # the test's own random numbers must not depend on which test makes the folder
        torch.manual_seed(0)
        save_random_model(arch, config, folder)
    return folder


def save_random_model(arch: str, config: Any, folder: Path) -> None:
    model = auto_class(arch).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms and biases, too, must differ from their initial ones and zeros.
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.1))
            if name.endswith("A_log"):  # in a new model, states decay within two tokens, and with them errors
                parameter.sub_(4)
        saved = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in saved:  # such as Gemma 4's factor of the stream
                buffer.mul_(0.8)
            if name.endswith("e_score_correction_bias"):  # zeros in a new model
                buffer.copy_(torch.randn_like(buffer) * 0.2)
    model.save_pretrained(folder)


class Listed:
    """A model class with the methods of an auto class."""

    def __init__(self, model_class: Any) -> None:
        self.from_pretrained, self.from_config = model_class.from_pretrained, model_class._from_config


def auto_class(arch: str):
    if arch == "mistral4":  # which transformers lists only as a part of a model with images
        return Listed(transformers.Mistral4ForCausalLM)
    vision = any(arch == name for name, _ in VISION_CASES)
    return transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM


def hf_model(folder: Path, dtype: torch.dtype = torch.float32):
    """Load transformers' model from a folder, with the patches of its family."""
    arch = json.loads((folder / "config.json").read_text())["model_type"]
    model = auto_class(arch).from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        # In transformers 5.17 a model with images doesn't read it from its config.
        model.forward = functools.partial(model.forward, output_router_logits=True)
    for mixer in model.modules():
        if hasattr(mixer, "in_proj") and (hasattr(mixer, "A_log") or hasattr(mixer, "conv")):
            # The bias of the projection would enter the state at padding.
            mixer.register_forward_pre_hook(keep_mask, with_kwargs=True)
            mixer.in_proj.register_forward_hook(functools.partial(without_padding, mixer))
    PATCHES.get(arch, lambda model: None)(model)
    return model


def patch_llama4_text(model) -> None:
    scale_queries_by_position(model)
    model.base_model_prefix = "model"  # the class has the name that its body has in the model with images


def patch_nemotron_h(model) -> None:
    for mixer in model.modules():
        if hasattr(mixer, "time_step_limit"):
            # Transformers 5.23 limits step sizes to (time_step_min, infinity), but not in decoding.
            mixer.time_step_limit = tuple(model.config.time_step_limit)


def patch_gemma3n_text(model) -> None:
    for block in model.model.layers:
        block.altup.correct_output_scale.requires_grad_(model.config.altup_correct_scale)
        # In training, it would clip the weight of a layer and leave out the layer's adapter.
        vars(block.altup)["train"] = lambda mode=True: None
    wrap_method(model, "forward", functools.partial(with_per_layer_inputs, model))


def patch_paligemma(model) -> None:
    wrap_method(model, "forward", with_prefix_of_labels)
    wrap_method(model, "generate", with_prefix_of_prompts)


def patch_glm4v(model) -> None:
    model.model.get_placeholder_mask = functools.partial(placeholders_of_glm4v, model.config)
    # That of other families repeats the images of a row for beams as a group; transformers 5.23 has each by itself.
    model._expand_multimodal_outputs = functools.partial(transformers.GenerationMixin._expand_multimodal_outputs, model)


def patch_phimoe(model) -> None:
    pass_the_length(model.model.rotary_emb)
    for layer in model.model.layers:
        layer.mlp.router.train = lambda mode=True: None  # in training, transformers draws the experts at random


def patch_gemma4_unified(model) -> None:
    wrap_method(model, "forward", functools.partial(with_masks_of_generation, model))


def wrap_method(model, name: str, wrapper) -> None:
    """Replace a method by ``wrapper(method, ...)``. ``generate`` reads the signature of the forward, which stays."""
    method = getattr(model, name)
    setattr(model, name, functools.update_wrapper(functools.partial(wrapper, method), method))


def placeholders_of_glm4v(config, input_ids, inputs_embeds, image_features=None, video_features=None):
    """Return the masks of GLM-4.1V's images and videos, [B, T, 1]. Transformers 5.23 uses all placeholders for both."""
    inside = (input_ids == config.video_start_token_id).cumsum(1) > (input_ids == config.video_end_token_id).cumsum(1)
    here = input_ids == config.image_token_id
    return (here & ~inside)[..., None], (here & inside)[..., None]


def pass_the_length(rotary) -> None:
    """Choose the divisors of LongRoPE by the length of the longest row, like the authors' code.

    Transformers 5.23 computes the frequencies of Phi-3.5-MoE without a length, so never with ``long_factor``.
    """
    theirs = type(rotary)
    frequencies = rotary.rope_init_fn

    def forward(self, x, position_ids=None):
        if self.rope_type == "longrope":
            self.rope_init_fn = functools.partial(frequencies, seq_len=int(position_ids.max()) + 1)
        return theirs.forward(self, x, position_ids=position_ids)

    rotary.__class__ = type(theirs.__name__, (theirs,), {"forward": forward})


def scale_queries_by_position(model) -> None:
    """Scale the queries of Llama 4's layers without rotation by ``position_ids``, like the authors' code.

    Transformers 5.23 takes the number of a token in the cache for its position, which counts padding on the left.
    """

    def keep_positions(block, _, options):
        vars(block.self_attn)["positions"] = options["position_ids"]

    for block in getattr(model, "language_model", model).model.layers:
        layer = block.self_attn
        if layer.attn_temperature_tuning and not layer.use_rope:
            layer.attn_temperature_tuning = False
            block.register_forward_pre_hook(keep_positions, with_kwargs=True)

    module = importlib.import_module(type(model).__module__)
    if not hasattr(module.eager_attention_forward, "__wrapped__"):
        module.eager_attention_forward = functools.wraps(module.eager_attention_forward)(
            functools.partial(attend_with_scaled_queries, module.eager_attention_forward)
        )


def attend_with_scaled_queries(attend, layer, query, *rest, **options):
    """Compute attention of Llama 4. If a layer has positions, its queries [B, H, T, D] are scaled by them."""
    if "positions" in vars(layer):
        steps = torch.floor((layer.positions.to(query.dtype) + 1) / layer.floor_scale)
        query = query * (torch.log1p(steps) * layer.attn_scale + 1)[:, None, :, None]
    return attend(layer, query, *rest, **options)


def keep_mask(mixer, args, kwargs):
    """Store the mask of a mixer's call for `without_padding`."""
    mask = kwargs.get("attention_mask")
    vars(mixer)["kept_mask"] = None if mask is None or mask.dim() != 2 else mask


def without_padding(mixer, linear, args, out):
    """Return the output of a mixer's projection, with zeros for padding."""
    mask = vars(mixer)["kept_mask"]
    return None if mask is None else out * mask[:, -out.shape[1] :, None].to(out.dtype)


def with_per_layer_inputs(model, forward, *args, inputs_embeds=None, **inputs):
    """Call Gemma 3n's forward, which leaves out the second embedding if tokens are given as embeddings."""
    if inputs_embeds is not None:
        table = model.get_input_embeddings()
        rows = table(torch.arange(table.num_embeddings))
        ids = (inputs_embeds[..., None, :] == rows).all(-1).int().argmax(-1)
        inputs |= {"inputs_embeds": inputs_embeds, "per_layer_inputs": model.model.get_per_layer_inputs(ids)}
    return forward(*args, **inputs)


def with_prefix_of_labels(forward, input_ids=None, labels=None, token_type_ids=None, attention_mask=None, **inputs):
    """PaliGemma's forward; without ``token_type_ids`` the prefix of a row ends before its first label."""
    if token_type_ids is None and labels is not None:
        after = labels != -100 if attention_mask is None else (labels != -100) & (attention_mask != 0)
        token_type_ids = (after.cumsum(1) > 0).long()
    if token_type_ids is not None:
        inputs["token_type_ids"] = token_type_ids
    return forward(input_ids=input_ids, labels=labels, attention_mask=attention_mask, **inputs)


def with_prefix_of_prompts(generate, input_ids=None, token_type_ids=None, **options):
    """PaliGemma's ``generate``; without ``token_type_ids`` prompts are prefixes."""
    types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
    return generate(input_ids, token_type_ids=types, **options)


def with_masks_of_generation(model, forward, input_ids=None, attention_mask=None, mm_token_type_ids=None, **inputs):
    """Call the forward with the masks that ``generate`` makes, which are Gemma 4's.

    With these masks, the tokens of an image attend to each other in both directions only in layers with a window, and
    only within the window. With its own masks, the forward of ``gemma4_unified`` in transformers 5.23 lets them do so
    in all layers, and beyond the window.
    """
    if mm_token_type_ids is not None and not isinstance(attention_mask, dict):
        shape = torch.zeros(*input_ids.shape, 1, dtype=model.dtype)
        places = torch.arange(input_ids.shape[1])[None]
        attention_mask = model.create_masks_for_generate(
            model.config, shape, attention_mask, inputs.get("past_key_values"), places, mm_token_type_ids
        )
    return forward(input_ids=input_ids, attention_mask=attention_mask, **inputs)


PATCHES = {
    "gemma3n_text": patch_gemma3n_text,
    "gemma4_unified": patch_gemma4_unified,
    "glm4v": patch_glm4v,
    "glm4v_moe": patch_glm4v,
    "llama4": scale_queries_by_position,
    "llama4_text": patch_llama4_text,
    "nemotron_h": patch_nemotron_h,
    "paligemma": patch_paligemma,
    "phimoe": patch_phimoe,
}
"""Maps a family to the changes that `hf_model` makes to transformers' model, so that both models compute the same."""


def take_longest_row(model) -> None:
    """Let the longest row decide on rotary frequencies that depend on the length, as in transformers."""
    for rotary in model.rotary.values():
        rotary.by_document = False


def hf_gradients(model) -> dict[str, Tensor]:
    """Return the gradients under the names of the checkpoint. They are saved as weights: transformers may pack some."""
    crossing = cross_blocks(dict(model.named_parameters()))
    parameters, buffers = [*model.parameters()], [*model.buffers()]
    weights, constants = [parameter.data for parameter in parameters], [buffer.clone() for buffer in buffers]
    try:
        for name, parameter in model.named_parameters():
            chooses = name.endswith("e_score_correction_bias")  # a bias for the choice of experts alone
            reached = parameter.requires_grad and not (chooses or is_tower(name) or name.startswith(crossing))
            assert parameter.grad is not None or not reached, name
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for buffer in buffers:
            buffer.zero_()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return load_file(Path(folder) / "model.safetensors")
    finally:
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data = weight
        for buffer, constant in zip(buffers, constants, strict=True):
            buffer.copy_(constant)


def our_gradients(model: CausalLM, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients under Hugging Face's names, taken apart by the weight map that has ``theirs``."""
    gradients_of(model)
    return taken_apart(model, theirs, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)


def fp64_twin(model: CausalLM, **inputs: Tensor) -> CausalLM:
    """A copy in fp64 on the CPU with the gradients of the loss, by the formulas in plain torch."""
    model = copy.deepcopy(model).cpu().double()
    model.zero_grad()
    with reference_backend():
        model(**{name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}).loss.backward()
    return model


def taken_apart(model: CausalLM, theirs: Mapping[str, Tensor], tensor: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return ``tensor(parameter)`` of each parameter under Hugging Face's names, on the CPU."""
    parameters = dict(model.named_parameters())
    weights = pick_map(format_of(type(model)).weight_maps(model.config), theirs, parameters)
    return {n: t.cpu() for name, p in parameters.items() for n, t in weights.entries[name].unpack(tensor(p)).items()}


def gradients_of(model: CausalLM) -> dict[str, Tensor]:
    """Return copies of all gradients. Only parameters that are frozen or need images may have no gradient."""
    crossing = cross_blocks(dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        reached = parameter.requires_grad and not (is_tower(name) or name.startswith(crossing))
        assert parameter.grad is not None or not reached, name
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def is_tower(name: str) -> bool:
    """Return whether a parameter, ours or theirs, is part of the vision tower, which only images use."""
    towers = (
        "visual.",
        "vision_tower.",
        "vision_model.",
        "multi_modal_projector.",
        "embed_vision.",
        "vision_adapter.",
        "vision_projection.",
        "image_newline",
        "connector.",
    )
    return name.removeprefix("model.").startswith(towers)


def cross_blocks(names: Collection[str]) -> tuple[str, ...]:
    """Return the prefixes of the names of blocks that attend to images. Texts without images skip these blocks."""
    return tuple({name.partition("cross_attn.")[0] for name in names if ".cross_attn." in name})


def load(arch: str, folder: Path, **options) -> CausalLM:
    return get_arch(arch).from_pretrained(folder, progress=False, strict=True, **options)


def assert_bounds_under_other_names(ours: CausalLM, bounds: Tensor, logits: Tensor, **inputs: Any) -> None:
    """Assert that the forward takes the bounds of documents under the names of transformers' collator, too."""
    names = {"cu_seq_lens_q": bounds.int(), "cu_seq_lens_k": bounds.int(), "max_length_q": 9, "max_length_k": 9}
    with torch.no_grad():
        assert torch.equal(ours(**inputs, **names).logits, logits)
        with pytest.raises(ValueError, match="cu_seqlens and cu_seq_lens_q are the same, got both"):
            ours(**inputs, **names, cu_seqlens=bounds)


def tokens(arch: str, variant: str, B: int, T: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # The last words of a vision-language model stand for images.
    words = text_sizes(arch, variant)["vocab_size"] - 20 * ("vision_config" in tiny(arch)[variant])
    return torch.randint(3, words, (B, T), generator=generator)


GATED = {
    "gate_attn": "self_attn.o_proj.weight",
    "gate_ffn": "mlp.fc2.weight",
    "cross_attn_attn_gate": "cross_attn.o_proj.weight",
    "cross_attn_mlp_gate": "mlp.down_proj.weight",
    "pre_tile_positional_embedding.gate": "pre_tile_positional_embedding.embedding.weight",
    "post_tile_positional_embedding.gate": "post_tile_positional_embedding.embedding.weight",
    "gated_positional_embedding.gate": "gated_positional_embedding.tile_embedding.weight",
}
"""A gate, a single number, and the weight W whose product tanh(gate) scales."""


def assert_same_gradients(ours: CausalLM, theirs, limit: float = LIMIT, twin: Callable[[], Any] | None = None) -> None:
    """Assert that the gradients of two models are the same within ``limit``.

    If ``twin`` is given, it makes a model in fp64, an `fp64_twin` or better a copy of ``theirs``. Gradients that differ
    by more than the limit are then compared with this model's. Their error may be up to the limit or the error of
    ``theirs``, because two fp32 sums whose terms cancel may differ more from each other than from fp64.
    """
    rotates = hasattr(getattr(ours, "visual", None), "rotary")
    theirs = hf_gradients(theirs)
    weights = taken_apart(ours, theirs, lambda parameter: parameter.data)
    ours = our_gradients(ours, theirs)
    assert [*map(str, tensor_differences(ours, theirs))] == []
    for name, gradient in theirs.items():
        gate = next((gate for gate in GATED if name.endswith(gate)), None)
        if is_tower(name) and name.endswith("k_proj.bias") and not rotates:
            # Without rotation, this bias adds a number to all scores of a query: its gradient is zero up to rounding.
            scale = theirs[name.replace("k_proj", "q_proj")].norm()
            assert max(gradient.norm(), ours[name].norm()) <= limit * max(scale, 1e-30), name
        elif gate:
            # One number, <W, dW> · (1 − t²) / t with t = tanh(gate): a sum whose terms cancel, in fp32 to few digits.
            gated, t = name.removesuffix(gate) + GATED[gate], weights[name].tanh()
            scale = weights[gated].norm() * theirs[gated].norm() * (1 - t**2) / t.abs()
            assert (ours[name] - gradient).norm() <= limit * max(scale, 1e-30), name
        elif ".act_fn.alpha_" in name:
            # One number, a sum over all elements whose terms cancel: a part of <W, dW> of the projection after it.
            after = f"{name.partition('act_fn.')[0]}down_proj.weight"
            scale = weights[after].norm() * theirs[after].norm() / 100
            assert (ours[name] - gradient).norm() <= limit * max(gradient.norm(), scale), name
        elif twin is None or error(ours[name], gradient) <= limit:
            assert error(ours[name], gradient) <= limit, name
        else:
            wide = twin()
            exact = our_gradients(wide, theirs) if isinstance(wide, CausalLM) else hf_gradients(wide)
            assert error(ours[name], exact[name]) <= max(limit, error(gradient, exact[name])), name
