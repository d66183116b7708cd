"""Continuing many prompts with rows that come and go: every row as if it ran alone."""

import gc
import itertools

import pytest
import tokenizers
import torch

from liger_models import AutoLigerModel
from liger_models.arch.llama import LigerLlama, LlamaConfig
from liger_models.distributed.collectives import Group
from liger_models.distributed.groups import ParallelGroups
from liger_models.generation import rollouts as module
from liger_models.generation import scheduler
from liger_models.generation.graphs import DecodeStep
from liger_models.generation.loop import generate
from liger_models.generation.rollouts import rollout
from liger_models.generation.scheduler import Scheduler
from liger_models.layers import paged_cache
from liger_models.layers.attention import LigerAttention
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.page_pool import PagePool

pytestmark = pytest.mark.slow

VOCAB = 53
CONFIG = LlamaConfig(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.25,
)  # fmt: skip
LENGTHS, NEW = [9, 1, 38, 17, 3, 33, 16, 5], [12, 5, 9, 1, 20, 8, 18, 11]
PAGE_BYTES = 2 * 2 * 2 * 16 * 4 * 16
"""Two layers, keys and values, 2 heads of 16 in fp32, pages of 16 tokens."""


@pytest.fixture(autouse=True)
def _pages_of_16_tokens(monkeypatch):
    monkeypatch.setattr(paged_cache, "PAGE", 16)


def llama(device="cpu", **options):
    torch.manual_seed(0)
    return LigerLlama.from_config(CONFIG, device=device, **options).eval()


def family(arch, variant=None, device="cpu"):
    from ..arch.families import tiny

    torch.manual_seed(0)
    sizes = tiny(arch)[variant] if variant else next(iter(tiny(arch).values()))
    model = AutoLigerModel.from_config({**sizes, "model_type": arch}, device=device).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # away from logits that are all alike
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.1))
    return model


def make_prompts(lengths=LENGTHS, vocab=VOCAB):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


def alone(model, prompt, new, **options):
    """What `generate` finds for one prompt: new tokens, log-probabilities and reason."""
    out = generate(model, [prompt], max_new_tokens=new, return_logprobs=True, **options)
    return out.sequences[0, len(prompt) :].tolist(), out.logprobs[0].cpu(), out.finish_reasons[0]


def assert_alone(model, prompts, new, found, stops=None, **options):
    """The rows of a rollout are those of `generate`."""
    assert len(found) == len(prompts)
    for row, (prompt, count, got) in enumerate(zip(prompts, new, found, strict=True)):
        ends = [] if stops is None else stops[row]
        tokens, log_probs, reason = alone(model, prompt, count, eos_token_id=ends, **options)
        assert got.tokens.tolist() == tokens, row
        assert got.reason == reason, row
        assert (got.tokens.dtype, got.log_probs.dtype) == (torch.int64, torch.float32)
        torch.testing.assert_close(got.log_probs, log_probs, rtol=1e-4, atol=1e-5)


@pytest.fixture
def model():
    return llama()


@pytest.fixture
def pools(monkeypatch):
    """The caches that were made."""
    made, original = [], module._make_pool
    monkeypatch.setattr(module, "_make_pool", lambda *args: made.append(original(*args)) or made[-1])
    return made


@pytest.fixture
def events(monkeypatch):
    """The forwards of prompts, as (row, begin, end), and "steps"."""
    found, fill, resume = [], PagePool.fill, PagePool.resume
    monkeypatch.setattr(PagePool, "fill", lambda self, parts: found.append(parts) or fill(self, parts))
    monkeypatch.setattr(PagePool, "resume", lambda self, *args: found.append("steps") or resume(self, *args))
    return found


# --- tokens and log-probabilities ------------------------------------------------------------------------------------


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    "case",
    [
        ("llama",), ("gemma2",), ("mixtral",), ("gpt_oss",), ("gemma4_text",), ("qwen2_vl",), ("mllama",),
        ("qwen3_next",), ("deepseek_v2", "low_rank_queries"), ("llama4_text",), ("kimi_linear",),
        # Windows and gated delta rules, as in those above.
        *(pytest.param((arch,), marks=pytest.mark.matrix) for arch in ("gemma3_text", "olmo3", "qwen3_5_text")),
    ],
    ids="-".join,
)  # fmt: skip
def test_every_row_is_what_generate_finds_for_it_alone(case):
    """Through windows, sinks, experts and shared keys, with chunks, packed prompts, stop tokens and rows that wait."""
    model = family(*case)
    prompts, new = make_prompts(vocab=40), NEW
    free = rollout(model, prompts, max_new_tokens=new, eos_token_id=[], batch_size=3, chunk_size=11, steps_per_read=3)
    assert_alone(model, prompts, new, free)
    stops = [[row.tokens[len(row.tokens) // 2].item(), 2] if number % 2 else [] for number, row in enumerate(free)]
    options = {"batch_size": 5, "chunk_size": 60, "steps_per_read": 4}
    given = [tuple(tokens) if number % 3 else torch.tensor(tokens).long() for number, tokens in enumerate(stops)]
    found = rollout(model, prompts, max_new_tokens=new, stop_tokens=given, **options)
    assert_alone(model, prompts, new, found, stops)
    assert {row.reason for row in found} == {"stop", "length"}


def test_log_probs_are_those_of_the_training_forward(model):
    prompts = make_prompts()
    found = rollout(model, prompts, max_new_tokens=NEW, eos_token_id=[], do_sample=True, temperature=1.7, seed=3)
    rows = [torch.tensor([*prompt, *row.tokens.tolist()]) for prompt, row in zip(prompts, found, strict=True)]
    ids = torch.cat(rows)[None]
    bounds = torch.tensor([0, *itertools.accumulate(map(len, rows))])
    trained = model(ids, labels=ids, cu_seqlens=bounds, return_log_probs=True).log_probs[0]
    for start, prompt, row in zip(bounds.tolist(), prompts, found, strict=False):
        first = start + len(prompt) - 1
        torch.testing.assert_close(row.log_probs, trained[first : first + len(row.tokens)], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"top_k": 9, "temperature": 1.5}, {"top_p": 0.9, "min_p": 0.05}], ids=str)
def test_sampled_rows_depend_on_their_seeds_alone(model, options):
    prompts, seeds = make_prompts(), [5, 6, 2**40, 8, 9, 10, 11, 12]
    options = {"do_sample": True, "eos_token_id": [], **options}
    want = [alone(model, *each, **options, seed=[seed]) for *each, seed in zip(prompts, NEW, seeds, strict=True)]
    orders = [range(8), reversed(range(8)), [3, 0, 6, 1, 7, 2, 5, 4]]
    for order, (width, steps, chunk) in zip(map(list, orders), [(8, 5, 100), (2, 1, 7), (5, 8, 20)], strict=True):
        found = rollout(
            model, [prompts[row] for row in order], max_new_tokens=[NEW[row] for row in order],
            seed=[seeds[row] for row in order], batch_size=width, steps_per_read=steps, chunk_size=chunk, **options,
        )  # fmt: skip
        assert [row.tokens.tolist() for row in found] == [want[row][0] for row in order]
    one = rollout(model, prompts, max_new_tokens=NEW, seed=5, **options)
    assert one[1].tokens.tolist() == alone(model, prompts[1], NEW[1], **options, seed=[6])[0]


def test_draws_without_seeds_come_from_a_generator(model):
    options = {"max_new_tokens": 9, "do_sample": True, "eos_token_id": []}

    def drawn(seed):
        found = rollout(model, make_prompts(), generator=torch.Generator().manual_seed(seed), **options)
        return [row.tokens.tolist() for row in found]

    assert drawn(3) == drawn(3) != drawn(4)


def test_a_tensor_of_prompts(model):
    prompts = torch.randint(3, VOCAB, (4, 6))
    found = rollout(model, prompts, max_new_tokens=5, eos_token_id=[])
    want = generate(model, prompts, max_new_tokens=5, eos_token_id=[])[:, 6:]
    assert torch.equal(torch.stack([row.tokens for row in found]), want)


# --- the scheduler ---------------------------------------------------------------------------------------------------


@pytest.mark.cases(2)
@pytest.mark.parametrize("more", [0, 1, 2])
@pytest.mark.parametrize("repeats", [1, 3])
def test_rows_that_find_no_page_are_put_back(model, pools, monkeypatch, more, repeats):
    """With room for the longest row and little more; afterwards no page is held."""
    removed, original = [], Scheduler._remove
    monkeypatch.setattr(Scheduler, "_remove", lambda self, row: removed.append(row.number) or original(self, row))
    prompts, new = make_prompts([20, 3, 17, 2, 5, 19]), [20, 44, 22, 35, 38, 25]
    options = {"do_sample": True, "seed": 0, "eos_token_id": [], "num_return_sequences": repeats}
    found = rollout(
        model, prompts, max_new_tokens=new, cache_bytes=(4 + more) * PAGE_BYTES, chunk_size=9, steps_per_read=5,
        **options,
    )  # fmt: skip
    assert len(removed) > len(found)
    want = rollout(model, prompts, max_new_tokens=new, **options)
    for got, expected in zip(found, want, strict=True):
        assert got.tokens.tolist() == expected.tokens.tolist()
        torch.testing.assert_close(got.log_probs, expected.log_probs, rtol=1e-4, atol=1e-5)
    small, large = pools
    assert small.num_free == 3 + more
    assert large.num_free == len(large._holders) - 1
    assert not any(small._holders + large._holders)


def test_rows_of_one_prompt_compute_it_once_and_share_its_pages(model, events, monkeypatch):
    taken, take = [], PagePool.take
    monkeypatch.setattr(PagePool, "take", lambda self, count: taken.append(count) or take(self, count))
    prompts = make_prompts([38, 1, 17, 33])
    options = {"max_new_tokens": 4, "do_sample": True, "seed": 1, "eos_token_id": [], "chunk_size": 20}
    found = rollout(model, prompts, num_return_sequences=4, **options)
    filled = [end - begin for parts in events if parts != "steps" for _, begin, end in parts]
    assert sum(filled) == 37 + 16 + 32  # the last token is left to the first step
    assert sum(taken) == (3 + 3 * 1) + 4 * 1 + (2 + 3 * 1) + (3 + 3 * 1)
    want = rollout(model, [prompt for prompt in prompts for _ in range(4)], **options)
    assert [row.tokens.tolist() for row in found] == [row.tokens.tolist() for row in want]


def test_rows_of_one_prompt_are_grouped(model, monkeypatch):
    """Attention reads the full pages of a prompt once for up to eight rows, whichever slots they have."""
    seen, group = [], PagePool.group

    def watched(pool, groups):
        group(pool, groups)
        seen.append(groups)
        lines, counts = (x.tolist() for x in pool._shared_keys)
        assert len(lines) == -(-pool.rows // 4)
        kept = sorted(groups, key=lambda each: len(each[0]), reverse=True)[: len(lines)]
        want = [rows + [-1] * (8 - len(rows)) + [tokens] for rows, tokens in kept]
        assert lines == want + [[-1] * 8 + [0]] * (len(lines) - len(want))
        of_rows = {row: tokens for rows, tokens in kept for row in rows}
        assert counts == [of_rows.get(row, 0) for row in range(pool.rows)]
        for rows, tokens in groups:
            pages = pool._host_table[rows, : tokens // 16]
            assert (pages == pages[0]).all()
            assert (pages > 0).all()
            assert 1 < len(rows) <= 8

    monkeypatch.setattr(PagePool, "group", watched)
    monkeypatch.setattr(scheduler, "LEAST_SHARED", 32)
    prompts = make_prompts([38, 9, 33, 16])
    options = {"do_sample": True, "seed": 0, "eos_token_id": [], "num_return_sequences": 10}
    rollout(model, prompts, max_new_tokens=[12, 5, 9, 4], batch_size=16, steps_per_read=2, **options)
    counts = {(len(rows), tokens) for groups in seen for rows, tokens in groups}
    assert {(8, 32), (2, 32)} <= counts  # 38 and 33 tokens fill two pages before their last token, 16 tokens none
    assert {tokens for _, tokens in counts} == {32}
    monkeypatch.setattr(PagePool, "group", lambda pool, groups: pytest.fail("grouped") if groups else None)
    rollout(model, prompts, max_new_tokens=4)
    rollout(model, prompts[1:2], max_new_tokens=4, num_return_sequences=3, do_sample=True)


def test_a_long_prompt_is_computed_in_chunks(model, events):
    rollout(model, make_prompts([60]), max_new_tokens=3, eos_token_id=[], chunk_size=16)
    assert events == [[(0, 0, 16)], [(0, 16, 32)], [(0, 32, 48)], [(0, 48, 59)], "steps"]


def test_few_prompts_wait_for_more(model, events, monkeypatch):
    """Each read ends one of 4 rows. With half of the rows idle, or enough tokens, there is a prefill."""
    prompts, options = make_prompts([5] * 8), {"eos_token_id": [], "batch_size": 4, "steps_per_read": 1}
    new = [12, 11, 10, 9, 8, 8, 8, 8]

    def sizes(**more):
        events.clear()
        rollout(model, prompts, max_new_tokens=new, **options, **more)
        return [len(each) for each in events if each != "steps"]

    assert sizes() == [4, 1, 1, 1, 1]  # a sixteenth of 4 rows is none
    monkeypatch.setattr(scheduler, "IDLE_SHARE", 0.5)
    assert sizes() == [4, 3, 1]  # none waits after the last
    assert sizes(chunk_size=8) == [2, 2, 2, 2]


def test_steps_get_fewer_rows_when_none_wait(model, monkeypatch):
    sizes, original = [], DecodeStep.__call__
    monkeypatch.setattr(DecodeStep, "__call__", lambda self, *args: sizes.append(len(args[1])) or original(self, *args))
    prompts, new = make_prompts([9] * 7), [2, 4, 4, 4, 6, 8, 10]
    options = {"max_new_tokens": new, "eos_token_id": [], "batch_size": 6, "steps_per_read": 2}
    found = rollout(model, prompts, **options)
    assert sizes == [6] * 6 + [2] * 2 + [1] * 2  # the row with 2 tokens starts last
    assert_alone(model, prompts, new, found)
    start = Scheduler._start_steps

    def start_as_if_captured(self):
        self.captured = False
        start(self)
        self.captured = True

    sizes.clear()
    monkeypatch.setattr(Scheduler, "_start_steps", start_as_if_captured)
    monkeypatch.setattr(scheduler, "CAPTURE_ROWS", 16)  # 4 rows less for 4 steps
    assert_alone(model, prompts, new, rollout(model, prompts, **options))
    assert sizes == [6] * 6 + [2] * 4


def test_whole_prompts_share_a_forward(model, events):
    prompts = make_prompts([5, 6, 7, 8])
    found = rollout(model, prompts, max_new_tokens=3, eos_token_id=[], chunk_size=16)
    filled = [[end for _, _, end in parts] for parts in events if parts != "steps"]
    assert filled == [[4, 5, 6], [7]]
    assert_alone(model, prompts, [3] * 4, found)


def test_rows_that_end_are_replaced(model, monkeypatch):
    """Two places take 15 steps for rows that, two at a time, would take 12 + 1 + 12 + 1."""
    calls, original = [], DecodeStep.__call__
    monkeypatch.setattr(DecodeStep, "__call__", lambda self, *args: calls.append(1) or original(self, *args))
    new = [12, 1, 1, 1, 12, 1, 1, 1]
    rollout(model, make_prompts([5] * 8), max_new_tokens=new, eos_token_id=[], batch_size=2, steps_per_read=1)
    assert len(calls) == 15


def test_the_host_reads_once_for_several_steps(model, monkeypatch):
    read, original = [], Scheduler._read
    monkeypatch.setattr(Scheduler, "_read", lambda self, steps: read.append(steps) or original(self, steps))
    rollout(model, make_prompts([5, 6]), max_new_tokens=[20, 11], eos_token_id=[])
    assert read == [16, 4]


def test_the_mode_is_restored_and_no_gradients_are_kept(model):
    model.train()
    model.layers[1].eval()
    found = rollout(model, make_prompts([5]), max_new_tokens=3, eos_token_id=[])
    assert not found[0].log_probs.requires_grad
    assert model.training
    assert [layer.training for layer in model.layers] == [True, False]
    with pytest.raises(ValueError, match="cache_bytes"):
        rollout(model, make_prompts([5]), max_new_tokens=3, cache_bytes=10)
    assert model.training


def test_recurrent_states_go_where_their_rows_go(pools, monkeypatch):
    """Through rows of one prompt that start together or later, put back, and in steps of fewer rows."""
    model = family("qwen3_next")
    prompts, new = make_prompts([20, 1, 17, 2], vocab=40), [20, 44, 22, 35]
    options = {"do_sample": True, "eos_token_id": [], "steps_per_read": 5, "num_return_sequences": 3}
    found = rollout(model, prompts, max_new_tokens=new, batch_size=5, chunk_size=9, seed=2, **options)
    for row, got in enumerate(found):
        prompt, count = prompts[row // 3], new[row // 3]
        tokens, log_probs, _ = alone(model, prompt, count, do_sample=True, eos_token_id=[], seed=[2 + row])
        assert got.tokens.tolist() == tokens, row
        torch.testing.assert_close(got.log_probs, log_probs, rtol=1e-4, atol=1e-5)
    removed, original = [], Scheduler._remove
    monkeypatch.setattr(Scheduler, "_remove", lambda self, row: removed.append(row.number) or original(self, row))
    size = sum(x[0].nbytes for layer in pools[0]._layers.values() for x in layer)
    again = rollout(model, prompts, max_new_tokens=new, cache_bytes=6 * size, chunk_size=9, seed=2, **options)
    assert len(removed) > len(found)
    assert [row.tokens.tolist() for row in again] == [row.tokens.tolist() for row in found]


def test_states_of_rows_of_one_prompt_are_computed_once_if_they_start_together(events):
    prompts = make_prompts([20], vocab=40)
    options = {"max_new_tokens": 4, "do_sample": True, "eos_token_id": [], "num_return_sequences": 4}
    for batch_size, times in ((4, 1), (2, 2)):
        events.clear()
        rollout(family("qwen3_next"), prompts, batch_size=batch_size, **options)
        assert [parts[0][1:] for parts in events if parts != "steps"] == [(0, 19)] * times


# --- the cache -------------------------------------------------------------------------------------------------------


def test_what_layers_cache_is_found_once(model):
    """A single token shows it, until the model changes."""
    forwards = []
    model.norm.register_forward_hook(lambda *_: forwards.append(1))
    counts = []
    for change in (False, False, True):
        if change:
            model.norm.eps *= 2
        forwards.clear()
        rollout(model, [[3, 4, 5]], max_new_tokens=1)
        counts.append(len(forwards))
    assert counts == [3, 2, 3]  # one token, the prompt, and a step


def test_what_layers_cache_under_autocast_is_not_kept(model):
    prompts, options = make_prompts(), {"max_new_tokens": 4, "eos_token_id": []}
    fresh = [rollout(llama(), prompts, **options)]
    with torch.autocast("cpu", torch.bfloat16):
        fresh.append(rollout(llama(), prompts, **options))
    for dtype, wants in ((torch.float32, fresh[0]), (torch.bfloat16, fresh[1]), (torch.float32, fresh[0])):
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            for row, want in zip(rollout(model, prompts, **options), wants, strict=True):
                assert torch.equal(row.tokens, want.tokens)
                assert torch.equal(row.log_probs, want.log_probs)


def pool_of(rows=2, pages=6):
    probe = DecodeCache(1)
    probe.extend(0, torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
    return PagePool(rows, 40, torch.device("cpu"), pages=pages, like=probe)


def test_a_shared_page_is_free_when_nobody_holds_it():
    pool = pool_of()
    assert pool.num_free == 5  # nobody gets page 0
    pages = pool.take(3)
    assert sorted(pages) == [1, 2, 3]
    shared = pool.share(pages[:2])
    pool.give_back(pages)
    assert pool.num_free == 3
    pool.give_back(shared)
    assert pool.num_free == 5


def test_idle_rows_write_to_the_page_of_nobody():
    pool = pool_of()
    pool.assign(0, [4, 2])
    pool.assign(1, [3])
    pool.resume(torch.tensor([16, 5]), torch.tensor([1, 0]))
    assert pool.positions.tolist() == [[16], [0]]
    pool.step()
    k = torch.tensor([7.0, 9.0]).view(2, 1, 1, 1).expand(2, 1, 1, 2)
    keys, _ = pool.extend(0, k, -k)
    assert keys.nonzero()[:, :2].unique(dim=0).tolist() == [[0, 0], [2, 0]]
    assert keys[2, 0, 0, 0] == 7
    assert pool.pages.lengths.tolist() == [17, 1]


def test_packed_documents_need_a_cache_that_takes_them(model):
    ids, bounds = torch.ones(1, 6, dtype=torch.int64), torch.tensor([0, 2, 6])
    with pytest.raises(ValueError, match="can't be used with a decode cache"):
        model(ids, cu_seqlens=bounds, cache=DecodeCache(8))


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, "at least one token each"),
        ({"prompts": [[3], []]}, r"at least one token each, got shapes \[\[0\]\]"),
        ({"prompts": [[3.5]]}, "must be integers, got torch.float32 in prompt 0"),
        ({"prompts": [[3, VOCAB]]}, rf"must be in \[0, {VOCAB}\), got 3 to {VOCAB}"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be integers, got 2.5"),
        ({"max_new_tokens": None}, "max_new_tokens must be integers, got None"),
        ({"prompts": 3}, "prompts must be a list of prompts, got int"),
        ({"batch_size": 1.5}, "batch_size must be an integer, got 1.5"),
        ({"max_new_tokens": [3, 4]}, "or one for each of the 1 prompts, got 2"),
        ({"stop_tokens": [[1], [2]]}, "a list for each of the 1 prompts, got 2"),
        ({"stop_tokens": [[33.5]]}, r"stop_tokens must be a list of integers for each prompt, got \[\[33\.5\]\]"),
        ({"stop_tokens": [33]}, r"stop_tokens must be a list of integers for each prompt, got \[33\]"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"steps_per_read": 0}, "steps_per_read must be at least 1"),
        ({"seed": [1, 2]}, "one for each of 1 rows, got 2"),
        ({"repetition_penalty": 1.2}, "repetition_penalty must be 1.0, .* use generate"),
        ({"min_new_tokens": 2}, "min_new_tokens must be 0"),
        ({"weight_dtype": "nf4"}, 'weight_dtype must be None or "float8", got .nf4.'),
        ({"weight_dtype": "float8", "deterministic": True}, "weight_dtype must be None with deterministic=True"),
        ({"use_cache": False}, "use_cache must not be False"),
        ({"attention_mask": torch.ones(1, 2)}, "attention_mask must be omitted"),
        ({"max_new_tokens": 90, "cache_bytes": 6 * PAGE_BYTES}, f"at least {7 * PAGE_BYTES} for prompt 0, which may"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_arguments_are_named(model, changes, message):
    given = {"prompts": [[3, 4, 5]], "max_new_tokens": 3, "eos_token_id": [], **changes}
    with pytest.raises(ValueError, match=message):
        rollout(model, given.pop("prompts"), **given)


def test_texts_are_encoded_by_the_tokenizer(model):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 3, "llama": 4, "it": 5}))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.assets = {"tokenizer.json": words.to_str().encode()}
    for texts in (["a llama", "it"], ("a llama", "it")):
        found = model.rollout(texts, max_new_tokens=[3, 5], eos_token_id=[])
        assert_alone(model, [[3, 4], [5]], [3, 5], found)


def test_unknown_arguments_are_named(model):
    with pytest.raises(TypeError, match="temprature"):
        rollout(model, [[3]], max_new_tokens=2, temprature=0.5)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "seed": 3}], ids=str)
def test_weights_that_are_no_numbers_are_an_error(model, options):
    with torch.no_grad():
        model.norm.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="must be numbers"):
        model.rollout([[5, 6, 7]], max_new_tokens=3, **options)


@pytest.mark.parametrize("case", [("llama", "dynamic"), ("phi3", "longrope-partial")], ids="-".join)
def test_frequencies_that_change_while_a_row_grows_are_refused(case):
    model = family(*case)
    found = rollout(model, [[3, 4], [5]], max_new_tokens=3, eos_token_id=[])
    assert_alone(model, [[3, 4], [5]], [3, 3], found)
    with pytest.raises(ValueError, match=r"must not exceed \d+ tokens, beyond which \w+ rotates cached keys"):
        rollout(model, [[3, 4], [5]], max_new_tokens=300)


def test_models_that_cannot_run_here_are_refused(model):
    class Own(LigerAttention):
        @property
        def attention(self):
            return super().attention._replace(takes_pages=False)

    groups, model.groups = model.groups, ParallelGroups(context=Group("", 2, 0))
    with pytest.raises(ValueError, match="without sequence_parallel, got LigerLlama otherwise"):
        rollout(model, [[3]], max_new_tokens=2)
    model.groups = groups
    model.layers[0].self_attn = Own(64, 4, 2, 16, layer=0)
    with pytest.raises(ValueError, match=r"take pages of a cache, got layers\.0\.self_attn of LigerLlama"):
        rollout(model, [[3]], max_new_tokens=2)
    with pytest.raises(ValueError, match="some layer must cache keys and values, got none in LigerMamba2ForCausalLM"):
        rollout(family("mamba2"), [[3]], max_new_tokens=2)


@pytest.mark.compile
def test_compiled_models_are_refused(model):
    model.layers[1].compile(backend="eager")
    with pytest.raises(ValueError, match="must not be compiled"):
        rollout(model, [[3]], max_new_tokens=2)


# --- GPUs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def captured(monkeypatch):
    """The number of rows of each step that was captured."""
    found, original = [], DecodeStep._capture

    def capture(self, model):
        original(self, model)
        assert self.graph is not None
        found.append(self.cache.rows)

    monkeypatch.setattr(DecodeStep, "_capture", capture)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(
    "arch", ["llama", "gemma2", "gemma4_text", "mixtral", "gpt_oss", "olmo3", "qwen3_next", "deepseek_v2"]
)
def test_replayed_steps_find_what_generate_finds(arch, captured):
    """One graph for all rows that come and go, and one for the last of them."""
    model = family(arch, device="cuda")
    prompts = make_prompts(vocab=40)
    options = {"batch_size": 3, "chunk_size": 11, "steps_per_read": 3}
    found = rollout(model, prompts, max_new_tokens=NEW, eos_token_id=[], **options)
    assert captured[0] == 3
    assert captured[1:] in ([], [1])
    assert_alone(model, prompts, NEW, found)


@pytest.mark.gpu
def test_pages_that_run_out_on_the_gpu(captured):
    model = llama("cuda")
    prompts, new = make_prompts([30, 14, 3, 15, 20, 31]), [18, 33, 44, 30, 20, 17]
    options = {"do_sample": True, "seed": 0, "eos_token_id": [], "num_return_sequences": 3}
    want = rollout(model, prompts, max_new_tokens=new, **options)
    found = rollout(model, prompts, max_new_tokens=new, cache_bytes=7 * PAGE_BYTES, chunk_size=9, **options)
    assert [row.tokens.tolist() for row in found] == [row.tokens.tolist() for row in want]
    assert captured.count(18) == 2
    assert all(2 * fewer <= rows or fewer == 18 for rows, fewer in itertools.pairwise(captured))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [None, 3])
def test_nothing_waits_for_the_device_between_two_reads(monkeypatch, seed):
    model = llama("cuda", dtype=torch.bfloat16)
    reads, resume, read = [], PagePool.resume, Scheduler._read

    def no_waiting(self, *args):
        if len(reads) > 1 and self.rows == 4:  # after kernels are compiled and the step is captured
            torch.cuda.set_sync_debug_mode("error")
        resume(self, *args)

    def waiting(self, steps):
        torch.cuda.set_sync_debug_mode("default")
        reads.append(steps)
        return read(self, steps)

    monkeypatch.setattr(PagePool, "resume", no_waiting)
    monkeypatch.setattr(Scheduler, "_read", waiting)
    try:
        found = rollout(
            model, make_prompts(), max_new_tokens=30, do_sample=True, top_k=9, top_p=0.9, seed=seed, eos_token_id=[1],
            batch_size=4, steps_per_read=8,
        )  # fmt: skip
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(found) == len(LENGTHS)
    assert len(reads) > 4


@pytest.mark.gpu
def test_the_cache_is_freed():
    def used():
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    model = llama("cuda").train()
    options = {"max_new_tokens": 20, "eos_token_id": [], "batch_size": 4}
    rollout(model, make_prompts(), **options)  # what libraries allocate once
    before = used()
    rollout(model, make_prompts(), **options)
    assert used() <= before + 2**16
