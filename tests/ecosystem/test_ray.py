"""The training command in the workers of Ray Train."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from liger_models.train.loop import TrainOptions, train

from ..processes import scripts, torchrun
from ..train.runs import log
from ..train.test_loop import files, folder  # noqa: F401

ROOT = Path(__file__).parents[2]


def work(given: dict[str, Any]) -> None:
    """What each worker runs; the second one dies once, after the checkpoint of step 2."""
    import liger_models.train.loop as loop

    os.environ["XDG_CACHE_HOME"] = given.pop("cache")
    dies = Path(given.pop("dies"))
    save = loop.save_state

    def save_and_die(*arguments: Any, **options: Any) -> Any:
        saving = save(*arguments, **options)
        if arguments[1] == 2 and ray.train.get_context().get_world_rank() == 1 and not dies.exists():
            saving.result()
            dies.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return saving

    loop.save_state = save_and_die
    train(TrainOptions(**given))


@pytest.fixture
def cluster(monkeypatch):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the workers run the reference backend
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": environment})
    yield
    ray.shutdown()


def options_of(folder: Path) -> dict[str, Any]:  # noqa: F811
    """Those of folder/config.yaml, for fewer steps."""
    options = {"length": 64, "batch_size": 2, "accumulate": 2, "steps": 4, "lr": 1e-2, "save_every": 2, "log_every": 1}
    options |= {"model": str(folder / "checkpoint"), "data": [str(folder / "train.jsonl")], "workers": 0}
    return options | {"export_dtype": "float32"}


def test_the_page(folder, cluster, tmp_path):  # noqa: F811
    script = scripts("training.md")[0]
    data = '{"model": "checkpoint", "data": ["/shared/train.jsonl"], "output": "/shared/run"}'
    changes = {data: repr({**options_of(folder), "steps": 1, "output": str(tmp_path / "run")})}
    changes |= {"num_workers=16, use_gpu=True": "num_workers=2", "/shared": str(tmp_path)}
    for old, new in changes.items():
        assert old in script
        script = script.replace(old, new)
    exec(script, {"__name__": "page"})
    assert len(log(tmp_path / "run")) == 1
    assert "model.safetensors" in files(tmp_path / "run")


def test_a_worker_dies_and_the_run_goes_on(folder, cluster, tmp_path):  # noqa: F811
    trainer = TorchTrainer(
        work,
        train_loop_config={
            **options_of(folder),
            "output": str(tmp_path / "ray"),
            "cache": str(tmp_path / "cache"),
            "dies": str(tmp_path / "died"),
        },
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=1)),
    )
    result = trainer.fit()
    assert result.error is None
    assert (tmp_path / "died").exists()

    place: dict[str, Any] = {"cwd": folder, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    example = str(ROOT / "examples" / "train_fsdp.py")
    torchrun(2, example, "config.yaml", "--output", str(tmp_path / "torchrun"), "--steps", "4", **place)
    assert log(tmp_path / "ray") == log(tmp_path / "torchrun")
    assert files(tmp_path / "ray") == files(tmp_path / "torchrun")
