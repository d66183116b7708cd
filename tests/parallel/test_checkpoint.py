"""A sharded model in and out of a Hugging Face checkpoint."""

import contextlib
import io
import os
import shutil
import time
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from liger_models import AutoLigerModel
from liger_models.arch import get_arch
from liger_models.arch.llama import LigerLlama
from liger_models.convert import files, hub, save
from liger_models.distributed import ranks
from liger_models.layers.layer import wide_parameters
from liger_models.layers.moe import update_correction_biases
from liger_models.parallel import apply_fsdp

from ..arch import families
from ..convert.conftest import assert_same_bits, read_tensors
from ..late import transformers
from .conftest import SECONDS
from .models import batch, gradients, init_device_mesh, share, tiny, whole

LAYOUTS = ["llama", "phi3", "qwen3_moe", "gemma3_text", "deepseek_v3"]
"""A projection for each of q, k, v, gate, up; fused ones; experts; tied, and two rotary embeddings; latents."""


safe_open = files.safe_open


class Counting:
    """A safetensors file that counts what is read of each tensor, in bytes."""

    def __init__(self, file: Any, bytes_read: Counter[str]) -> None:
        self.file, self.bytes_read = file, bytes_read

    def __enter__(self) -> "Counting":
        self.file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(*error)

    def keys(self) -> list[str]:
        return self.file.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.count(name, self.file.get_tensor(name))

    def count(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.bytes_read[name] += tensor.nbytes
        return tensor

    def get_slice(self, name: str) -> Any:
        header = self.file.get_slice(name)
        rows = mock.MagicMock(get_shape=header.get_shape, get_dtype=header.get_dtype)
        rows.__getitem__ = lambda _, rows: self.count(name, header[rows])
        return rows


def load(arch: str, folder: Path, **options: Any) -> Any:
    cls: Any = AutoLigerModel if "shard" in options else get_arch(arch)
    return cls.from_pretrained(folder, progress=False, **options)


def load_parts(arch: str, folder: Path, dtype: torch.dtype | None, shape: tuple[int, ...], reference: dict) -> dict:
    """Load sharded; what every rank reads of each tensor."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts")[-len(shape) :])
    bytes_read: Counter[str] = Counter()
    with mock.patch.object(files, "safe_open", lambda *a, **k: Counting(safe_open(*a, **k), bytes_read)):
        model = load(arch, folder, dtype=dtype, shard=partial(apply_fsdp, mesh=mesh, param_dtype=None))
    assert_same_bits(whole(model.named_parameters()), reference)
    assert (model.lm_head.weight is model.embed_tokens.weight) == model.config.tie_word_embeddings
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert not model.rotary[next(iter(model.rotary))].inv_freq.is_meta
    # It trains: FSDP has taken the loaded weights up.
    ids = torch.arange(3, 19).view(2, 8)
    loss = model(ids, labels=ids).loss
    loss.backward()
    return {"bytes": bytes_read, "loss": loss.detach(), "gradients": gradients(model)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Architecture -> a checkpoint in several files."""
    from ..arch.families import make_folder, tiny

    root = tmp_path_factory.mktemp("hf")
    made = {}
    for arch in LAYOUTS:
        source = make_folder(arch, next(iter(tiny(arch))), root)
        load(arch, source).save_pretrained(root / arch, max_shard_size="60KB")
        assert len(list((root / arch).glob("*.safetensors"))) > 1
        made[arch] = root / arch
    return made


def bars(folder: Path) -> tuple[str, bool]:
    """What loading prints, and whether downloads show bars."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        LigerLlama.from_pretrained(folder)
        LigerLlama.from_pretrained(folder, shard=apply_fsdp)
    with hub._progress_bars(True):
        return printed.getvalue(), not hub.are_progress_bars_disabled()


def test_progress_bars_of_the_first_rank_only(two, tmp_path):
    tiny().save_pretrained(tmp_path)
    (printed, downloads), *others = two(bars, tmp_path)
    assert printed.count("Loading weights: 100%") == 2
    assert downloads
    assert others == [("", False)]


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("arch", LAYOUTS)
def test_each_rank_reads_its_rows(two, folders, arch, dtype):
    plain = load(arch, folders[arch], dtype=dtype)
    expected = dict(plain.named_parameters())
    ids = torch.arange(3, 19).view(2, 8)
    loss = plain(ids, labels=ids).loss
    loss.backward()
    read = two(load_parts, arch, folders[arch], dtype, (2,), {name: p.detach() for name, p in expected.items()})
    for result in read:
        assert torch.equal(result["loss"], loss.detach())
        if dtype is None:
            torch.testing.assert_close(result["gradients"], gradients(plain), rtol=1e-6, atol=1e-7)
    tensors = read_tensors(folders[arch])
    rows = {name: tensor[0].nbytes for name, tensor in tensors.items()}
    share = sum(tensor.nbytes for tensor in tensors.values()) // 2 + sum(rows.values())
    for result in read:
        assert sum(result["bytes"].values()) <= share
    for name, tensor in tensors.items():
        assert tensor.nbytes <= sum(result["bytes"][name] for result in read) <= tensor.nbytes + 2 * rows[name], name


@pytest.mark.matrix  # as shards alone, on twice as many ranks
def test_copies_of_shards(four, folders):
    expected = {name: p.detach() for name, p in load("llama", folders["llama"]).named_parameters()}
    for result in four(load_parts, "llama", folders["llama"], None, (2, 2), expected):
        total = sum(tensor.nbytes for tensor in expected.values())
        assert sum(result["bytes"].values()) <= 0.55 * total


def load_and_fail(folder: Path, broken: Path) -> list[str]:
    messages = []
    for case in range(3):
        rank = dist.get_rank()
        place = folder
        failing: Any = nullcontext()
        if case == 0:
            place = broken if rank == 1 else folder  # as on a machine that lacks the files
        elif case == 1 and rank == 1:
            failing = mock.patch("liger_models.convert.sharded.plan_rows", side_effect=OSError(5, "no disk"))
        try:
            with failing:
                model = LigerLlama.from_pretrained(place, progress=False, shard=apply_fsdp)
                if case == 2:
                    file = folder / "config.json"
                    model.save_pretrained(file)
        except (OSError, ValueError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_all_ranks_raise_the_same_error(two, folders, tmp_path):
    shutil.copytree(folders["llama"], tmp_path / "broken")
    (tmp_path / "broken" / "model-00001-of-00003.safetensors").unlink(missing_ok=True)
    next(iter((tmp_path / "broken").glob("*.safetensors"))).write_bytes(b"cut off")
    first, second = two(load_and_fail, folders["llama"], tmp_path / "broken")
    assert first == second
    assert len(first) == 3
    assert str(tmp_path / "broken") in first[0]
    assert first[1] == "OSError: [Errno 5] no disk"
    assert "must be a folder, got a file" in first[2]


def save_parts(tied: bool, folder: Path) -> None:
    model = apply_fsdp(tiny(tie_word_embeddings=tied))
    with torch.no_grad():
        model(**share(batch(0), dist.get_rank(), 2))  # leaves groups gathered
    for name, options in OUT.items():
        model.save_pretrained(folder / name, **options)
        assert (folder / name / "config.json").is_file() or dist.get_rank()  # the first rank has written it
    dist.barrier()
    with pytest.raises(ValueError, match="push_to_hub: the model must not be sharded"):
        model.push_to_hub("any/name")


OUT = {"one": {}, "several": {"max_shard_size": "20KB"}, "half": {"dtype": torch.bfloat16}}


@pytest.mark.parametrize("tied", [False, True])
def test_saved_as_by_one_process(two, tmp_path, tied):
    two(save_parts, tied, tmp_path)
    model = tiny(tie_word_embeddings=tied)
    for name, options in OUT.items():
        model.save_pretrained(tmp_path / "plain" / name, **options)
        got, expected = tmp_path / name, tmp_path / "plain" / name
        assert {path.name for path in got.iterdir()} == {path.name for path in expected.iterdir()}
        for path in expected.iterdir():
            assert (got / path.name).read_bytes() == path.read_bytes(), path.name
    theirs, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "several", output_loading_info=True)
    assert not any(info.values())
    ids = batch(0)["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


def save_late(folder: Path) -> None:
    """The second rank saves a second later, then not at all."""
    model = apply_fsdp(tiny())
    late = dist.get_rank() == 1
    said = (
        nullcontext() if late else pytest.warns(UserWarning, match="must make this call, got none from rank 1 in 0.2 s")
    )
    with mock.patch.object(ranks, "PATIENCE", timedelta(seconds=0.2)), said:
        time.sleep(late)
        model.save_pretrained(folder)
    assert (folder / "config.json").is_file()
    store = dist.distributed_c10d._get_default_store()
    before = store.timeout
    dist.barrier()
    if not late:
        store.set_timeout(timedelta(seconds=0.5))
        message = (
            r"save_pretrained: every rank must make this call, got none from rank 1 in 0\.5 s\. Call it on all ranks"
        )
        with (
            mock.patch.object(ranks, "PATIENCE", timedelta(seconds=0.2)),
            pytest.warns(UserWarning, match="Still waiting"),
            pytest.raises(TimeoutError, match=message),
        ):
            model.save_pretrained(folder)
        store.set_timeout(before)
    else:
        ranks._calls["save_pretrained"] += 1  # as often as the first rank, for the tests that follow
    dist.barrier()


def test_saving_a_sharded_model_on_one_rank_alone(two, tmp_path):
    two(save_late, tmp_path / "model")


def save_whole(folder: Path) -> list[str]:
    """Every rank saves the same unsharded model, then the first alone; what each has met."""
    rank, met = dist.get_rank(), []
    writing: Any = mock.patch.object(save, "write_folder", wraps=save.write_folder)
    slow: Any = mock.patch.object(save, "save_file", side_effect=later) if rank == 0 else nullcontext()
    with writing as write, slow:
        for options in ({"max_shard_size": "20KB"}, {}):  # a new folder, then one with files to remove
            tiny().save_pretrained(folder / "all", **options)
            met.append(f"{len(list((folder / 'all').glob('*.safetensors')))} {write.call_count}")
    if rank == 0:
        tiny().save_pretrained(folder / "alone")
    full: Any = mock.patch.object(save, "save_file", side_effect=OSError(28, "full")) if rank == 0 else slow
    try:
        with full:
            tiny().save_pretrained(folder / "all")
    except OSError as error:
        met.append(f"{error.errno} {error}")
    return met


def later(*arguments: Any, **options: Any) -> None:
    """As on a slow disk: who does not wait finds too few files."""
    time.sleep(0.05)
    save_file(*arguments, **options)


def test_a_whole_model_is_written_by_the_first_rank(two, tmp_path):
    tiny().save_pretrained(tmp_path / "plain", max_shard_size="20KB")
    files = len(list((tmp_path / "plain").glob("*.safetensors")))
    first, second = two(save_whole, tmp_path)
    assert files > 1
    assert first[:2] == [f"{files} 1", "1 2"]
    assert second[:2] == [f"{files} 0", "1 0"]
    assert "full" in first[2]
    assert first[2] == second[2]
    got = read_tensors(tmp_path / "alone")
    assert_same_bits(got, read_tensors(tmp_path / "plain"))
    assert_same_bits(read_tensors(tmp_path / "all"), got)


def save_without_the_first(folder: Path) -> str:
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=1))
    try:
        if dist.get_rank() == 1:
            tiny().save_pretrained(folder)
    except TimeoutError as error:
        return str(error)
    finally:
        store.set_timeout(timedelta(seconds=SECONDS))
    return ""


def test_a_whole_model_is_not_written_without_the_first_rank(two, tmp_path):
    first, second = two(save_without_the_first, tmp_path / "model")
    assert first == ""
    expected = "rank 0 must make the same call, got nothing from it. Call it there, too."
    assert second == f"save_pretrained {tmp_path / 'model'}: {expected}"
    assert not (tmp_path / "model").exists()


def push_whole() -> tuple[str, int]:
    api = mock.Mock()
    api.create_repo.return_value.repo_id = "any/name"
    api.upload_folder.side_effect = lambda folder_path, **_: mock.Mock(commit_url=str(len(os.listdir(folder_path))))
    with mock.patch.object(hub, "HfApi", return_value=api):
        return tiny().push_to_hub("any/name"), api.upload_folder.call_count


def test_a_whole_model_is_uploaded_by_the_first_rank(two):
    assert two(push_whole) == [("2", 1), ("2", 0)]


def load_mxfp4(folder: Path, target: Path) -> dict[str, Any]:
    """What two ranks load of a checkpoint in MXFP4, each its own rows, and save as one."""
    bytes_read: Counter[str] = Counter()
    with mock.patch.object(files, "safe_open", lambda *a, **k: Counting(safe_open(*a, **k), bytes_read)):
        model = load("gpt_oss", folder, shard=partial(apply_fsdp, param_dtype=None))
    model.save_pretrained(target, mxfp4=folder)
    return {"weights": whole(model.named_parameters()), "bytes": bytes_read}


def test_experts_in_mxfp4(two, tmp_path):
    from ..convert.test_mxfp4 import make

    folder = make(tmp_path / "mxfp4")
    stored, expected = read_tensors(folder), load("gpt_oss", folder)
    for result in two(load_mxfp4, folder, tmp_path / "saved"):
        assert_same_bits(result["weights"], {name: p.detach() for name, p in expected.named_parameters()})
        blocks = "model.layers.0.mlp.experts.down_proj_blocks"
        assert result["bytes"][blocks] == stored[blocks].nbytes // 2
    assert_same_bits(read_tensors(tmp_path / "saved"), stored)


def save_by_turns(folder: Path) -> list[str]:
    """The files that this rank writes."""
    model, written, save_one = apply_fsdp(tiny()), [], save.save_file

    def write(tensors: dict[str, torch.Tensor], path: Path, **options: Any) -> None:
        written.append(Path(path).name)
        save_one(tensors, path, **options)

    with mock.patch.object(save, "save_file", write), mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        model.save_pretrained(folder, max_shard_size=10_000)
    return written


def fail_by_turns(folder: Path) -> None:
    """The rank that does not lead cannot write one of its files."""

    def write(tensors: dict[str, torch.Tensor], path: Path, **options: Any) -> None:
        raise OSError(28, f"No space left on device on rank {dist.get_rank()}")

    model = apply_fsdp(tiny())
    failing = mock.patch.object(save, "save_file", write) if dist.get_rank() == 1 else nullcontext()
    told = pytest.raises(OSError, match="No space left on device on rank 1")
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"), told, failing:
        model.save_pretrained(folder, max_shard_size=10_000)


def test_ranks_of_a_host_write_files_in_turn(two, tmp_path):
    first, second = two(save_by_turns, tmp_path / "ranks")
    assert first
    assert second
    assert not {*first} & {*second}
    tiny().save_pretrained(tmp_path / "one", max_shard_size=10_000)
    assert {path.name: path.read_bytes() for path in (tmp_path / "ranks").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()
    }
    two(fail_by_turns, tmp_path / "failed")
    assert not (tmp_path / "failed").exists()


def load_another_checkpoint(folders: list[Path]) -> None:
    with pytest.raises(
        ValueError, match="must hold the same checkpoint on all ranks, got another one on rank 1 than on"
    ):
        load("llama", folders[dist.get_rank()], shard=apply_fsdp)


def open_what_is_needed(folder: Path) -> list[int]:
    """How many files a rank opens: only rank 0 opens all of them at first."""
    opened: list[str] = []
    open_one = files.safe_open

    def count(path: str, *arguments: Any, **options: Any) -> Any:
        opened.append(path)
        return open_one(path, *arguments, **options)

    with mock.patch.object(files, "safe_open", count):
        load("llama", folder, shard=apply_fsdp)
    return [len(opened), len({*opened})]


def test_ranks_have_the_same_checkpoint_and_open_what_they_need(two, tmp_path):
    for seed, name in enumerate(("one", "other")):
        torch.manual_seed(seed)
        tiny().save_pretrained(tmp_path / name, max_shard_size=10_000)
    model = LigerLlama.from_pretrained(tmp_path / "other", progress=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    model.save_pretrained(tmp_path / "other", max_shard_size=10_000)
    two(load_another_checkpoint, [tmp_path / "one", tmp_path / "other"])
    (first, of_first), (second, _) = two(open_what_is_needed, tmp_path / "one")
    assert first - second == of_first == len([*(tmp_path / "one").glob("*.safetensors")]) > 2


def read_in_bf16(arch: str, folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    model = load(arch, folder, dtype=torch.bfloat16, shard=lambda model: apply_fsdp(model, param_dtype=None))
    loss = model(**share(batch(0), dist.get_rank(), 2)).loss
    loss.backward()
    biases = {name: model.get_parameter(name).full_tensor().detach() for name in wide_parameters(model)}
    return biases, gradients(model)["layers.1.mlp.experts.gate.weight"]


def by_hand(model: Any) -> Any:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


WRAPPERS = {
    "none": lambda model: model,
    "apply_fsdp": partial(apply_fsdp, param_dtype=None),
    "fully_shard": by_hand,
    "DistributedDataParallel": DistributedDataParallel,
}


def update_biases(folder: Path, rank: int, ranks: int, wrapper: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The bias after an update, and the logits with it."""
    model = load("deepseek_v3", folder)
    wrapped = WRAPPERS[wrapper](model)
    inputs = share(batch(0), rank, ranks)
    for _ in range(2):
        out = wrapped(**inputs, return_logits=True)
        out.loss.backward()
        update_correction_biases(model, model.choose_experts(out.router_logits), rate=0.5)
    (name,) = wide_parameters(model)
    (bias,) = whole([(name, model.get_parameter(name))]).values()
    return bias, wrapped(**inputs, return_logits=True).logits.detach()


def update_biases_on_ranks(folder: Path, wrapper: str) -> tuple[torch.Tensor, torch.Tensor]:
    return update_biases(folder, dist.get_rank(), 2, wrapper)


@pytest.mark.parametrize("wrapper", ["apply_fsdp", "fully_shard", "DistributedDataParallel"])
def test_biases_of_routers_follow_the_load_of_all_ranks(two, tmp_path, wrapper):
    AutoLigerModel.from_config({"model_type": "deepseek_v3", **families.tiny("deepseek_v3")["yarn"]}).save_pretrained(
        tmp_path
    )
    want, logits = update_biases(tmp_path, 0, 1, "none")
    assert want.abs().sum() > 0
    parts = two(update_biases_on_ranks, tmp_path, wrapper)
    assert all(torch.equal(bias, want) for bias, _ in parts)
    torch.testing.assert_close(torch.cat([part for _, part in parts]), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("arch", "variant"), [("deepseek_v3", "yarn"), ("ernie4_5_moe", "released")])
def test_routers_stay_in_fp32_on_ranks(two, tmp_path, arch, variant):
    """The bias for the choice of experts, and ERNIE's router, in a model in bf16, of which FSDP2 shards the rest."""
    sizes = families.tiny(arch)[variant]
    model = AutoLigerModel.from_config({"model_type": arch, **sizes})
    names = wide_parameters(model)
    for name in names:
        model.get_parameter(name).data.normal_()
    model.bfloat16().save_pretrained(tmp_path)
    for biases, gradient in two(read_in_bf16, arch, tmp_path):
        assert [*biases] == names
        assert all(torch.equal(bias, model.get_parameter(name)) for name, bias in biases.items())
        assert gradient.abs().sum() > 0
