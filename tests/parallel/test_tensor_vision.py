"""A vision-language model whose layers are cut over ranks computes and trains as in one process."""

import dataclasses
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from liger_models.arch import get_arch
from liger_models.kernels import dispatch
from liger_models.layers.vision_language import VisionLanguageModel
from liger_models.parallel import apply_fsdp, apply_tp, compile_blocks, load_state, save_state

from .models import TINY, gradients, make_optimizer, whole
from .test_tensor import assert_close, assert_same, assert_same_run, build, mesh_of, shard_2d, train_on

PATCHES = {"num_heads": 2, "patch_size": 2, "in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2}
MROPE = {"head_dim": 8, "image_token_id": 90, "video_token_id": 91, "mrope_section": [2, 1, 1]}
GEMMA3 = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 2,
}  # fmt: skip
MLLAMA = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2,
    "image_size": 8, "patch_size": 4, "intermediate_layers_indices": [0], "vision_output_dim": 32,
}  # fmt: skip
# Name -> architecture, sizes of the language model, sizes of the tower.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("qwen2_vl", MROPE, {"depth": 2, "embed_dim": 16, "hidden_size": 32} | PATCHES),
    "qwen2_vl, three heads": (  # of the tower, whose attention two ranks don't divide
        "qwen2_vl", {**MROPE, "tie_word_embeddings": True},
        {"depth": 2, "embed_dim": 24, "hidden_size": 32} | PATCHES | {"num_heads": 3},
    ),
    "qwen2_5_vl": (  # nor the width of this one's MLP
        "qwen2_5_vl", MROPE,
        {
            "depth": 2, "hidden_size": 16, "intermediate_size": 21, "out_hidden_size": 32, "window_size": 8,
            "fullatt_block_indexes": [1],
        } | PATCHES,
    ),
    "qwen3_vl": (
        "qwen3_vl", {**MROPE, "tie_word_embeddings": True},
        {
            "depth": 3, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2],
        } | PATCHES,
    ),
    "gemma3": (
        "gemma3",
        {
            "head_dim": 16, "sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 20,
            "image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92, "mm_tokens_per_image": 4,
        },
        GEMMA3,
    ),
    "mllama": ("mllama", {"cross_attention_layers": [1, 2], "image_token_index": 97}, MLLAMA),
}  # fmt: skip
FAMILIES = [name for name in MODELS if "," not in name]
LENGTH = 22

# What follows each other in a row: so many words, or an image, of so many rows and columns of tokens where that varies.
Row = list[int | tuple[int, int]]
BATCHES: list[list[Row]] = [
    [[3, (2, 3), 2, (1, 2), 1], [(3, 1), 9], [11], [2, (1, 1), 5]],
    [[4, (1, 4), 6], [2, (2, 2), 3], [15], [20]],  # the last two rows, those of the second of two, have none
    [[9, (3, 2), 4], [12], [1, (2, 1), (1, 2), 3], [16]],
]


def case(name: str, **sizes: Any) -> tuple[str, Any]:
    arch, text, tower = MODELS[name]
    config_class = get_arch(arch).config_class
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    vision = fields["vision_config"].default_factory(**tower)
    return arch, config_class(**{**TINY, "initializer_range": 0.1, **text, "vision_config": vision, **sizes})


def picture(config: Any, size: tuple[int, int], generator: torch.Generator) -> tuple[list[int], dict[str, Tensor]]:
    """The tokens of an image, and what the tower takes."""
    vision = config.vision_config
    if hasattr(config, "image_token_id"):
        side = vision.spatial_merge_size
        rows, columns = (length * side for length in size)
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return [config.image_token_id] * (size[0] * size[1]), {
            "pixel_values": torch.randn(rows * columns, width, generator=generator),
            "image_grid_thw": torch.tensor([[1, rows, columns]]),
        }
    if hasattr(config, "mm_tokens_per_image"):
        ids = [config.boi_token_index, *[config.image_token_index] * config.mm_tokens_per_image, config.eoi_token_index]
        return ids, {"pixel_values": torch.randn(1, 3, vision.image_size, vision.image_size, generator=generator)}
    ratio = 1 + (3 * size[0] + size[1]) % len(vision.supported_aspect_ratios)
    pixels = torch.randn(1, vision.max_num_tiles, 3, vision.image_size, vision.image_size, generator=generator)
    return [config.image_token_index], {"pixel_values": pixels, "aspect_ratio_ids": torch.tensor([ratio])}


def batch(config: Any, step: int, dp: tuple[int, int] = (0, 1), length: int = LENGTH) -> dict[str, Tensor]:
    """The share of a rank of so many of a batch, rows padded on the right."""
    rows = BATCHES[step]
    texts, images = [], []
    for number, row in list(enumerate(rows))[dp[0] * len(rows) // dp[1] : (dp[0] + 1) * len(rows) // dp[1]]:
        generator = torch.Generator().manual_seed(10 * step + number)
        texts.append([])
        images.append([])
        for part in row:
            if isinstance(part, int):
                texts[-1] += torch.randint(3, 80, (part,), generator=generator).tolist()
                continue
            ids, pixels = picture(config, part, generator)
            texts[-1] += ids
            images[-1].append(pixels)
    ids = torch.tensor([text + [0] * (length - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (length - len(text)) for text in texts])
    made = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill((mask == 0) | (ids >= 90), -100)}
    flat = [image for row in images for image in row]
    names = list(flat[0]) if flat else []
    if "aspect_ratio_ids" in names:  # each row has its own, and places for as many as the others
        most = max(map(len, images))
        for name in names:
            empty = torch.zeros_like(flat[0][name])
            filled = [[*(image[name] for image in row), *[empty] * (most - len(row))] for row in images]
            made[name] = torch.stack([torch.cat(row) for row in filled])
        return made
    return made | {name: torch.cat([image[name] for image in flat]) for name in names}


def batches(config: Any, dp: tuple[int, int] = (0, 1)) -> list[dict[str, Tensor]]:
    return [batch(config, step, dp) for step in range(len(BATCHES))]


@cache
def trained(name: str) -> dict[str, Any]:
    """By one process."""
    arch, config = case(name)
    return train_on(batches(config), build(arch, config))


def assert_all_the_same(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for got in results:
        assert_same_run(got, expected)
        for name, weight in results[0]["weights"].items():
            assert torch.equal(got["weights"][name], weight), name


def train_cut(name: str, sequence_parallel: bool, policy: str) -> dict[str, Any]:
    arch, config = case(name)
    model = build(arch, config)
    model.set_checkpointing(policy)
    names = [name for name, _ in model.named_parameters()]
    apply_tp(model, mesh_of(2), sequence_parallel=sequence_parallel)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return train_on(batches(config), model)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_one_process(two, name, sequence_parallel):
    policy = ("none", "selective", "full")[(list(MODELS).index(name) + sequence_parallel) % 3]
    assert_all_the_same(two(train_cut, name, sequence_parallel, policy), trained(name))


def train_2d(name: str, sequence_parallel: bool) -> dict[str, Any]:
    arch, config = case(name)
    mesh = mesh_of(2, 2)
    model = apply_tp(build(arch, config), mesh["tp"], sequence_parallel=sequence_parallel)
    apply_fsdp(model, mesh["dp"], param_dtype=None)
    assert {parameter.device_mesh for parameter in model.parameters()} == {mesh}
    return train_on(batches(config, (mesh["dp"].get_local_rank(), 2)), model)


@pytest.mark.parametrize("name", FAMILIES)
def test_fsdp_around_it(four, name):
    """Once the second pair of ranks has no image at all."""
    assert_all_the_same(four(train_2d, name, FAMILIES.index(name) % 2 == 0), trained(name))


def load_and_save(name: str, source: Path, target: Path, shape: tuple[int, ...]) -> dict[str, Any]:
    arch, config = case(name)
    model = get_arch(arch).from_pretrained(source, progress=False, shard=partial(shard_2d, shape=shape))
    model.save_pretrained(target)
    model(**batch(config, 0)).loss.backward()
    return {"weights": whole(model.named_parameters()), "gradients": gradients(model)}


@pytest.mark.parametrize(("name", "shape"), [("mllama", (2,)), *((name, (2, 2)) for name in FAMILIES)])
def test_in_and_out_of_a_checkpoint(two, four, tmp_path, name, shape):
    arch, config = case(name)
    model = build(arch, config)
    model.save_pretrained(tmp_path / "plain")
    model(**batch(config, 0)).loss.backward()
    group = two if shape == (2,) else four
    for got in group(load_and_save, name, tmp_path / "plain", tmp_path / "saved", shape):
        assert_close(got["weights"], whole(model.named_parameters()), rtol=0, atol=0)
        assert_same(got["gradients"], gradients(model))
    for path in (tmp_path / "plain").iterdir():
        assert (tmp_path / "saved" / path.name).read_bytes() == path.read_bytes()


def stop_and_go_on(folder: Path, shape: tuple[int, ...], resumed: bool) -> dict[str, Any]:
    arch, config = case("mllama")
    model = shard_2d(build(arch, config), shape)
    optimizer = make_optimizer("liger", model)
    for step in range(load_state(folder, model, optimizer) if resumed else 0, 2):
        model(**batch(config, step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 and not resumed:
            save_state(folder, 1, model, optimizer)
    return whole(model.named_parameters())


def test_stopping_and_going_on(two, four, tmp_path):
    expected = four(stop_and_go_on, tmp_path, (2, 2), False)[0]
    for got in four(stop_and_go_on, tmp_path, (2, 2), True):
        assert_close(got, expected, rtol=0, atol=0)
    for got in two(stop_and_go_on, tmp_path, (2,), True):  # on another number of ranks
        assert_same(got, expected)


def ask(name: str) -> dict[str, Tensor]:
    arch, config = case(name)
    model = build(arch, config)
    if torch.distributed.is_initialized():
        apply_tp(model, mesh_of(2))
    prompts = batch(config, 0)
    prompts = {key: value.flip(1) if key == "attention_mask" else value for key, value in prompts.items()}
    length = prompts["attention_mask"].sum(1)
    prompts["input_ids"] = torch.stack([row.roll(-int(n)) for row, n in zip(prompts["input_ids"], length, strict=True)])
    prompts.pop("labels")
    with torch.no_grad():
        logits = model(**batch(config, 1), return_logits=True).logits
    return {"logits": logits, "greedy": model.generate(**prompts, max_new_tokens=6, eos_token_id=[])}


@pytest.mark.parametrize("name", FAMILIES)
def test_generation_with_images(two, name):
    expected = ask(name)
    for got in two(ask, name):
        assert_close(got, expected, atol=1e-5)


def train_compiled(name: str) -> dict[str, Any]:
    arch, config = case(name)
    model = apply_tp(build(arch, config), mesh_of(2), sequence_parallel=True)
    return train_on(batches(config), compile_blocks(model, backend="aot_eager"))


def test_compiled_blocks(two):
    for got in two(train_compiled, "mllama"):
        assert_same_run(got, trained("mllama"))


def run_kernels(name: str, sequence_parallel: bool) -> None:
    """The Triton kernels' results on this rank are those of an uncut model, which uses them, too."""
    assert dispatch.INTERPRET
    arch, config = case(name, num_hidden_layers=1)
    results = []
    for cut in (False, True):
        model = build(arch, config)
        model.set_checkpointing("selective")
        if cut:
            apply_tp(model, mesh_of(2), sequence_parallel=sequence_parallel)
        loss = model(**batch(config, 0)).loss
        loss.backward()
        results.append({"loss": {"": loss.detach()}, "gradients": gradients(model)})
    for part in ("loss", "gradients"):
        assert_same(results[1][part], results[0][part])


@pytest.mark.parametrize(("name", "sequence_parallel"), [("qwen3_vl", True), ("qwen2_5_vl", False)])
def test_kernels(two_with_kernels, name, sequence_parallel):
    two_with_kernels(run_kernels, name, sequence_parallel)


def refuse() -> None:
    mesh = mesh_of(2)
    for name in ("gemma3", "mllama"):
        with pytest.raises(ValueError, match=r"LigerAttention: num_key_value_heads \(1\) must be a multiple of 2 ranks"):
            apply_tp(build(*case(name, num_key_value_heads=1)), mesh)
    with pytest.raises(ValueError, match=r"LigerCrossAttention: num_key_value_heads \(1\) must be a multiple of 2"):
        apply_tp(build(*case("mllama", num_key_value_heads=1, cross_attention_layers=[0])), mesh)
    arch, config = case("qwen3_vl")
    model = apply_tp(build(arch, config), mesh, sequence_parallel=True)
    with pytest.raises(ValueError, match=f"T must be a multiple of 2 ranks, got {LENGTH + 1}"):
        model(**batch(config, 0, length=LENGTH + 1))
    wrapped = build(arch, config)
    wrapped.visual.blocks[1].mlp.fc2 = torch.nn.Sequential(wrapped.visual.blocks[1].mlp.fc2)
    with pytest.raises(ValueError, match=r"RowParallelLinear: the layer must be an nn.Linear without hooks, got Seq"):
        apply_tp(wrapped, mesh)


def test_errors(two):
    two(refuse)
