"""The syntax of modes: a library and its options, as in ``ours+adamw+offload10+selective12``.

| word | library | meaning |
| --- | --- | --- |
| ``hf`` | | transformers |
| ``ours`` | | this package |
| ``unsloth`` | | Unsloth, which trains adapters: with ``lora`` |
| ``titan`` | | torchtitan |
| ``compile`` | hf, ours, titan | torch.compile of the whole model; in torchtitan and under FSDP2 of each block |
| ``graph`` | hf, ours | CUDA graphs, by `CausalLM.capture`, or by PyTorch for hf and for compiled models |
| ``lora`` | hf, ours, unsloth | train adapters of rank 16 on all linear layers of the text's blocks and on experts |
| ``medusa`` | hf, ours | train five Medusa heads on the frozen model |
| ``nf4`` | hf, ours, unsloth | after ``lora``: frozen weights have 4 bits, for transformers by bitsandbytes |
| ``float8`` | ours | after ``lora``: frozen weights are in float8, and so are their products |
| ``mxfp4``, ``nvfp4``, ``int4``, ``fp8blocks`` | ours | after ``lora``: frozen weights as in such checkpoints |
| ``peft`` | ours | after ``lora``: the adapters are PEFT's, on the unpacked model |
| ``noexperts`` | hf, ours | with ``lora``: experts get no adapters |
| ``ac`` | hf, unsloth | activation checkpointing |
| ``static`` | hf | in ``decode``: a static cache, for which transformers compiles the step |
| ``liger`` | hf | patched by Liger Kernel |
| ``adamw`` | ours | `LigerAdamW` instead of torch's fused AdamW |
| ``inbackward`` | ours | `LigerAdamW` steps in the backward, as soon as a gradient is complete |
| ``8bit`` | ours | the moments of `LigerAdamW` have 8 bits |
| ``momentsK`` | ours | the optimizer moments of K blocks, if possible not offloaded ones, are in host memory |
| ``offloadK`` | ours | the saved activations of K blocks are in host memory |
| ``selectiveK``, ``fullK`` | ours | the checkpointing policy of the first K blocks, if possible not offloaded ones |
| ``selective``, ``full`` | titan | activation checkpointing: by op, or of each block |
| ``planG`` | ours | `plan_memory` chooses all of the four above for a budget of G GB |
| ``gateup8`` | ours | gate and up of the MLPs are saved in 8 bits |
| ``blocks`` | ours | each block is compiled by itself |
| ``fp8``, ``fp8rowwise`` | ours | float8 products, with one scale for a tensor or one for a row |
| ``rollout8`` | ours | in ``grpo``: rollouts with float8 copies of the weights, and keys and values in float8 |
| ``warm`` | ours | `warm_up` before the first step |
| ``balanced`` | ours | each expert of a mixture gets the same number of tokens, whatever the router prefers |
| ``cp`` | ours | context parallel: the GPUs share one sequence |
| ``bf16`` | hf, ours | in ``fsdp``: weights, gradients and moments in bf16 instead of fp32 |
| ``tpK`` | ours | in ``fsdp``: tensor parallel over K GPUs, which share the rows of K |
| ``epK`` | ours | in ``fsdp``: expert parallel over K GPUs |
| ``hsdpK`` | ours | in ``fsdp``: K replicas, each sharded over its part of the GPUs |

If the number is omitted, K is the number of all blocks.
"""

import re
from dataclasses import dataclass

MODES = (
    "hf", "hf+ac", "hf+compile", "hf+liger", "hf+liger+ac",
    "ours", "ours+selective", "ours+full", "ours+compile", "ours+fp8",
    "hf+liger+lora", "ours+lora", "unsloth+lora", "hf+liger+lora+nf4", "ours+lora+nf4", "unsloth+lora+nf4+ac",
    "ours+lora+float8", "ours+lora+mxfp4+full", "ours+lora+nvfp4+full", "ours+lora+fp8blocks+full",
    "hf+liger+medusa", "ours+medusa", "titan+compile", "titan+compile+selective",
)  # fmt: skip
"""The modes that ``--help`` lists."""

MODE = (
    r"hf(\+(ac|bf16|compile|graph|liger|medusa|noexperts|lora(\+nf4)?))*"
    r"|ours(\+(8bit|adamw|balanced|bf16|blocks|compile|cp|fp8|fp8rowwise|gateup8|graph|inbackward|medusa|noexperts"
    r"|warm"
    r"|lora(\+(float8|fp8blocks|int4|mxfp4|nf4|nvfp4|peft))?"
    r"|(full|moments|offload|selective)\d*|(ep|hsdp|plan|tp)\d+))*"
    r"|unsloth\+lora(\+nf4)?(\+ac)?"
    r"|titan(\+compile)?(\+selective|\+full)?"
)
"""The regular expression of a valid mode."""

COUNTED = re.compile(r"(ep|full|hsdp|moments|offload|plan|selective|tp)(\d*)")
"""Matches words that may have a number of blocks, GB, GPUs or replicas."""

TITLES = {
    "hf": "transformers", "ours": "liger_models", "unsloth": "Unsloth", "titan": "torchtitan",
    "liger": " + Liger Kernel", "ac": ", activation checkpointing",
    "selective": ', policy "selective"', "full": ', policy "full"', "compile": ", torch.compile",
    "graph": ", CUDA graphs", "static": ", static cache, compiled",
    "adamw": ", LigerAdamW", "inbackward": ", optimizer step in the backward", "offload": ", all activations offloaded",
    "bf16": ", weights, gradients and moments in bf16", "8bit": ", 8-bit moments", "moments": ", all moments offloaded",
    "warm": ", after warm_up", "balanced": ", balanced routing",
    "fp8": ", float8", "fp8rowwise": ", float8 with a scale per row", "blocks": ", each block compiled",
    "cp": ", context parallel", "lora": ", LoRA", "peft": " by PEFT", "nf4": " on 4-bit weights",
    "float8": " on float8 weights", "mxfp4": " on MXFP4 weights", "nvfp4": " on NVFP4 weights",
    "int4": " on INT4 weights", "fp8blocks": " on FP8 weights in blocks", "noexperts": ", no adapters of experts",
    "medusa": ", Medusa heads", "gateup8": ", gate and up saved in 8 bits",
}  # fmt: skip
"""Maps a word without a number to its text in tables."""

COUNTED_TITLES = {
    "offload": "activations of {} blocks offloaded", "moments": "moments of {} blocks offloaded",
    "selective": 'policy "selective" for {} blocks', "full": 'policy "full" for {} blocks',
    "plan": "planned for {} GB", "tp": "tensor parallel over {} GPUs", "ep": "expert parallel over {} GPUs",
    "hsdp": "{} replicas",
}  # fmt: skip
"""Maps a word that has a number to its text in tables, with ``{}`` for the number."""


@dataclass(frozen=True)
class Mode:
    """A parsed mode.

    Args:
        library: "hf", "ours", "unsloth" or "titan"; or, in ``families``, "error" (compares both libraries) or "floor".
        extras: maps each further word to its number, or to None if the word has no number.
    """

    library: str
    extras: dict[str, int | None]

    @classmethod
    def parse(cls, text: str) -> "Mode":
        library, *words = text.split("+")
        extras: dict[str, int | None] = {}
        for word in words:
            counted = COUNTED.fullmatch(word)
            if counted:
                extras[counted[1]] = int(counted[2]) if counted[2] else None
            else:
                extras[word] = None
        return cls(library, extras)

    def __contains__(self, extra: str) -> bool:
        return extra in self.extras

    def number(self, extra: str, total: int) -> int:
        """The number of an extra: 0 if the mode lacks the extra, and ``total`` if the extra has no number."""
        count = self.extras.get(extra, 0)
        return total if count is None else count


def title(mode: str) -> str:
    """The text for a mode in tables."""
    words = ""
    for part in mode.split("+"):
        # Split the number off a word. "8bit", "bf16" and "fp8" are words without a number.
        word = part if part in TITLES else part.rstrip("0123456789")
        number = part[len(word) :]
        if number:
            words += ", " + COUNTED_TITLES.get(word, word + " {}").format(number)
        else:
            words += TITLES.get(word, f", {word}")
    return words
