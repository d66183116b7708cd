"""OpenRLHF's actor on the CPU: the log-probabilities of answers, a step, and the weights that it sends to vLLM."""

import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file


class Stub(ModuleType):
    """vLLM, which needs a GPU, and of which the actor uses nothing here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for name in ("vllm", "vllm.inputs", "vllm.utils"):
    sys.modules[name] = Stub(name)

import openrlhf.trainer.ray.ppo_actor as ppo  # noqa: E402
from openrlhf.models import Actor  # noqa: E402


class Engine:
    """A stand-in for vLLM: it gets a name, a shape and a dtype, and then a tensor of the process group."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.update_weight = SimpleNamespace(remote=self.announce)

    def announce(self, name: str, dtype: torch.dtype, shape: torch.Size, empty_cache: bool) -> None:
        self.announced, self.was_last = (name, dtype, shape), empty_cache

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
        name, dtype, shape = self.announced
        assert (tensor.dtype, tensor.shape) == (dtype, shape)
        self.tensors[name] = tensor.clone()


def send(actor: Actor) -> dict[str, torch.Tensor]:
    """Run OpenRLHF's `broadcast_to_vllm` of a trainer."""
    engine: Any = Engine()
    vllm, ds = SimpleNamespace(), SimpleNamespace(zero_stage=2, tensor_parallel_size=1)
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(args=SimpleNamespace(vllm=vllm, ds=ds)), vllm_engines=[engine], use_cuda_ipc=False,
        actor=SimpleNamespace(model=SimpleNamespace(module=actor.model)), _model_update_group=engine,
    )  # fmt: skip
    ppo.ActorPPOTrainer.broadcast_to_vllm(trainer)
    assert engine.was_last
    return engine.tensors


def main(folder: Path) -> None:
    ppo.ray.get = lambda refs: refs
    ppo.torch_dist_barrier_and_cuda_sync = lambda: None
    ppo.deepspeed.zero.GatheredParameters = lambda *_, **__: nullcontext()
    torch.cuda.current_stream = lambda: None
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

    ids = torch.arange(3, 43).view(2, 20)
    mask = torch.ones_like(ids)
    models = [Actor(str(folder / name), "sdpa", param_dtype="bf16") for name in ("portable", "theirs")]
    assert [type(actor.model).__module__.split(".")[0] for actor in models] == ["liger_models", "transformers"]
    ours, theirs = (actor(ids, mask[:, 8:], mask, return_output=True, return_entropy=True) for actor in models)
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=5e-2)
    torch.testing.assert_close(ours[1].entropy, theirs[1].entropy, rtol=0, atol=5e-2)

    actor = models[0]
    sent, stored = send(actor), load_file(folder / "theirs" / "model.safetensors")
    assert sent.keys() == stored.keys()
    assert all(torch.equal(sent[name], tensor.bfloat16()) for name, tensor in stored.items())
    optimizer = torch.optim.AdamW(actor.model.parameters(), lr=1e-2)
    (-ours[0].mean()).backward()
    optimizer.step()
    after = send(actor)
    assert all(not torch.equal(after[name], tensor) for name, tensor in sent.items())
    save_file(after, folder / "sent.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
