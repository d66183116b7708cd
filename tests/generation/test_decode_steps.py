"""Decoding step by step on a paged cache: what is captured, when, and what memory is kept."""

import gc
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from liger_models import AutoLigerModel
from liger_models.adapters import LoRAConfig, apply_lora, quantize_base, without_adapters
from liger_models.arch.llama import LigerLlama, LlamaConfig
from liger_models.generation import graphs, scheduler
from liger_models.generation import logits as logits_module
from liger_models.generation import loop as loop_module
from liger_models.generation.graphs import (
    DecodeStep,
    can_capture,
    collects_no_garbage,
    release_steps,
    rounded_rows,
    rounded_tokens,
)
from liger_models.generation.logits import paged_state
from liger_models.generation.loop import generate, steps_ahead, stream
from liger_models.generation.model_state import ModelState, describe, state_of
from liger_models.generation.options import resolve
from liger_models.generation.prefill import (
    MOST_GRAPHS,
    PromptBatch,
    PromptGraph,
    can_move_padding,
    most_tokens,
    padded_length,
)
from liger_models.kernels.dispatch import reference_backend
from liger_models.layers import paged_cache
from liger_models.layers.attention import LigerAttention
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.paged_cache import PagedCache
from liger_models.layers.rope import DynamicScaling

from ..arch.families import tiny
from ..arch.test_mllama import ROWS, make

VOCAB, NEW = 53, 12
CONFIG = LlamaConfig(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.25,
)  # fmt: skip
PROMPTS = [[5, 17, 3, 44, 29, 8, 31, 12, 50], [7, 33, 21], [40, 6, 6, 19, 25, 11]]


def llama(device="cpu", **options):
    torch.manual_seed(0)
    return LigerLlama.from_config(CONFIG, device=device, **options).eval()


@pytest.fixture
def model(small_pages):
    return llama()


# --- the cache -------------------------------------------------------------------------------------------------------


def test_prompts_are_stored_without_padding(monkeypatch):
    """Row by row on pages of their own; more rows than prompts take the last one's."""
    monkeypatch.setattr(paged_cache, "PAGE", 16)
    cache = PagedCache(3, 40, torch.device("cpu"))
    assert cache.capacity == 48
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[1, :5] = 0
    cache.start(2, 20, mask)
    k = torch.arange(40.0).view(2, 20, 1, 1).expand(2, 20, 1, 2)
    assert [x.tolist() for x in cache.extend(0, k, -k)] == [k.tolist(), (-k).tolist()]
    assert cache.settle()
    cache.length += 20
    cache.step()
    new = torch.tensor([100.0, 200.0, 200.0]).view(3, 1, 1, 1).expand(3, 1, 1, 2)
    keys, values = cache.extend(0, new, -new)
    table, lengths, _ = cache.pages
    assert lengths.tolist() == [21, 16, 16]
    rows = [keys[table[row].long()].flatten(0, 1)[:length, 0, 0].tolist() for row, length in enumerate(lengths)]
    assert rows == [[*range(20), 100.0], [*range(25, 40), 200.0], [*range(25, 40), 200.0]]
    assert torch.equal(values[table[0, 1].long(), 4], torch.full((1, 2), -100.0))
    assert cache.num_bytes == 2 * 9 * 16 * 2 * 4


def test_rows_of_one_prompt_share_the_pages_that_it_fills(monkeypatch):
    monkeypatch.setattr(paged_cache, "PAGE", 16)
    cache = PagedCache(8, 40, torch.device("cpu"))
    mask = torch.ones(2, 37, dtype=torch.int64)
    mask[1, :5] = 0  # 32 tokens: it fills its pages
    cache.start(2, 37, mask, repeats=3)
    k = torch.arange(74.0).view(2, 37, 1, 1)
    cache.extend(0, k, -k)
    cache.replace_states(0, torch.tensor([[1.0], [2.0]]))
    cache.settle()
    cache.length = 37
    assert cache._states[0][0][:, 0].tolist() == [1, 1, 1, 2, 2, 2, 2, 2]
    for step in (100.0, 200.0):
        cache.step()
        new = cache.of_rows(step + torch.arange(6.0)).view(8, 1, 1, 1)
        keys, values = cache.extend(0, new, -new)
    table, lengths, _ = cache.pages
    assert lengths.tolist() == [39, 39, 39, 34, 34, 34, 34, 34]
    for row, (pages, length) in enumerate(zip(table.long(), lengths, strict=True)):
        row = min(row, 5)
        want = [*(range(37) if row < 3 else range(42, 74)), 100 + row, 200 + row]
        assert keys[pages].flatten()[:length].tolist() == want
        assert values[pages].flatten()[:length].tolist() == [-x for x in want]
    assert len(table[:3].unique()) == 2 + 3
    assert len(table[3:].unique()) == 2 + 3


def test_memory_that_a_captured_step_reads_stays():
    cache = PagedCache(2, 8, torch.device("cpu"))
    cache.start(2, 3)
    cache.replace_states(0, torch.ones(2, 4))
    cache.extra["seen"] = torch.ones(2, 1)
    assert not cache.settle()
    (state,), seen = cache._states[0], cache.extra["seen"]
    cache.start(1, 2)
    assert not cache.extra
    cache.replace_states(0, torch.full((1, 4), 2.0))
    cache.extra["seen"] = torch.full((1, 1), 3.0)
    assert cache.settle()
    assert cache._states[0][0] is state
    assert cache.extra["seen"] is seen
    assert torch.equal(state, torch.full((2, 4), 2.0))
    assert torch.equal(seen, torch.full((2, 1), 3.0))
    assert cache.is_settled
    cache.extra["seen"] = seen + 1
    assert not cache.is_settled
    cache.start(2, 3)
    assert not cache.settle()  # a step that read it would read what is no longer there


def test_a_wrong_use_of_the_cache_is_named():
    cache = PagedCache(2, 8, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"has 2 rows of 64 tokens, got 3 rows of 8\. Make the cache larger"):
        cache.start(3, 8)
    with pytest.raises(ValueError, match="got 1 rows of 65"):
        cache.start(1, 65)
    cache.start(2, 3)
    with pytest.raises(ValueError, match=r"given the 6 tokens of the prompts or of a step, got 2 x 1\. Call start"):
        cache.extend(0, torch.ones(2, 1, 1, 2), torch.ones(2, 1, 1, 2))
    with pytest.raises(ValueError, match=r"rows can't be selected\. Use a DecodeCache"):
        cache.select(torch.tensor([0]))


# --- which way -------------------------------------------------------------------------------------------------------


def test_padding_between_tokens_takes_the_other_cache(model, monkeypatch):
    """Windows count columns, padding included: rows on pages have no padding."""
    monkeypatch.setattr(logits_module, "borrow_step", lambda *_: pytest.fail("a paged cache was used"))
    mask = torch.ones(1, 9, dtype=torch.int64)
    mask[0, 3] = 0
    assert generate(model, torch.tensor(PROMPTS[:1]), attention_mask=mask, max_new_tokens=3).shape == (1, 12)
    generate(model, PROMPTS, max_new_tokens=3, use_cache=False)
    generate(model, PROMPTS, max_new_tokens=3, cache=DecodeCache(11))


def test_an_attention_of_ones_own_keeps_its_cache(model):
    class Own(LigerAttention):
        @property
        def attention(self):
            return super().attention._replace(takes_pages=False)

    assert paged_state(model)
    model.layers[0].self_attn = Own(64, 4, 2, 16, layer=0)
    assert not paged_state(model)
    want = generate(model, PROMPTS, max_new_tokens=NEW, use_cache=False)
    assert torch.equal(generate(model, PROMPTS, max_new_tokens=NEW), want)


@pytest.mark.compile
def test_compiled_models_keep_their_cache(model):
    assert paged_state(model)
    model.layers[1].compile(backend="eager")
    assert not paged_state(model)


def test_the_cpu_decodes_without_pages_and_graphs():
    """With pages, which tests ask for, each step would copy all keys and values."""
    assert not paged_state(llama())
    assert not can_capture(llama())


@pytest.mark.cases(8)
@pytest.mark.parametrize("ahead", [1, 2, 5, 30])
@pytest.mark.parametrize("stops", [0, 1, 2, 3])
def test_steps_ahead_change_no_token(model, monkeypatch, ahead, stops):
    free = generate(model, PROMPTS, max_new_tokens=NEW, eos_token_id=[])[:, 9:]
    options = {"eos_token_id": [free[0, 3].item(), free[1, 7].item(), free[2, 5].item()][:stops]}
    options |= {"max_new_tokens": NEW, "return_logprobs": True}
    want = generate(model, PROMPTS, **options)
    monkeypatch.setattr(loop_module, "steps_ahead", lambda *_: ahead)
    got = generate(model, PROMPTS, **options)
    assert torch.equal(got.sequences, want.sequences)
    assert torch.equal(got.logprobs, want.logprobs)
    assert got.finish_reasons == want.finish_reasons


def test_no_step_ahead_is_noticed(model):
    """By a processor that is called for it, in a cache that holds it, or where the host waits in every step."""

    def ahead(**options):
        return steps_ahead(torch.device("cuda"), resolve(model, NEW, options))

    assert ahead() == ahead(do_sample=True, eos_token_id=[3]) == 2
    assert steps_ahead(torch.device("cpu"), resolve(model, NEW, {})) == 0
    assert ahead(logits_processor=[lambda ids, logits: logits]) == 0
    assert ahead(cache=DecodeCache(40)) == 0


@pytest.mark.parametrize("length", [5, 16, 20, 32])
def test_continuations_of_one_prompt(model, length):
    """Each is what it is alone: pages that several rows share are not written to."""
    prompts = torch.randint(3, VOCAB, (2, length))
    options = {"max_new_tokens": NEW, "do_sample": True, "num_return_sequences": 3, "eos_token_id": []}
    torch.manual_seed(1)
    got = generate(model, prompts, **options)
    torch.manual_seed(1)
    assert torch.equal(got, generate(model, prompts, use_cache=False, **options))
    assert len({tuple(row) for row in got.tolist()}) == 6


def test_steps_on_the_kernels(kernel_device, small_pages):
    """The tokens of the references: on rows of several lengths, one of which begins a page, and on a single row."""
    model = llama(kernel_device)
    for prompts in ([[*range(3, 17)], [7, 33, 21]], [[7, 33, 21]]):
        got = generate(model, prompts, max_new_tokens=5, eos_token_id=[])
        with reference_backend():
            assert torch.equal(generate(model, prompts, max_new_tokens=5, eos_token_id=[]), got)


def test_rounding():
    assert [rounded_rows(B) for B in (1, 2, 3, 8, 9, 16, 17, 33)] == [1, 2, 4, 8, 16, 16, 32, 48]
    assert [rounded_tokens(n) for n in (1, 64, 65, 639, 1000, 1030, 100_000)] == [64, 64, 128, 640, 1024, 1280, 114_688]
    assert all(n <= rounded_tokens(n) <= max(1.25 * n, n + 63) for n in range(1, 5000, 7))


def test_a_step_is_kept_as_long_as_the_model_is_what_it_was(model):
    """The quick comparison with the last state gives the same answer as the whole description."""
    last = before = describe(model)
    state = state_of(model)

    def same():
        nonlocal last, state
        found, now = state_of(model), describe(model)
        assert (found is state) == (now == last)
        last, state = now, found
        return now == before

    model.train()
    with torch.no_grad():
        model.norm.weight.mul_(2)  # a captured step reads the new values
    assert same()
    model.eval()
    model.norm.eps = float(str(model.norm.eps))  # an equal number
    assert same()
    changes = {
        "a number": (model.layers[0].self_attn, "scale", 0.5),
        "a parameter": (model.norm, "weight", nn.Parameter(model.norm.weight.detach().clone())),
        "a module": (model.layers[1], "mlp", model.layers[0].mlp),
        "a configuration": (model, "config", replace(model.config)),
        "a forward": (model.lm_head, "forward", model.lm_head.forward),
    }
    for what, (module, name, value) in changes.items():
        was = getattr(module, name)
        setattr(module, name, value)
        assert not same(), what
        if name == "forward":
            del module.forward
        else:
            setattr(module, name, was)
        assert same(), what
    handle = model.layers[0].register_forward_hook(lambda *_: None)
    assert not same()
    handle.remove()
    assert same()
    weight = model.norm.weight.data
    model.norm.weight.data = weight.clone()
    assert not same()
    model.norm.weight.data = weight
    assert same()
    model.layers[0].noted = noted = []
    assert not same()
    before = last
    noted.append(1)  # changes in place
    assert not same()
    noted.clear()
    assert same()
    with torch.inference_mode():
        assert not same()


def test_adapters_and_weights_of_4_bits_have_a_state():
    pytest.importorskip("torchao")
    model = llama()
    apply_lora(model, LoRAConfig(target_modules="all-linear"))
    quantize_base(model)
    before = state_of(model)
    assert state_of(model) is before
    with without_adapters(model):
        assert state_of(model) is not before
    before = state_of(model)
    layer = model.layers[0].mlp.down_proj
    assert layer.weight.dtype == torch.uint8  # codes
    layer.weight = nn.Parameter(torch.ones(2, 2))
    assert state_of(model) is not before


# --- CUDA graphs -----------------------------------------------------------------------------------------------------

FAMILIES = [
    "llama", "gemma2", "gemma4_text", "mixtral", "gpt_oss", "olmo3", "qwen3_next", "phi3", "deepseek_v2", "llama4_text",
    "kimi_linear",
]  # fmt: skip


class StandIn:
    """In place of a graph on the CPU: runs the forward again, with what the host knew when it was captured."""

    def __init__(self, step, model):
        self.step, self.model, self.length = step, model, step.cache.length

    def replay(self):
        self.step.cache.length = self.length
        self.step._logits.copy_(self.step._run(self.model))


def capture_a_stand_in(step, model):
    step.graph, step._logits = StandIn(step, model), torch.full((step.cache.rows, model.config.vocab_size), torch.nan)


class PromptStandIn:
    """In place of a graph of prompts on the CPU: runs the forward of the captured tensors again."""

    def __init__(self, step, model, batch):
        self.step, self.model, self.batch, self.slots = step, model, batch, step.cache.slots

    def replay(self):
        self.step.cache.length, self.step.cache.slots = 0, self.slots
        (captured,) = (prompts for prompts in self.step._prompts.values() if prompts.graph is self)
        captured.logits.copy_(self.batch.logits(self.model, self.step.cache))


def capture_stand_in_prompts(step, model, batch):
    logits = torch.full((len(batch.ids), model.config.vocab_size), torch.nan)
    # No derived tensors, because the forward of the stand-in computes them as any forward does.
    step._keep_prompts(PromptGraph(PromptStandIn(step, model, batch), batch, step.cache.slots, logits, frozenset()))


@pytest.fixture(params=["stand-in", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """A device on which steps are captured."""
    if request.param == "gpu":
        return "cuda"
    monkeypatch.setattr(logits_module, "PAGED_DEVICES", ("cpu",))
    monkeypatch.setattr(graphs, "can_capture", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**35))
    monkeypatch.setattr(DecodeStep, "_capture", capture_a_stand_in)
    monkeypatch.setattr(DecodeStep, "_capture_prompts", capture_stand_in_prompts)
    return "cpu"


@pytest.fixture
def captures(device, monkeypatch):
    """The number of rows and the capacity of each step that was captured."""
    found = []
    original = DecodeStep._capture

    def capture(self, model):
        original(self, model)
        assert self.graph is not None
        found.append((self.cache.rows, self.cache.capacity))

    monkeypatch.setattr(DecodeStep, "_capture", capture)
    return found


@pytest.mark.cases(3)
@pytest.mark.parametrize("arch", FAMILIES)
def test_replayed_steps_are_ordinary_steps(arch, device, captures, monkeypatch):
    """For prompts of several lengths on one graph: the tokens of ordinary steps, and of the other cache."""
    torch.manual_seed(0)
    replays, replay = [], PromptGraph.replay
    monkeypatch.setattr(PromptGraph, "replay", lambda *args: replays.append(args[1].key) or replay(*args))
    sizes = next(iter(tiny(arch).values())) | {"model_type": arch, "initializer_range": 0.2}
    model = AutoLigerModel.from_config(sizes, device=device).eval()
    for lengths in ([9, 3, 6], [16, 1, 8], [12, 5, 2], [40, 1, 30, 17], [70, 2, 80]):
        prompts = [torch.randint(3, 40, (length,)) for length in lengths]
        options = {"max_new_tokens": NEW, "repetition_penalty": 1e9, "eos_token_id": []}
        got = generate(model, prompts, **options)
        assert len(got[0, -NEW:].unique()) > 2
        with monkeypatch.context() as patch:
            patch.setattr(graphs, "can_capture", lambda *_: False)
            assert torch.equal(generate(model, prompts, **options), got)
            patch.setattr(logits_module, "paged_state", lambda model: None)
            assert torch.equal(generate(model, prompts, **options), got)
    assert captures == [(4, 64), (4, 128)]
    assert len(replays) == (most_tokens(model) > 0)  # the third prompts on the graph of the second


@pytest.mark.parametrize(
    ("arch", "adapted", "calls"),
    [("llama", False, 1), ("llama", True, 1), ("qwen3_next", False, 1), ("deepseek_v2", True, 2)],
)
def test_a_later_rollout_captures_its_steps_at_once(arch, adapted, calls, device, captures, monkeypatch):
    """Without an ordinary step, if a step of the same shapes has run and derives nothing that prompts do not derive."""
    monkeypatch.setattr(scheduler, "can_capture", lambda *_: True)
    ordinary, add_step = [], ModelState.add_step
    monkeypatch.setattr(ModelState, "add_step", lambda self, kind: ordinary.append(kind) or add_step(self, kind))
    torch.manual_seed(0)
    model = AutoLigerModel.from_config({**next(iter(tiny(arch).values())), "model_type": arch}, device=device)
    if adapted:
        apply_lora(model, LoRAConfig(r=2))
    with torch.no_grad():
        for parameter in model.parameters():  # away from logits that are all alike
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.1))

    options = {"max_new_tokens": NEW, "eos_token_id": []}
    for prompts in (PROMPTS, [prompt[1:] for prompt in PROMPTS]):
        rows = model.rollout([[token % 40 for token in prompt] for prompt in prompts], **options)
        for prompt, row in zip(prompts, rows, strict=True):
            alone = generate(model.eval(), [[token % 40 for token in prompt]], **options, use_cache=False)
            assert row.tokens.tolist() == alone[0, len(prompt) :].tolist()
        model.train()
    assert (len(ordinary), len(captures)) == (calls, 2)


def test_a_graph_serves_all_lengths_and_batches_of_its_size(device, captures):
    model = llama(device)

    def run(B, T):
        ids = torch.randint(0, VOCAB, (B, T))
        got = generate(model, ids, max_new_tokens=NEW, eos_token_id=[])
        assert torch.equal(got, generate(model, ids, max_new_tokens=NEW, eos_token_id=[], use_cache=False))

    for B, T in ((3, 5), (4, 30), (3, 40), (4, 9)):
        run(B, T)
    assert captures == [(4, 64)]
    for B, T in ((4, 100), (2, 100), (4, 20), (2, 10)):
        run(B, T)
    assert captures == [(4, 64), (4, 128), (2, 128)]


def test_a_graph_of_prompts_serves_similar_lengths(device, monkeypatch):
    """Also after weights change, for rows that share a prompt, and for prompts that are padded on the left."""
    model = llama(device)
    replays = []
    original = PromptGraph.replay
    monkeypatch.setattr(PromptGraph, "replay", lambda *args: replays.append(args[1].key) or original(*args))

    def check(prompts, **options):
        options = {"max_new_tokens": NEW, "eos_token_id": [], **options}
        got = generate(model, prompts, **options)
        assert torch.equal(got, generate(model, prompts, use_cache=False, **options))

    def of_length(*lengths):
        return [torch.randint(0, VOCAB, (length,)) for length in lengths]

    for lengths in ((20,), (17,), (32,), (31,)):
        check(of_length(*lengths))
    assert len(replays) == 2  # the graph is captured for the second prompts
    for lengths in ((9, 3, 12), (16, 5, 1), (10, 10, 2)):
        check(of_length(*lengths))
    assert len(replays) == 3
    for T in (10, 16, 2):
        check(torch.randint(0, VOCAB, (3, T)))
    assert len(replays) == 4
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    check(of_length(25))
    check(of_length(11, 4, 13))
    assert len(replays) == 6
    sampled = {"num_return_sequences": 2, "do_sample": True, "seed": 0}
    for length in (18, 24, 22):
        check(of_length(length), **sampled)
    (step,) = (step for step in graphs._kept[model] if step.cache.rows == 2)
    assert len(step._prompts) == 1
    assert len(replays) == 7


def test_the_host_does_little_before_prompts_run_and_nothing_after(device, monkeypatch):
    """Few operations precede a graph of prompts without padding, and nobody waits for the last token."""
    model, prompts = llama(device), torch.randint(3, VOCAB, (8, 16))
    for _ in range(2):
        generate(model, prompts, max_new_tokens=1)
    operations, before = [], []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            operations.append(operation)
            return operation(*args, **(kwargs or {}))

    replay = PromptGraph.replay
    monkeypatch.setattr(PromptGraph, "replay", lambda *args: before.append(len(operations)) or replay(*args))
    monkeypatch.setattr(loop_module.Rows, "read_later", lambda self: lambda: pytest.fail("waits for the last token"))
    with Record():
        generate(model, prompts, max_new_tokens=1)
    assert len(before) == 1
    assert before[0] <= 40


def test_padding_of_prompts_moves_to_the_right():
    """Positions move with their tokens and go on after the last one; without a mask they stay as they are."""
    ids, mask = torch.tensor([[0, 0, 7, 8], [3, 4, 5, 6]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    positions = torch.tensor([[0, 0, 4, 9], [0, 1, 2, 3]])
    batch = PromptBatch(ids, torch.stack([positions, 10 * positions]), 6, mask)
    assert batch.ids.tolist() == [[7, 8, 0, 0, 0, 0], [3, 4, 5, 6, 0, 0]]
    assert batch.last.tolist() == [1, 3]
    assert batch.mask.tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
    moved = [[4, 9, 10, 11, 12, 13], [0, 1, 2, 3, 4, 5]]
    assert batch.positions.tolist() == [moved, [[40, 90, 91, 92, 93, 94], [0, 10, 20, 30, 31, 32]]]
    for given in (None, torch.ones_like(mask)):
        plain = PromptBatch(ids, torch.arange(4)[None], 5, given)
        assert plain.ids.tolist() == [[0, 0, 7, 8, 0], [3, 4, 5, 6, 0]]
        assert plain.positions.tolist() == [[*range(5)]] * (1 if given is None else 2)
        assert plain.last.tolist() == [3, 3]
    whole = PromptBatch(ids, torch.arange(4)[None], 4)
    assert whole.mask is None
    assert whole.ids.tolist() == ids.tolist()
    assert whole.ids.data_ptr() != ids.data_ptr()  # a graph writes later prompts into them
    assert whole.last.tolist() == [3, 3]


def test_graphs_of_prompts_are_few(device):
    """The oldest ones are dropped. None are captured in training mode, or for more tokens than pay."""
    model = llama(device)

    def run(B, T):
        for _ in range(2):
            generate(model, torch.randint(0, VOCAB, (B, T)), max_new_tokens=NEW, eos_token_id=[])

    for T in range(16, 16 * (MOST_GRAPHS + 3), 16):
        run(1, T)
    kept = [key for step in graphs._kept[model] for key in step._prompts]
    assert max(len(step._prompts) for step in graphs._kept[model]) <= MOST_GRAPHS
    assert kept[-1][0] == (1, padded_length(T))
    release_steps(model)
    model.train()
    run(1, 16)
    assert not graphs._kept[model]
    model.eval()
    run(1, 16)
    (step,) = graphs._kept[model]
    step.most_prompt_tokens = 31
    run(1, 32)
    assert [key[0] for key in step._prompts] == [(1, 16)]


def test_prompts_that_padding_would_change_stay_as_they_are():
    def most(arch, variant):
        model = AutoLigerModel.from_config({**tiny(arch)[variant], "model_type": arch}, device="meta")
        assert can_move_padding(model) == (most_tokens(model) > 0)
        return most_tokens(model)

    assert most("llama", "gqa") > 2**20
    assert most("qwen3_next", next(iter(tiny("qwen3_next")))) > 0
    assert most("phi3", "longrope-partial") == 0
    dynamic = replace(CONFIG, rope_scaling=DynamicScaling(factor=2.0))
    assert most_tokens(LigerLlama.from_config(dynamic, device="meta")) == 0


def test_padding_of_long_prompts_moves_to_the_right(monkeypatch):
    """They need no attention mask, and no graph is captured for them."""
    model, masks = llama("cpu"), []
    ids, mask = torch.randint(3, VOCAB, (3, 40)), torch.ones(3, 40, dtype=torch.int64)
    mask[1, :7] = mask[2, :39] = 0
    want = generate(model, ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=[])
    monkeypatch.setattr(logits_module, "PAGED_DEVICES", ("cpu",))
    model.register_forward_pre_hook(
        lambda _, __, options: masks.append(options.get("attention_mask")), with_kwargs=True
    )
    got = generate(model, ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=[])
    assert torch.equal(got, want)
    assert masks == [None] * NEW


@pytest.mark.parametrize("T", [1, 16, 17, 33, 127, 500, 1000, 4097])
def test_prompts_are_padded_little(T):
    assert T <= padded_length(T) <= max(T * 9 / 8 + 1, T + 15)
    assert padded_length(T) % 16 == 0


@pytest.mark.cases(4)
@pytest.mark.parametrize(("arch", "variant"), [*((arch, None) for arch in FAMILIES), ("phi3", "longrope-partial")])
def test_a_step_grows_with_its_rows(arch, variant, device, captures, monkeypatch):
    """Also one whose rows share pages, or whose frequencies switch: the tokens of a step with room for all of them."""
    monkeypatch.setattr(paged_cache, "PAGE", 16)
    torch.manual_seed(0)
    sizes = tiny(arch)[variant] if variant else next(iter(tiny(arch).values()))
    model = AutoLigerModel.from_config(sizes | {"model_type": arch, "initializer_range": 0.2}, device=device).eval()
    prompts = [torch.randint(3, 40, (length,)) for length in (9, 17)]
    options = {"max_new_tokens": 50, "eos_token_id": [], "num_return_sequences": 2, "do_sample": True, "seed": 0}
    want = generate(model, prompts, **options)
    roomy = list(captures)
    release_steps(model)
    monkeypatch.setattr(logits_module, "FIRST_TOKENS", 4)
    assert torch.equal(generate(model, prompts, **options), want)
    grown = captures[len(roomy) :]
    assert roomy[0] == (4, 80)
    assert [capacity for _, capacity in grown] == [32, 64, 80]


def test_images_of_another_number_are_captured_anew(device, captures):
    """Their keys and values are in the cache as well, in memory of their size."""
    torch.manual_seed(0)
    model = AutoLigerModel.from_config({**tiny("mllama")["four"], "model_type": "mllama"}, device=device).eval()
    with torch.no_grad():
        for name, gate in model.named_parameters():
            if name.endswith("_gate"):  # closed in a new model
                gate.fill_(0.5)
    first, other, third = (make(model, ROWS[row], seed) for row, seed in ((0, 0), (0, 1), (1, 2)))
    found = []
    for ids, _, inputs in (first, other, third, first):
        options = {"max_new_tokens": NEW, "eos_token_id": [], **inputs}
        found.append(generate(model, ids, **options)[:, ids.shape[1] :])
        assert torch.equal(found[-1], generate(model, ids, use_cache=False, **options)[:, ids.shape[1] :])
    assert len(captures) == 3
    assert not torch.equal(found[0], found[1])


def test_a_few_steps_are_kept(device, captures):
    """The latest ones, and none by a model in training mode."""
    model = llama(device)

    def run(*batches):
        for B in batches:
            generate(model, torch.randint(0, VOCAB, (B, 5)), max_new_tokens=NEW, eos_token_id=[])
        return [step.cache.rows for step in graphs._kept[model]]

    assert run(1, 2, 3, 5) == [1, 2, 4, 8]
    assert run(1, 9) == [4, 8, 1, 16]
    assert len(captures) == 5
    model.train()
    assert run(17, 3) == [8, 1, 16]
    release_steps(model)
    assert model not in graphs._kept


def test_steps_at_the_same_time_have_caches_of_their_own(device, captures):
    model = llama(device)
    both = [stream(model, prompt, max_new_tokens=NEW, eos_token_id=[]) for prompt in PROMPTS[:2]]
    got = [torch.stack(tokens) for tokens in zip(*zip(*both, strict=True), strict=True)]
    for prompt, tokens in zip(PROMPTS, got, strict=False):
        want = generate(model, prompt, max_new_tokens=NEW, eos_token_id=[])
        assert torch.equal(tokens[:, 0], want[0, len(prompt) :])
    assert len(captures) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_no_step_waits_for_the_device(sampled):
    model = llama("cuda", dtype=torch.bfloat16)
    options = {"do_sample": True, "top_k": 9, "top_p": 0.9, "temperature": 0.8} if sampled else {"do_sample": False}
    steps = stream(model, PROMPTS, max_new_tokens=NEW, eos_token_id=[], repetition_penalty=1.2, **options)
    tokens = [next(steps) for _ in range(3)]  # prompts, an ordinary step, and the capture
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens += [next(steps) for _ in range(NEW - 4)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.stack([*tokens, next(steps)], 1).shape == (3, NEW)


@pytest.mark.gpu
def test_stop_tokens_on_the_gpu():
    model = llama("cuda")
    free = generate(model, PROMPTS, max_new_tokens=NEW, eos_token_id=[])[:, 9:]
    eos = [free[0, 3].item(), free[1, 7].item(), free[2, 5].item()]
    got = generate(model, PROMPTS, max_new_tokens=NEW, eos_token_id=eos)
    assert got.shape[1] < 9 + NEW
    assert torch.equal(torch.stack([*stream(model, PROMPTS, max_new_tokens=NEW, eos_token_id=eos)], 1), got[:, 9:])


def test_sampled_tokens_do_not_depend_on_the_graph(device, monkeypatch):
    model = llama(device)

    def draw():
        generator = torch.Generator(device).manual_seed(3)
        return generate(model, PROMPTS, max_new_tokens=NEW, do_sample=True, generator=generator, eos_token_id=[])

    got = draw()
    monkeypatch.setattr(graphs, "can_capture", lambda *_: False)
    assert torch.equal(draw(), got)


def test_a_model_that_changes_is_captured_anew(device, captures):
    model = llama(device)
    options = {"max_new_tokens": NEW, "eos_token_id": []}
    generate(model, PROMPTS, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    got = generate(model, PROMPTS, **options)  # the same graph reads the new values
    assert torch.equal(got, generate(model, PROMPTS, use_cache=False, **options))
    assert len(captures) == 1
    model.layers[0].self_attn.scale *= 3
    got = generate(model, PROMPTS, **options)
    assert torch.equal(got, generate(model, PROMPTS, use_cache=False, **options))
    assert len(captures) == 2


@pytest.mark.parametrize("arch", ["nemotron_h", "lfm2", "qwen3_next", "kimi_linear"])
def test_a_kept_step_derives_from_new_weights_anew(arch, device, captures):
    """Steps of recurrent layers read the weights of the convolution in another order."""
    torch.manual_seed(0)
    sizes = next(iter(tiny(arch).values())) | {"model_type": arch, "initializer_range": 0.2}
    model = AutoLigerModel.from_config(sizes, device=device).eval()
    prompts = [torch.randint(3, 40, (9,)), torch.randint(3, 40, (6,))]
    options = {"max_new_tokens": NEW, "eos_token_id": []}
    before = generate(model, prompts, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    got = generate(model, prompts, **options)
    assert not torch.equal(got, before)
    assert torch.equal(got, generate(model, prompts, use_cache=False, **options))
    assert len(captures) == 1


@pytest.mark.gpu
def test_memory_is_given_back(monkeypatch):
    """By a model in training mode and beyond the bound at once, otherwise by `release_steps` and with the model."""

    def used():
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    model = llama("cuda")
    options = {"max_new_tokens": NEW, "eos_token_id": []}
    model.train()
    generate(model, PROMPTS, **options)  # what libraries allocate once
    release_steps(model)
    before = used()
    generate(model, PROMPTS, **options)
    assert used() <= before + 2**16
    model.eval()
    generate(model, PROMPTS, **options)
    assert used() > before
    release_steps(model)
    assert used() <= before + 2**16
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "MOST_MEMORY", 0.0)
        generate(model, PROMPTS, **options)
        assert used() <= before + 2**16
    for B in (1, 2, 3, 5, 9, 17):
        generate(model, torch.randint(0, VOCAB, (B, 5)), **options)
    assert len(graphs._kept[model]) == graphs.MOST_STEPS
    size = sum(parameter.nbytes for parameter in model.parameters())
    del model
    assert used() <= before - size + 2**16


def test_garbage_is_collected_again_after_a_capture():
    @collects_no_garbage()
    def fail():
        with collects_no_garbage():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise RuntimeError("not captured")

    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="not captured"):
        fail()
    assert gc.isenabled()


@pytest.mark.gpu
def test_a_graph_that_becomes_garbage_during_a_capture():
    """Freed then, it would end the capture."""

    class Cycle:
        pass

    class Dropping(nn.Linear):
        def forward(self, x):
            if torch.cuda.is_current_stream_capturing() and stale:
                cycle = Cycle()
                cycle.itself, cycle.graph = cycle, stale.pop()
                del cycle
                assert len([[] for _ in range(100)]) == 100  # the collector runs after some new containers
            return super().forward(x)

    stale = [torch.cuda.CUDAGraph()]
    with torch.cuda.graph(stale[0]):
        torch.zeros(1, device="cuda")
    model = llama("cuda")
    layer = Dropping(64, 64, bias=False, device="cuda")
    layer.weight = model.layers[0].self_attn.o_proj.weight
    model.layers[0].self_attn.o_proj = layer
    thresholds = gc.get_threshold()
    gc.set_threshold(10)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            generate(model, PROMPTS, max_new_tokens=NEW, eos_token_id=[])
    finally:
        gc.set_threshold(*thresholds)
    assert not stale


@pytest.mark.gpu
def test_what_cannot_be_captured_runs_step_by_step():
    class Waiting(nn.Linear):
        def forward(self, x):
            assert x.sum().item() < 1e9
            return super().forward(x)

    model = llama("cuda")
    want = generate(model, PROMPTS, max_new_tokens=NEW, eos_token_id=[])
    layer = Waiting(64, 64, bias=False, device="cuda")
    layer.weight = model.layers[0].self_attn.o_proj.weight
    model.layers[0].self_attn.o_proj = layer
    with pytest.warns(UserWarning, match="a step of LigerLlama can't be captured as a CUDA"):
        got = generate(model, PROMPTS, max_new_tokens=NEW, eos_token_id=[])
    assert torch.equal(got, want)
    torch.manual_seed(0)
    drawn = torch.randn(5, device="cuda")  # a failed capture leaves random numbers as they were
    torch.manual_seed(0)
    assert torch.equal(torch.randn(5, device="cuda"), drawn)
    model.layers[0].self_attn.o_proj.register_forward_hook(lambda *_: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(generate(model, PROMPTS, max_new_tokens=NEW, eos_token_id=[]), want)
    with reference_backend():
        assert not can_capture(model)
