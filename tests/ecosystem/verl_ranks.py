"""A rank of verl's FSDP engine on the CPU: builds the model, takes a gradient step, exports weights as for vLLM."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

import liger_models.hf


class PlatformCPU(PlatformCUDA):
    """verl has none for tests without a GPU; its interface for new platforms takes this one."""

    device_name = "cpu"
    device_module = torch.cpu

    def current_device(self) -> Any:
        return torch.device("cpu")


def main(folder: Path) -> None:
    set_platform(PlatformCPU())
    dist.init_process_group("gloo")
    config = HFModelConfig(path=str(folder / "theirs"), external_lib="liger_engine", use_remove_padding=False)
    import liger_engine  # the page's file, which external_lib has imported

    engine = liger_engine.LigerEngine(
        config, FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, dtype="float32", model_dtype="float32",
                                 mixed_precision={"param_dtype": "float32", "reduce_dtype": "float32"}),
        FSDPOptimizerConfig(lr=1e-2, total_training_steps=3), CheckpointConfig(),
    )  # fmt: skip
    engine.initialize()
    assert isinstance(engine.module, liger_models.hf.LlamaForCausalLM)
    exported, _ = engine.get_per_tensor_param()
    before = {name: tensor.clone() for name, tensor in exported}
    stored = load_file(folder / "theirs" / "model.safetensors")
    assert before.keys() == stored.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in stored.items())

    ids = torch.arange(3, 20)[None] + dist.get_rank()
    logits = engine.module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
    engine.optimizer_step()
    exported, _ = engine.get_per_tensor_param()
    after = {name: tensor.contiguous() for name, tensor in exported}
    assert all(not torch.equal(before[name], tensor) for name, tensor in after.items())
    if dist.get_rank() == 0:
        save_file(after, folder / "exported.safetensors")
    engine.save_checkpoint(str(folder / "checkpoint"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
