"""Changes of the weights since the last export, and receivers that apply them: bit for bit, or not at all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from liger_models import LigerLlama, WeightDelta, apply_delta, get_hf_state_dict, hf_delta
from liger_models.adapters import LoRAConfig, apply_lora, quantize_base
from liger_models.convert.delta import checksum
from liger_models.convert.files import open_safetensors
from liger_models.train.optimizer import LigerAdamW

from ..late import transformers
from ..parallel.models import batch
from ..parallel.models import tiny as tiny_llama
from .conftest import assert_same_bits, read_tensors


def steps(model: nn.Module, lr: float, count: int = 1) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = LigerAdamW(trained, lr=lr, weight_decay=0.0)
    for step in range(count):
        model(**batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def size(delta: WeightDelta) -> int:
    return sum(tensor.nbytes for tensor in delta.tensors.values())


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_no_common_memory(*states: dict[str, Tensor]) -> None:
    pointers = [tensor.data_ptr() for state in states for tensor in state.values()]
    assert len({*pointers}) == len(pointers)


def test_a_receiver_follows_the_steps_bit_for_bit(tmp_path: Path) -> None:
    """Master weights in fp32, as bfloat16 in the engine: a model of transformers with a tied head, and a folder."""
    model = tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "engine", dtype=torch.bfloat16, max_shard_size="20KB")
    engine = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "engine", dtype=torch.bfloat16)
    base = get_hf_state_dict(model, torch.bfloat16)
    untied = {"lm_head.weight": base["model.embed_tokens.weight"].clone(), **copied(base)}

    nothing = hf_delta(model, base)
    assert nothing.tensors == {}
    assert apply_delta(engine.state_dict(), nothing) == apply_delta(tmp_path / "engine", nothing) == []

    sizes = []
    for lr in (1e-6, 1e-5, 0.0, 1e-1):
        steps(model, lr, count=2)
        delta = hf_delta(model, base)
        sizes.append(size(delta))
        expected = get_hf_state_dict(model, torch.bfloat16)
        assert_same_bits(base, expected)
        assert_no_common_memory(base, delta.tensors)

        delta.save(tmp_path / "delta.safetensors")
        changed = apply_delta(engine.state_dict(), delta)
        assert apply_delta(tmp_path / "engine", tmp_path / "delta.safetensors") == [
            name for name in read_tensors(tmp_path / "engine") if name in changed
        ]
        assert "lm_head.weight" in apply_delta(untied, delta) or lr == 0.0
        assert_same_bits(read_tensors(tmp_path / "engine"), expected)
        assert_same_bits(engine.state_dict(), {"lm_head.weight": expected["model.embed_tokens.weight"], **expected})
        assert_same_bits(untied, dict(engine.state_dict()))
    # Few elements change in a small step, and in a large one nearly all, which are then sent without indices.
    whole = sum(tensor.nbytes for tensor in base.values())
    assert 0 < sizes[0] < sizes[1] < whole / 2
    assert sizes[2] == 0
    assert whole / 2 < sizes[3] <= whole
    assert not any(name.endswith(":indices") for name in delta.tensors if "mlp" in name)
    assert not [path for path in tmp_path.iterdir() if path.name not in ("engine", "delta.safetensors")]


def test_a_folder_is_not_loaded_while_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that loads the folder would otherwise get tensors from before and from after the change."""
    model = tiny_llama()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    base = copied(get_hf_state_dict(model))
    steps(model, 1e-3, count=1)
    delta, opened = hf_delta(model, base), list[Path]()
    files = [*tmp_path.glob("*.safetensors")]

    def change_after_some_tensors(path: Path) -> Any:
        opened.append(path)
        if len(opened) == len(files) + 4:  # loading first reads the header of each file
            apply_delta(tmp_path, delta)
        return open_safetensors(path)

    monkeypatch.setattr("liger_models.convert.files.open_safetensors", change_after_some_tensors)
    with pytest.raises(OSError, match=r"must not be written to while it is loaded, got a new config.json. Load it"):
        LigerLlama.from_pretrained(tmp_path, progress=False)
    assert_same_bits(
        dict(LigerLlama.from_pretrained(tmp_path, progress=False).named_parameters()), dict(model.named_parameters())
    )


@pytest.mark.parametrize("bits", [None, "nf4"])
def test_adapters_are_merged(bits: str | None) -> None:
    """The base never changes, so only the adapted tensors are sent, also of a base that is quantized."""
    model = tiny_llama()
    if bits:
        model.to(torch.bfloat16)
    apply_lora(model, LoRAConfig(r=4, target_modules=["q_proj", "down_proj"]))
    if bits:
        quantize_base(model, dtype=bits)
    base = get_hf_state_dict(model, torch.bfloat16)
    receiver = copied(base)
    steps(model, lr=1e-2, count=2)
    changed = apply_delta(receiver, hf_delta(model, base))
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "down_proj"}
    assert_same_bits(receiver, get_hf_state_dict(model, torch.bfloat16))
    frozen = get_hf_state_dict(model, torch.bfloat16, merge=False)
    assert hf_delta(model, frozen, merge=False).tensors == {}


def test_the_smaller_form_is_sent() -> None:
    """An index and an element of bfloat16 are six bytes, so a tensor with a third of its elements changed is whole."""
    model = tiny_llama().to(torch.bfloat16)
    base = get_hf_state_dict(model)
    weight = model.norm.weight  # 32 elements
    for changed, names in (
        (10, {"model.norm.weight:indices", "model.norm.weight:values"}),
        (11, {"model.norm.weight"}),
    ):
        with torch.no_grad():
            weight[:changed] *= -1
        delta = hf_delta(model, base)
        assert delta.tensors.keys() == names
        assert size(delta) == min(6 * changed, 2 * 32)
    # Bits count: 0 differs from -0, and NaN equals itself.
    for value, count in ((0.0, 6), (-0.0, 6), (float("nan"), 6), (float("nan"), 0)):
        with torch.no_grad():
            weight[3] = value
        delta = hf_delta(model, base)
        assert size(delta) == count
    assert_same_bits(base, get_hf_state_dict(model))


def test_a_wrong_base_is_refused(tmp_path: Path) -> None:
    model = tiny_llama().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "engine")
    base = get_hf_state_dict(model)
    start = copied(base)
    steps(model, lr=1e-3)
    first = hf_delta(model, base)
    after_first = copied(base)
    steps(model, lr=1e-3)
    second = hf_delta(model, base)

    def refused(target: Any, delta: Any, message: str) -> None:
        before = copied(target if isinstance(target, dict) else read_tensors(target))
        with pytest.raises(ValueError, match=message):
            apply_delta(target, delta)
        assert_same_bits(target if isinstance(target, dict) else read_tensors(target), before)

    others = "target must hold the weights from which the changes start, got other values, dtypes or shapes of "
    refused(copied(start), second, others)  # the first is missing
    refused(tmp_path / "engine", second, others)
    refused(copied(base), second, others)  # applied twice
    # Another bit of a tensor that does not change, another dtype, another shape, a missing tensor, an untied head.
    name = "model.norm.weight"
    quiet = WeightDelta({}, {"base": second.metadata["base"], "content": "{}"})
    assert apply_delta(copied(after_first), quiet) == []
    for tensor in (-after_first[name], after_first[name].half(), after_first[name].view(1, -1)):
        refused({**after_first, name: tensor}, quiet, f"{others}1 of 30 tensors: {name}. Apply all deltas")
    without = {each: tensor for each, tensor in after_first.items() if each != name}
    refused(without, quiet, f"target must have the tensors of the sender's checkpoint, got none of the name {name}")
    refused({"model.lm_head.weight": torch.ones(3), **after_first}, quiet, f"{others}1 of 30 tensors: model.lm_head")
    # What was damaged on its way, or is no delta.
    part = next(iter(first.tensors))
    damaged = {**first.tensors, part: first.tensors[part].flip(0)}
    refused(copied(start), first._replace(tensors=damaged), "delta must hold what was sent, got other tensors")
    refused(copied(start), WeightDelta({}, {}), "delta must be a result of hf_delta, got one without checksums")
    refused(copied(start), tmp_path / "engine" / "model.safetensors", "delta must be a result of hf_delta")
    # The base of the sender.
    with pytest.raises(ValueError, match=r"hf_delta: base must hold the tensors of the .*: model.norm.weight"):
        hf_delta(model, {each: tensor for each, tensor in base.items() if each != name})


def test_a_checksum_depends_on_every_bit_and_its_place() -> None:
    tensor = torch.randn(3, 1001).bfloat16()
    numbers = {checksum(tensor), checksum(tensor.flip(0)), checksum(tensor.half()), checksum(tensor.flatten())}
    for index in (0, 3, 4, 3002):
        for bit in (0, 15):
            changed = tensor.clone()
            changed.view(torch.int16).view(-1)[index] ^= -(2**15) if bit == 15 else 1
            numbers.add(checksum(changed))
    # Two signs in the same place of their words.
    changed = tensor.clone()
    changed.view(-1)[3:8:4] *= -1
    numbers.add(checksum(changed))
    assert len(numbers) == 13
    # Strides and offsets in memory do not count.
    assert checksum(tensor.t().contiguous().t()) == checksum(torch.cat([tensor[:1], tensor])[1:]) == checksum(tensor)


@pytest.mark.gpu
def test_a_base_on_another_device() -> None:
    """The model is on the GPU, and the weights of the last sync are on the host."""
    model = tiny_llama().to("cuda", torch.bfloat16)
    base, receiver = (get_hf_state_dict(model, device=device) for device in ("cpu", "cuda"))
    assert all(checksum(base[name]) == checksum(receiver[name]) for name in base)
    inputs = {name: tensor.cuda() for name, tensor in batch(0).items()}
    model(**inputs).loss.backward()
    LigerAdamW(model.parameters(), lr=1e-4).step()
    delta = hf_delta(model, base)
    assert {tensor.device.type for tensor in delta.tensors.values()} == {"cpu"}
    assert apply_delta(receiver, delta)
    assert_same_bits(receiver, get_hf_state_dict(model))
    assert_same_bits(base, get_hf_state_dict(model, device="cpu"))
