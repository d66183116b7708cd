"""The scripts of docs/weights.md, against stand-ins with the signatures of vLLM 0.33 and SGLang 0.5.23."""

import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from liger_models import get_hf_state_dict

from ..convert.conftest import assert_same_bits
from ..parallel.models import mixture, tiny
from ..processes import scripts

SERVER, INSIDE, SGLANG = scripts("weights.md")


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)


class WeightSource:
    def __init_subclass__(cls) -> None:
        assert isinstance(cls.__dict__["metadata"], cached_property)  # vLLM raises a TypeError


@dataclass
class NCCLTrainerInitInfo:
    master_address: str
    master_port: int
    world_size: int
    packed: bool = True
    rank: int = field(kw_only=True)


@dataclass
class HTTPVLLMWeightSyncClient:
    base_url: str
    timeout: float = 300


class Trainer:
    """Sends what the source declares, in the declared order."""

    def __init__(self, init_info: NCCLTrainerInitInfo, *, client: HTTPVLLMWeightSyncClient, source: Any) -> None:
        self.init_info, self.client, self.source = init_info, client, source
        self.received: dict[str, Tensor] = {}

    def send_weights(self) -> None:
        for declared, (name, tensor) in zip(self.source.metadata, self.source.iter_full(), strict=True):
            assert (declared.name, declared.dtype, declared.shape) == (name, tensor.dtype, tuple(tensor.shape))
            assert declared.owners is None  # every rank
            self.received[name] = tensor.clone()


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def module(name: str, **names: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__dict__.update(names)
    return made


def run(script: str, monkeypatch: pytest.MonkeyPatch, *modules: types.ModuleType) -> dict[str, Any]:
    for each in modules:
        monkeypatch.setitem(sys.modules, each.__name__, each)
    namespace: dict[str, Any] = {}
    exec(script, namespace)
    return namespace


@pytest.mark.parametrize("build", [tiny, mixture])
def test_a_server_of_vllm(monkeypatch, alone, build):
    requests = module("requests", get=mock.Mock(), post=mock.Mock())
    requests.get.return_value.json.return_value = {"world_size": 4}
    page = run(
        SERVER,
        monkeypatch,
        requests,
        module("vllm"),
        module("vllm.distributed"),
        module(
            "vllm.distributed.weight_transfer",
            HTTPVLLMWeightSyncClient=HTTPVLLMWeightSyncClient,
            ParamMeta=ParamMeta,
            WeightSource=WeightSource,
            WeightTransferTrainerFactory=mock.Mock(trainer_init=Trainer),
        ),
        module("vllm.distributed.weight_transfer.nccl_engine", NCCLTrainerInitInfo=NCCLTrainerInitInfo),
    )
    model = build()
    engine = page["connect"](model)
    assert engine.init_info.world_size == 5
    for _ in range(2):
        page["send"](engine)
        assert_same_bits(engine.received, get_hf_state_dict(model, torch.bfloat16))
        model.norm.weight.data += 1
    assert [call.args[0].rpartition("/")[2] for call in requests.post.call_args_list] == ["pause", "resume"] * 2


def test_vllm_in_the_process(monkeypatch):
    received: dict[str, Tensor] = {}

    class LLM:
        def __init__(self, model: str, *, gpu_memory_utilization: float) -> None: ...

        def collective_rpc(self, method: str, timeout: Any = None, args: tuple = (), kwargs: Any = None) -> None:
            assert method == "reload_weights"
            received.update((name, tensor.clone()) for name, tensor in kwargs["weights_iterator"])

        def reset_prefix_cache(self) -> None: ...

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    page, model = run(INSIDE, monkeypatch, module("vllm", LLM=LLM)), tiny()
    page["send"](model)
    assert_same_bits(received, get_hf_state_dict(model, torch.bfloat16))


def test_sglang(monkeypatch):
    class Engine:
        def __init__(self, *, model_path: str, mem_fraction_static: float) -> None:
            self.open, self.received, self.flushed = False, {}, False

        def begin_weight_update(self, selector: str = "all") -> tuple[bool, str]:
            self.open = True
            return True, "Success"

        def update_weights_from_tensor(
            self, named_tensors: list[tuple[str, Tensor]], load_format: Any = None, flush_cache: bool = True
        ) -> tuple[bool, str]:
            self.received.update((name, tensor.clone()) for name, tensor in named_tensors)
            return self.open, "must run between begin_weight_update() and end_weight_update()"

        def end_weight_update(self) -> tuple[bool, str]:
            self.open = False
            return True, "Success"

        def flush_cache(self) -> None:
            self.flushed = True

    page, model = run(SGLANG, monkeypatch, module("sglang", Engine=Engine)), tiny()
    page["send"](model)
    assert_same_bits(page["engine"].received, get_hf_state_dict(model, torch.bfloat16))
    assert page["engine"].flushed
    assert not page["engine"].open
    with pytest.raises(RuntimeError, match="must run between"):
        page["check"](page["engine"].update_weights_from_tensor([]))
