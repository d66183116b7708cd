"""A run that stops and goes on is as one that does not; whenever it dies, the checkpoint before remains."""

import random
import shutil
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _FileSystemWriter

from liger_models import LigerLlama, LigerMistral, LlamaConfig
from liger_models.adapters import LoRAConfig, apply_lora
from liger_models.arch.mistral.model import MistralConfig
from liger_models.parallel import apply_fsdp, load_state, save_state, state

from ..processes import FORKSERVER, start_forkserver
from .models import batch, make_optimizer, share, tiny, whole

STEPS, STOP = 4, 2


class Data:
    """Batches whose order the random generators of the rank and the position decide."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> dict[str, torch.Tensor]:
        self.position += 1
        return batch(100 * self.position)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Run:
    """A model with dropout, frozen parameters, and all that belongs to its training."""

    def __init__(self, case: dict[str, Any]) -> None:
        config = {"tie_word_embeddings": case.get("tied", False), "attention_dropout": case.get("dropout", 0.3)}
        self.model = tiny(**config)
        self.model.layers[1].requires_grad_(False)
        if dist.is_initialized():
            apply_fsdp(self.model, param_dtype=None)
        self.optimizer = make_optimizer(case.get("optimizer", "liger"), self.model)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=STEPS)
        self.data = Data()
        self.parts = self.model, self.optimizer, self.scheduler, self.data

    def train(self, steps: int) -> list[float]:
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        losses = []
        for _ in range(steps):
            inputs = share(self.data.next(), rank, ranks)
            inputs["input_ids"] = inputs["input_ids"].roll(random.randrange(3))
            loss = self.model(**inputs, num_items_in_batch=30 / ranks).loss
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, torch.Tensor]:
        state = whole(self.model.named_parameters())
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                state.update(whole([(f"{name} {key}", value)]))
        return state


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)


def stop_and_go_on(folder: Path, case: dict[str, Any]) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    seed(rank)
    run = Run(case)
    assert load_state(folder, *run.parts) is None
    run.train(STOP)
    done = save_state(folder, STOP, *run.parts, background=case.get("background", False))
    losses = run.train(STEPS - STOP)  # also while it is written
    done.result()
    expected = run.state()
    if dist.is_initialized():
        dist.barrier()

    seed(rank + 50)
    again = Run(case)
    with torch.no_grad():
        for parameter in again.model.parameters():
            parameter.zero_()
    assert load_state(folder, *again.parts) == STOP
    assert again.data.position == STOP
    assert again.train(STEPS - STOP) == losses
    got = again.state()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert again.scheduler.get_last_lr() == run.scheduler.get_last_lr()


CASES = {
    "plain": {},
    "tied, torch's AdamW": {"tied": True, "optimizer": "torch"},
    "background": {"background": True},
    "tied, background": {"tied": True, "background": True},
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_as_without_a_stop(two, tmp_path, case):
    two(stop_and_go_on, tmp_path, case)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_as_without_a_stop_in_one_process(tmp_path, case):
    stop_and_go_on(tmp_path, case)


def train_and_save(folder: Path, case: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    run = Run(case)
    run.train(STOP)
    save_state(folder, STOP, *run.parts)
    return run.train(STEPS - STOP), run.state()


def go_on(folder: Path, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    run = Run(case)
    random.seed(1)
    assert load_state(folder, *run.parts) == STOP
    run.train(STEPS - STOP)
    return run.state()


@pytest.mark.cases(1)
@pytest.mark.parametrize("tied", [False, True])
def test_on_another_number_of_ranks(two, tmp_path, tied):
    case = {"tied": tied, "dropout": 0.0}
    with mock.patch.object(random, "randrange", return_value=0):
        seed(0)
        _, expected = train_and_save(tmp_path / "one", case)
    for got in two(go_on_unshuffled, tmp_path / "one", case):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)
    two(save_unshuffled, tmp_path / "two", case)
    with mock.patch.object(random, "randrange", return_value=0):
        torch.testing.assert_close(go_on(tmp_path / "two", case), expected, rtol=2e-5, atol=2e-6)


def go_on_unshuffled(*arguments: Any) -> dict[str, torch.Tensor]:
    with mock.patch.object(random, "randrange", return_value=0):
        return go_on(*arguments)


def save_unshuffled(*arguments: Any) -> None:
    with mock.patch.object(random, "randrange", return_value=0):
        train_and_save(*arguments)


def save_what_has_no_state(folder: Path) -> None:
    """Checkpoints before the first step, and before the first gradient of one parameter (a tower's, among texts)."""
    runs = [Run({"dropout": 0.0}) for _ in range(2)]
    head = runs[0].model.lm_head.weight
    for run, name in zip(runs, ("saved", "plain"), strict=True):
        run.model.lm_head.requires_grad_(False)
        if name == "saved":
            save_state(folder, 0, *run.parts)
        assert not run.optimizer.state
        seed(0)
        run.train(1)
        run.model.lm_head.requires_grad_(True)
    expected = runs[1].state()
    assert all(torch.equal(value, expected[name]) for name, value in runs[0].state().items())
    save_state(folder, 1, *runs[0].parts)

    again = Run({"dropout": 0.0})
    again.train(1)  # of which nothing is to stay
    assert load_state(folder, *again.parts) == 1
    assert again.state().keys() == expected.keys()
    assert again.model.lm_head.weight not in again.optimizer.state
    seed(1)
    again.train(1)
    seed(1)
    runs[0].train(1)
    expected = runs[0].state()
    assert again.state().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in again.state().items())
    save_state(folder, 2, *again.parts)

    assert load_state(folder, *again.parts, step=0) == 0
    assert not again.optimizer.state
    again.model(**batch(0)).loss.backward()
    assert load_state(folder, *again.parts) == 2
    assert all(torch.equal(value, expected[name]) for name, value in again.state().items())
    assert head in runs[0].optimizer.state


def test_parameters_without_state(two, tmp_path):
    save_what_has_no_state(tmp_path / "one")
    two(save_what_has_no_state, tmp_path / "two")


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:50])])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_damaged_list_of_tensors(tmp_path, damage, parts):
    run = Run({})
    save_state(tmp_path, 1, *run.parts)
    damage(next(tmp_path.rglob(".metadata")))
    with pytest.raises(OSError, match=r"step-00000001: must be written and read in full by all ranks, got on rank 0"):
        load_state(tmp_path, *run.parts[:parts])


def save_different_positions(folder: Path) -> None:
    run = Run({})
    run.data.position = dist.get_rank()
    save_state(folder, 1, *run.parts)
    run.data.position = 9
    load_state(folder, *run.parts)
    assert run.data.position == dist.get_rank()


def test_positions_of_another_number_of_ranks(two, tmp_path):
    two(save_different_positions, tmp_path)
    run = Run({})
    with pytest.raises(ValueError, match="data must have one state for all ranks to resume with 1 instead of 2"):
        load_state(tmp_path, *run.parts)
    assert load_state(tmp_path, *run.parts[:3]) == 1


def test_folder(tmp_path):
    """Steps of one's choice, a limit to their number, a step that is saved again."""
    run = Run({})
    for step in (1, 2, 3):
        run.train(1)
        save_state(tmp_path, step, *run.parts, keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000002", "step-00000003", "latest"}
    assert load_state(tmp_path, *run.parts, step=2) == 2
    assert run.data.position == 2
    assert load_state(tmp_path, run.model) == 3
    run.train(4)
    save_state(tmp_path, 3, *run.parts)
    assert load_state(tmp_path, *run.parts) == 3
    assert run.data.position == 6
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000002", "step-00000003", "latest"}
    # Where it died between the two renamings
    (tmp_path / "step-00000003").rename(tmp_path / "step-00000003.old")
    assert load_state(tmp_path, *run.parts) == 3

    with pytest.raises(FileNotFoundError, match="must be a checkpoint, got step-00000002"):
        load_state(tmp_path, *run.parts, step=7)
    save_state(tmp_path, 5, run.model)
    assert {path.name for path in tmp_path.iterdir()} == {*(f"step-0000000{step}" for step in (2, 3, 5)), "latest"}
    for name, part in zip(("scheduler", "data"), run.parts[2:], strict=True):
        with pytest.raises(ValueError, match=f"load_state: {name} must have a state in .*step-00000005, got none"):
            load_state(tmp_path, run.model, **{name: part})
    with pytest.raises(ValueError, match="keep must be at least 1"):
        save_state(tmp_path, 4, *run.parts, keep=0)
    for step in range(1, 6):
        save_state(tmp_path / "four", step, run.model, keep=4)
        assert len([*(tmp_path / "four").glob("step-*")]) == min(step, 4)


def test_killed_while_it_deletes_an_outdated_checkpoint(tmp_path):
    """The remaining files do not count as a checkpoint, and the next save removes them."""
    model = Run({}).model
    for step in (1, 2):
        save_state(tmp_path, step, model)

    def die(folder: Path, **_: Any) -> None:
        if folder.exists():
            (folder / "shared.pt").unlink()
            raise KeyboardInterrupt

    with mock.patch.object(shutil, "rmtree", die), pytest.raises(KeyboardInterrupt):
        save_state(tmp_path, 3, model, keep=2)
    with pytest.raises(FileNotFoundError, match="got step-00000002, step-00000003 in"):
        load_state(tmp_path, model, step=1)
    save_state(tmp_path, 4, model)
    assert {path.name for path in tmp_path.iterdir()} == {*(f"step-0000000{step}" for step in (2, 3, 4)), "latest"}


def test_checkpoints_that_were_moved_and_linked(tmp_path):
    """As to a larger disk. Saving removes outdated and replaced links, and never the folders that they point to."""
    model, elsewhere = Run({}).model, tmp_path / "elsewhere"
    elsewhere.mkdir()
    for step in (1, 2):
        save_state(tmp_path / "run", step, model)
        folder = tmp_path / "run" / f"step-{step:08d}"
        folder.rename(elsewhere / folder.name)
        folder.symlink_to(elsewhere / folder.name)
    save_state(tmp_path / "run", 2, model)
    save_state(tmp_path / "run", 3, model, keep=1)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"step-00000003", "latest"}
    assert all((elsewhere / f"step-0000000{step}" / "shared.pt").is_file() for step in (1, 2))


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_pointer_that_is_lost(tmp_path, damage):
    """As where the machine lost power. A run that began anew would write over its checkpoints."""
    run = Run({})
    for step in (1, 2):
        save_state(tmp_path, step, *run.parts)
    damage(tmp_path / "latest")
    with pytest.warns(UserWarning, match="latest names no checkpoint. Resuming from step-00000002"):
        assert load_state(tmp_path, *run.parts) == 2
    assert load_state(tmp_path / "other", *run.parts) is None


def save_into_a_file(folder: Path) -> None:
    with pytest.raises(OSError, match=r"save_state: .*file/run must be a folder that every rank can write to, got Not"):
        save_state(folder / "file" / "run", 1, tiny())


def test_a_folder_that_cannot_be_written(two, tmp_path):
    (tmp_path / "file").touch()
    save_into_a_file(tmp_path)
    two(save_into_a_file, tmp_path)


def test_errors_of_a_save_in_the_background(tmp_path):
    run = Run({})
    go = threading.Event()

    def fail(*_: Any, **__: Any) -> None:
        go.wait()
        raise OSError(28, "No space left on device")

    with mock.patch.object(_FileSystemWriter, "write_data", fail):
        done = save_state(tmp_path, 1, *run.parts, background=True)
        with pytest.raises(ValueError, match=r"Call its result\(\) first"):
            save_state(tmp_path, 2, *run.parts)
        go.set()
        with pytest.raises(OSError, match=r"got on rank 0: OSError.*No space left on device"):
            done.result()
    assert load_state(tmp_path, *run.parts) is None
    save_state(tmp_path, 2, *run.parts)
    assert load_state(tmp_path, *run.parts) == 2


def test_a_save_while_the_last_one_is_published(tmp_path):
    run = Run({})
    publishing, go = threading.Event(), threading.Event()

    def publish(*arguments: Any) -> None:
        publishing.set()
        go.wait()
        state_publish(*arguments)

    state_publish = state._publish
    with mock.patch.object(state, "_publish", publish):
        done = save_state(tmp_path, 1, *run.parts, background=True)
        publishing.wait()
        try:
            with pytest.raises(ValueError, match=r"Call its result\(\) first"):
                save_state(tmp_path, 2, *run.parts)
        finally:
            go.set()
        done.result()
    assert load_state(tmp_path, *run.parts) == 1
    save_state(tmp_path, 2, *run.parts)
    assert load_state(tmp_path, *run.parts) == 2


OTHERS = {
    "rope_theta": ({}, {"rope_theta": 5e5}, r"config\.rope_theta 500000\.0 instead of 10000\.0"),
    "tied": (
        {},
        {"tie_word_embeddings": True},
        r"config\.tie_word_embeddings True instead of False; tied weights embed",
    ),
    "untied": ({"tie_word_embeddings": True}, {}, "tied weights none instead of embed"),
    "layers": ({}, {"num_hidden_layers": 1}, r"config\.num_hidden_layers 1 instead of 3"),
    "width": ({}, {"hidden_size": 64}, r"config\.hidden_size 64 instead of 32"),
}


@pytest.mark.parametrize(("saved", "loaded", "message"), OTHERS.values(), ids=OTHERS)
def test_another_model(tmp_path, saved, loaded, message):
    save_state(tmp_path, 1, tiny(**saved))
    other = tiny(**loaded)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(
        ValueError, match=f"the model must be that of .*step-00000001, got .*{message}.* another folder"
    ):
        load_state(tmp_path, other)
    assert all(tensor.equal(before[name]) for name, tensor in other.state_dict().items())


def test_settings_that_do_not_change_the_meaning_of_weights(tmp_path):
    save_state(tmp_path, 1, tiny(attention_dropout=0.1))
    assert load_state(tmp_path, tiny(attention_dropout=0.2, initializer_range=0.5)) == 1


def test_another_family(tmp_path):
    config = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    save_state(tmp_path, 1, LigerLlama.from_config(LlamaConfig(**config)))
    with pytest.raises(ValueError, match=r"got config MistralConfig instead of LlamaConfig\. Resume"):
        load_state(tmp_path, LigerMistral.from_config(MistralConfig(**config)))


def test_another_set_of_tensors(tmp_path):
    """Of a module that has no config."""
    save_state(tmp_path, 1, torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
    for model, message in (
        (torch.nn.Sequential(torch.nn.Linear(2, 2)), r"one without 1\.weight, 1\.bias"),
        (torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3))), r"one that also has 2\.weight, 2\.bias"),
        (torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)), r"one with another shape of 0\.weight\."),
    ):
        with pytest.raises(ValueError, match=f"the model must have the tensors of .*step-00000001, got {message}"):
            load_state(tmp_path, model)


def adapted(seed_of_base: int = 0, **config: Any) -> torch.nn.Module:
    model = tiny()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + torch.rand(len(parameter), generator=torch.Generator().manual_seed(seed_of_base)))
    return apply_lora(model, LoRAConfig(**config))


def test_other_adapters_or_other_weights_under_them(tmp_path):
    save_state(tmp_path, 1, adapted(r=4, lora_alpha=8))
    assert load_state(tmp_path, adapted(r=4, lora_alpha=8, lora_dropout=0.1)) == 1
    for model, message in (
        (tiny(), r"adapters None instead of LoRAConfig"),
        (adapted(r=4, lora_alpha=16), r"adapters\.lora_alpha 16 instead of 8\. Resume"),
        (adapted(r=2, lora_alpha=8), r"adapters\.r 2 instead of 4\. Resume"),
        (adapted(1, r=4, lora_alpha=8), r"got checksum of the weights under the adapters"),
    ):
        with pytest.raises(ValueError, match=message):
            load_state(tmp_path, model)
    save_state(tmp_path, 2, tiny())
    with pytest.raises(ValueError, match="got adapters LoRAConfig instead of None; checksum of"):
        load_state(tmp_path, adapted())


FILES = ["shared.pt", "rank-0.pt", ".metadata", "__0_0.distcp"]


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    path.write_bytes({"empty": b"", "short": content[: len(content) // 2], "zeros": bytes(len(content))}[how])


@pytest.mark.cases(6)
@pytest.mark.parametrize("how", ["empty", "short", "zeros"])
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it(tmp_path, file, how):
    run = Run({})
    run.train(1)
    save_state(tmp_path, 1, *run.parts)
    expected = {name: value.clone() for name, value in run.state().items()}
    run.train(1)
    save_state(tmp_path, 2, *run.parts)
    damage(tmp_path / "step-00000002" / file, how)
    name = "step-00000002: must be" if (file, how) == (FILES[3], "zeros") else f"step-00000002: must be .*{file}"
    with pytest.raises(OSError, match=f"{name}") as error:
        load_state(tmp_path, *run.parts)
    assert f"delete {tmp_path}/step-00000002 to resume from step-00000001" in str(error.value)
    assert "\n" not in str(error.value)
    shutil.rmtree(tmp_path / "step-00000002")
    with pytest.warns(UserWarning, match="step-00000002 does not exist. Resuming from step-00000001"):
        assert load_state(tmp_path, *run.parts) == 1
    assert all(value.equal(expected[name]) for name, value in run.state().items())
    damage(tmp_path / "step-00000001" / "shared.pt", how)
    with pytest.raises(OSError, match=f"delete {tmp_path} to start again: there is no other checkpoint"):
        load_state(tmp_path, *run.parts, step=1)
    save_state(tmp_path, 3, *run.parts)
    with pytest.raises(OSError, match=f"delete {tmp_path}/step-00000001 to resume from step-00000003"):
        load_state(tmp_path, *run.parts, step=1)


@pytest.mark.cases(6)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("file", FILES)
def test_overwritten_bytes(tmp_path, file, share):
    """Wherever they are: PyTorch reads most of them without an error."""
    run = Run({})
    run.train(1)
    save_state(tmp_path, 1, *run.parts)
    path = tmp_path / "step-00000001" / file
    content = bytearray(path.read_bytes())
    start = int(share * len(content))
    content[start : start + 40] = bytes(byte ^ 0x55 for byte in content[start : start + 40])
    path.write_bytes(content)
    with pytest.raises(OSError, match=f"step-00000001: must be .*{file}"):
        load_state(tmp_path, *run.parts)


def test_settings_of_the_caller(tmp_path):
    save_state(tmp_path, 1, tiny(), settings={"objective": "dpo", "beta": 0.1})
    assert load_state(tmp_path, tiny(), settings={"objective": "dpo", "beta": 0.1, "new": 3}) == 1
    with pytest.raises(ValueError, match=r"must be that of .*, got objective kto instead of dpo; beta 1 instead of"):
        load_state(tmp_path, tiny(), settings={"objective": "kto", "beta": 1})


def skip_a_save(folder: Path) -> str | None:
    """What a rank is told when the other one does not save."""
    if dist.get_rank() == 1:
        return None
    with (
        mock.patch("liger_models.distributed.ranks.PATIENCE", timedelta(seconds=0.1)),
        mock.patch("liger_models.distributed.ranks._store", Impatient),
        pytest.warns(UserWarning, match="save_state .* every rank must make this call, got none from rank 1 in 0.1 s"),
        pytest.raises(TimeoutError, match=r"got none from rank 1 in 0\.5 s\. Call it on all ranks, not under") as error,
    ):
        save_state(folder, 1, tiny())
    return str(error.value)


class Impatient:
    """The store of the process group with a short timeout."""

    timeout = timedelta(seconds=0.5)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist.distributed_c10d._get_default_store(), name)

    def wait(self, keys: list[str], timeout: timedelta = timeout) -> None:
        dist.distributed_c10d._get_default_store().wait(keys, timeout)


def test_a_rank_that_does_not_save_is_named(two, tmp_path):
    assert two(skip_a_save, tmp_path)[0]


def stop_while_saving(folder: Path, point: str, background: bool, pipe: Connection) -> None:
    torch.set_num_threads(1)  # as in the tests: sums depend on it

    def hang(*arguments, **options):
        pipe.send("now")
        time.sleep(1000)

    seed(0)
    run = Run({})
    run.train(1)
    save_state(folder, 1, *run.parts)
    run.train(1)
    owner, name = {
        "data": (_FileSystemWriter, "write_data"),
        "metadata": (_FileSystemWriter, "finish"),
        "rename": (Path, "rename"),
        "latest": (Path, "replace"),
    }[point]
    with mock.patch.object(owner, name, hang):
        save_state(folder, 2, *run.parts, background=background).result()


@pytest.mark.cases(4)
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("point", "background"), [("data", False), ("metadata", True), ("rename", False), ("latest", False)]
)
def test_killed_while_it_saves(tmp_path, point, background):
    start_forkserver()
    pipe, other = FORKSERVER.Pipe()
    process = FORKSERVER.Process(target=stop_while_saving, args=(tmp_path, point, background, other))
    process.start()
    other.close()
    assert pipe.recv() == "now"
    process.kill()
    process.join()

    seed(0)
    expected = Run({})
    expected.train(3)
    again = Run({})
    assert load_state(tmp_path, *again.parts) == 1
    again.train(1)
    save_state(tmp_path, 2, *again.parts)
    assert load_state(tmp_path, *again.parts) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001", "step-00000002", "latest"}
    again.train(1)
    got, expected = again.state(), expected.state()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
