"""torchtitan's Llama 3: model, checkpointing, compilation and FSDP2, in the order of torchtitan's own trainer.

torchtitan 0.2.2 is the latest release that can be imported with torch 2.11. Release 0.3.0 needs a later torch.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .build import weight
from .modes import Mode


class TitanLoss(nn.Module):
    """The mean loss of a batch, computed with torchtitan's model and loss.

    Args:
        config: the config.json of a Llama with untied head and without rope scaling.
        mode: a mode with ``compile``, ``selective`` (by op, as in torchtitan's own configuration) or ``full``.
        sharded: whether weights are sharded in fp32 over the process group. Otherwise they are in bf16 on one GPU.
    """

    def __init__(self, config: dict, mode: Mode, sharded: bool, tokens: int, device: str = "cuda") -> None:
        from torchtitan.components.loss import build_cross_entropy_loss
        from torchtitan.config import JobConfig
        from torchtitan.distributed import ParallelDims
        from torchtitan.distributed.utils import maybe_enable_amp
        from torchtitan.models.llama3 import parallelize_llama

        super().__init__()

        # A mesh with one dimension, over which the weights are sharded.
        ranks = torch.distributed.get_world_size() if sharded else 1
        dims = ParallelDims(dp_replicate=1, dp_shard=ranks, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=ranks)
        job = JobConfig()
        job.training.seq_len = tokens
        job.compile.enable = "compile" in mode

        # Checkpointing and compilation as in the trainer.
        policy = next((name for name in ("selective", "full") if name in mode), "none")
        job.activation_checkpoint.mode, job.activation_checkpoint.selective_ac_option = policy, "op"
        model = build_model(config, tokens, device)
        self.model: nn.Module = parallelize_llama(model.float() if sharded else model, dims, job)
        self.loss = build_cross_entropy_loss(job)
        self.context: Any = maybe_enable_amp(dims, "bfloat16", device) if sharded else nullcontext()

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor]:
        targets = pad(labels[:, 1:], (0, 1), value=-100)
        with self.context:
            total: Tensor = self.loss(self.model(input_ids), targets)
        return (total / targets[:, 1:].numel(),)


def build_model(config: dict, tokens: int, device: str) -> nn.Module:
    """The model in bf16 with weights from `build.weight`, for sequences of up to ``tokens`` tokens."""
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    from torchtitan.models.llama3.model.args import RoPEScalingArgs
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
    from transformers import AutoConfig, AutoModelForCausalLM

    known = config["model_type"] == "llama" and not config.get("tie_word_embeddings") and not config.get("rope_scaling")
    if not known:
        raise ValueError("titan: the model must be a Llama with untied weights and unscaled positions: llama-3-8b.")
    sizes = TransformerModelArgs(
        dim=config["hidden_size"], n_layers=config["num_hidden_layers"], n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"], vocab_size=config["vocab_size"], norm_eps=config["rms_norm_eps"],
        rope_theta=config["rope_theta"], rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0), max_seq_len=tokens,
        multiple_of=config["intermediate_size"],  # to which 8 / 3 dim is rounded up
    )  # fmt: skip

    # torchtitan's own adapter converts weights with Hugging Face's names.
    with torch.device("meta"):
        model = Transformer(sizes)
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    names = {name: weight(name, tensor.shape, torch.device(device)) for name, tensor in theirs.named_parameters()}
    model.load_state_dict(Llama3StateDictAdapter(sizes, None).from_hf(names), assign=True)
    with torch.device(device):
        model.freqs_cis = model._precompute_freqs_cis()
    return model
