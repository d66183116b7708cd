"""The experts that vLLM, SGLang and prime-rl return, which are read and replayed, and ours in their formats.

The payloads are built as the engines build them: vLLM 0.33.0 (`RoutedExpertsCapturer.capture`, `numpy2base64`), SGLang
0.5.23 (`BaseDeviceCache.capture`, `DetokenizerManager._b64_encode_per_request`), prime-rl 0.8.0
(`serialize_routed_experts`).
"""

import base64
import io

import numpy as np
import pytest
import torch

from liger_models.generation import encode_routing, read_routing, routing_rows, select_routing
from liger_models.layers.layer import routed_layers

from .test_routing_replay import mixture, other_choice

CASES = {
    "dense_first": ("glm4_moe", None, {}),
    "hybrid": ("nemotron_h", "experts", {}),
    "one_expert": ("llama4_text", "interleaved", {}),
    "many_experts": ("qwen3_moe", None, {"num_experts": 260}),
}


def npy(array):
    """vLLM's `numpy2base64`."""
    with io.BytesIO() as buffer:
        np.save(buffer, array, allow_pickle=False)
        return base64.b64encode(buffer.getbuffer()).decode("ascii")


def engine_rows(model, ids, dtype):
    """[T − 1, H, K]: what an engine that runs all tokens but the last has in its buffer of all blocks."""
    out = model(ids[None, :-1], return_logits=False)
    blocks = [index for index, block in enumerate(model.layers) if routed_layers(block)]
    buffer = np.zeros((len(ids) - 1, len(model.layers), model.routers[0].top_k), dtype)
    for index, layer, logits in zip(blocks, model.routers, out.router_logits, strict=True):
        buffer[:, index] = layer.choose(logits).numpy()
    return buffer


@pytest.mark.parametrize("case", CASES)
def test_payloads_are_read_replayed_and_written(case):
    """The engine has other weights. Its choice, replayed, gives the bits of the experts that are passed directly."""
    arch, variant, changes = CASES[case]
    model, engine = (mixture(arch, variant, seed=seed, **changes) for seed in (0, 1))
    ids = torch.randint(3, 40, (11,), generator=torch.Generator().manual_seed(0))
    dtype = np.uint16 if case == "many_experts" else np.uint8
    rows = engine_rows(engine, ids, dtype)
    own = engine.choose_experts(engine(ids[None], return_logits=False).router_logits)  # [T, L, K]
    own[-1] = -1
    raw = base64.b64encode(rows.astype(np.int32).tobytes()).decode()
    tagged = {"data": base64.b64encode(rows.tobytes()).decode(), "shape": [*rows.shape], "start": 0}
    payloads = [
        rows,
        npy(rows),
        raw,
        tagged | {"dtype": dtype.__name__},
        torch.from_numpy(rows),
        npy(rows.astype("i4")),
    ]
    if engine.routers[0].top_k > 1:
        payloads.append(np.concatenate([rows, np.zeros_like(rows[:1])]))  # padded to all tokens, as trainers do
    for payload in payloads:
        read = read_routing(model, payload, len(ids))
        assert read.dtype == torch.int16
        assert torch.equal(read, own)

    written = routing_rows(model, own)
    assert torch.equal(written.int(), torch.from_numpy(rows.astype(np.int32)))
    assert written.numpy().dtype == dtype
    assert encode_routing(model, own, "vllm") == npy(rows)
    assert encode_routing(model, own, "sglang") == raw

    inputs = {"input_ids": ids[None], "labels": ids[None]}
    replayed = model(**inputs, routed_experts=read[None]).loss
    assert torch.equal(replayed, model(**inputs, routed_experts=own[None]).loss)
    assert not torch.equal(replayed, model(**inputs).loss)


def test_later_turns_add_their_rows():
    model = mixture("glm4_moe")
    own = other_choice(model, 1, 9)[0]
    own[-1] = -1
    first, turn = own[:5].clone(), encode_routing(model, own, "vllm", start=4)
    first[-1] = -1
    assert torch.equal(read_routing(model, turn, 9, start=4, earlier=first), own)
    with pytest.raises(ValueError, match=r"none for 4 of 9 tokens, the first at 0\. Pass the tokens of the turn"):
        read_routing(model, turn, 9, start=4)
    free = read_routing(model, turn, 9, start=4, missing="router")
    assert (free[:4] == -1).all()
    assert torch.equal(free[4:], own[4:])
    # Rows that end early, as after an abort, and rows of zeros, which no router has chosen.
    rows = routing_rows(model, own)
    rows[2] = 0
    for payload, token in ((rows, 2), (routing_rows(model, own)[:6], 6)):
        with pytest.raises(ValueError, match=f"the first at {token}"):
            read_routing(model, payload, 9)
        assert (read_routing(model, payload, 9, missing="router")[token] == -1).all()


def test_misfits_are_named():
    model = mixture("glm4_moe")
    H, K = len(model.layers), model.routers[0].top_k
    own = other_choice(model, 1, 6)[0]
    rows = routing_rows(model, own)
    with pytest.raises(ValueError, match=r"num_tokens 4, start 0.*got 5"):
        read_routing(model, rows, 4)
    with pytest.raises(ValueError, match=rf"{H} \(blocks\) or 1 \(layers with routed experts\), {K}"):
        read_routing(model, rows[:, :, :1], 6)
    with pytest.raises(ValueError, match="experts must be below"):
        read_routing(model, rows.int() + 100, 6)
    with pytest.raises(ValueError, match="payload must be integers"):
        read_routing(model, rows.float(), 6)
    with pytest.raises(ValueError, match="must be base64"):
        read_routing(model, "no base64!", 6)
    with pytest.raises(ValueError, match=r"got 3 bytes"):
        read_routing(model, base64.b64encode(b"abc").decode(), 6)
    with pytest.raises(ValueError, match="header that cannot be read"):
        read_routing(model, base64.b64encode(b"\x93NUMPY\x01\x00").decode(), 6)
    with pytest.raises(ValueError, match="C order"):
        read_routing(model, npy(np.asfortranarray(rows.numpy())), 6)
    with pytest.raises(ValueError, match=r"dtype 'float32'"):
        read_routing(model, {"data": "", "shape": [0, H, K], "dtype": "float32"}, 6)
    with pytest.raises(ValueError, match="missing must be"):
        read_routing(model, rows, 6, missing="zero")
    with pytest.raises(ValueError, match="earlier must be"):
        read_routing(model, rows[2:], 6, start=2, earlier=own[:1])
    own[3] = -1
    with pytest.raises(ValueError, match="for token 3"):
        routing_rows(model, own)
    with pytest.raises(ValueError, match=r"experts must be \[tokens, 1"):
        routing_rows(model, own[:, :, :1])
    with pytest.raises(ValueError, match="engine must be"):
        encode_routing(model, own, "trt")
    with pytest.raises(ValueError, match="got LigerLlama"):
        select_routing(mixture("llama"), own)
