"""The rules of vLLM and SGLang for LoRA adapters, and a check that an adapter's folder follows these rules."""

import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from liger_models.adapters.check import Finding

PREFIX = "base_model.model."
TENSOR = re.compile(r"(?P<module>.+)\.lora_[AB]\.weight")


@dataclass(frozen=True, kw_only=True)
class Server:
    """The rules of an inference server for LoRA adapters, taken from the source code of one version.

    Attributes:
        name, version: name and version of the server's package.
        refused: maps settings of adapter_config.json to advice for the user. With any of these settings, the server
            refuses the adapter.
        ignored: maps settings of adapter_config.json to advice for the user. The server does not read these settings,
            so its results would be wrong.
        patterns: strings that the server accepts for ``target_modules``; None if it accepts all.
        modules: last parts of the names of the modules that can have adapters; None if all linear layers can have
            adapters.
        together: maps a module to other modules of the same layer that must also have adapters, because the server
            stacks the adapters of these modules.
        rank: the largest rank that the server accepts by default.
        peft_experts: whether the server reads the tensors that PEFT writes for ``target_parameters``.
    """

    name: str
    version: str
    refused: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    patterns: Collection[str] | None = None
    modules: Collection[str] | None = None
    together: Mapping[str, Collection[str]] = field(default_factory=dict)
    rank: int | None = None
    peft_experts: bool = True

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


MERGE = "Merge the adapter (liger-models merge), and serve the merged model."
PLAIN = "Train without it, or merge the adapter (liger-models merge)."

VLLM = Server(
    name="vLLM",
    version="0.33.0",  # lora/peft_helper.py, lora/utils.py, lora/lora_model.py
    refused=dict.fromkeys((
        "use_dora", "lora_bias", "modules_to_save", "alora_invocation_tokens", "layer_replication", "use_bdlora",
        "use_qalora",
    ), PLAIN),
    rank=16,
)  # fmt: skip

SGLANG = Server(
    name="SGLang",
    version="0.5.23",  # srt/lora/utils.py, srt/lora/lora.py, srt/lora/lora_manager.py
    refused={"use_dora": PLAIN},
    ignored={
        "use_rslora": "It scales by alpha / r. Multiply lora_alpha by sqrt(r), and set use_rslora to false.",
        "rank_pattern": MERGE,
        "alpha_pattern": MERGE,
        "modules_to_save": MERGE,
    },
    patterns=("all-linear", "all"),
    modules=frozenset({
        "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "out_proj", "in_proj", "in_proj_qkvz", "gate_proj",
        "up_proj", "gate_up_proj", "down_proj", "fc1_latent_proj", "fc2_latent_proj", "embed_tokens", "lm_head",
        "q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj_with_mqa", "q_b_proj", "kv_b_proj",
    }),
    together={"q_proj": ("v_proj",), "k_proj": ("q_proj", "v_proj"), "v_proj": ("q_proj",), "up_proj": ("gate_proj",)},
    peft_experts=False,
)  # fmt: skip

SERVERS = (VLLM, SGLANG)


def check_served(
    server: Server, adapter: Path, tensors: Collection[str], modules: Collection[str]
) -> Iterator[Finding]:
    """Find everything in an adapter that a server would refuse, ignore or misread.

    Args:
        server: the rules.
        adapter: folder with adapter_config.json.
        tensors: names of the tensors in adapter_model.safetensors.
        modules: names, in all checkpoint layouts, of the model's modules that can have adapters.

    Yields:
        `Finding`, which names the tensor or the setting.
    """
    config: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    for settings, does in ((server.refused, "refuses it"), (server.ignored, "ignores it")):
        for name, advice in settings.items():
            if config.get(name):
                yield Finding(name, f"{server} {does}, got {config[name]!r}. {advice}")
    targets, rank = config.get("target_modules"), config.get("r", 0)
    if isinstance(targets, str) and server.patterns is not None and targets not in server.patterns:
        yield Finding("target_modules", f"{server} takes a list of names, got the pattern {targets!r}. List the names.")
    if server.rank is not None and rank > server.rank:
        yield Finding(
            "r", f"{server} takes ranks up to {server.rank}, got {rank}. Start it with --max-lora-rank {rank}."
        )

    # Check the names of tensors, and of the modules that the tensors belong to.
    adapted = set()
    for tensor in sorted(tensors):
        match = TENSOR.fullmatch(tensor)
        if tensor.endswith((".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")):
            continue
        if match is None or not tensor.startswith(PREFIX):
            yield Finding(tensor, f"{server} reads names {PREFIX}MODULE.lora_A.weight and lora_B. Rename it.")
            continue
        module = match["module"].removeprefix(PREFIX)
        if re.fullmatch(r".*\.experts(\.base_layer)?", module):
            if not server.peft_experts:
                yield Finding(tensor, f"{server} does not read PEFT's adapters of all experts. {MERGE}")
            continue
        adapted.add(module)
        last = module.rpartition(".")[2]
        if module not in modules:
            known = {name.rpartition(".")[2] for name in modules}
            does = "ignores it without a word" if last in known else "refuses it"
            near = difflib.get_close_matches(module, modules, 1)
            hint = f" Did you mean {near[0]}?" if near else " Rename it."
            yield Finding(tensor, f"the model has no module {module}, so {server} {does}.{hint}")
        elif server.modules is not None and last not in server.modules:
            yield Finding(tensor, f"{server} has no adapters for {last}. {MERGE}")

    # Check modules that the server stacks.
    for module in sorted(adapted & set(modules)):
        parent, _, last = module.rpartition(".")
        for other in server.together.get(last, ()):
            beside = f"{parent}.{other}"
            if beside in modules and beside not in adapted:
                name = f"{PREFIX}{module}.lora_A.weight"
                yield Finding(name, f"{server} needs an adapter of {other} beside it. Adapt both, or {MERGE.lower()}")
