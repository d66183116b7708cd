"""Decoding against transformers: same random weights, same tokens."""

import json
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from liger_models import AutoLigerModel
from liger_models.arch.llama import LigerLlama, LlamaConfig
from liger_models.generation import sampling
from liger_models.generation.eval_mode import evaluating
from liger_models.generation.loop import generate, stream
from liger_models.generation.options import UNFILTERED, Options, PromptInputs, resolve, select_inputs
from liger_models.generation.prefix import TOKENS
from liger_models.generation.sampling import (
    Sampler,
    draw,
    keep_epsilon,
    keep_eta,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical_p,
    penalize_repetition,
)
from liger_models.generation.stop_strings import StopStrings
from liger_models.kernels.seeded_scores import exponential_noise
from liger_models.layers.kv_cache import DecodeCache

from .late import transformers
from .text.folders import KINDS, SPECIAL
from .text.folders import pair as tokenizers_in

VOCAB, NEW = 53, 20
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,  # logits far enough apart that rounding does not choose the token
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _rope(**scaling):
    return {"rope_parameters": {"rope_theta": 10000.0, **scaling}}


VARIANTS = {
    "gqa": {},
    "mha-tied-biased": {"num_key_value_heads": 4, "tie_word_embeddings": True, "attention_bias": True},
    "mqa-wide-heads": {"num_key_value_heads": 1, "head_dim": 16},
    "linear": _rope(rope_type="linear", factor=4.0),
    # The rows grow past the length that the frequencies are made for.
    "dynamic": {"max_position_embeddings": 16, **_rope(rope_type="dynamic", factor=4.0)},
    "llama3": _rope(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
    "yarn": _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
PROMPTS = [[5, 17, 3, 44, 29, 8, 31, 12, 50], [7, 33, 21], [40, 6, 6, 19, 25, 11]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Variant -> (transformers' model, ours loaded from its checkpoint)."""

    @cache
    def build(variant):
        torch.manual_seed(0)
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **VARIANTS[variant]})).eval()
        folder = tmp_path_factory.mktemp("checkpoint")
        theirs.save_pretrained(folder)
        return theirs, LigerLlama.from_pretrained(folder, progress=False).eval()

    return build


@pytest.fixture
def ours(pair):
    return pair("gqa")[1]


def padded(prompts=PROMPTS, pad=0):
    T = max(map(len, prompts))
    ids = torch.tensor([[pad] * (T - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (T - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def configure(model, monkeypatch, **values):
    """Give the model a generation_config.json."""
    monkeypatch.setattr(model, "assets", {"generation_config.json": json.dumps(values).encode()})


# --- greedy decoding -------------------------------------------------------------------------------------------------


@every_variant
def test_greedy_tokens_are_those_of_transformers(pair, variant, use_cache):
    theirs, ours = pair(variant)
    options = {"max_new_tokens": NEW, "use_cache": use_cache, "do_sample": False}
    one = torch.tensor(PROMPTS[:1])
    want = theirs.generate(one, **options)
    assert len(set(want[0, one.shape[1] :].tolist())) > 5  # a constant continuation would test little
    assert torch.equal(generate(ours, one, **options), want)
    assert torch.equal(generate(ours, **padded(), **options), theirs.generate(**padded(), **options))


def test_experts_that_are_balanced_in_training_decode_padded_rows():
    sizes = SIZES | {"model_type": "mixtral", "num_local_experts": 4, "output_router_logits": True}
    model = AutoLigerModel.from_config(sizes)
    cached, whole = (generate(model, **padded(), max_new_tokens=NEW, use_cache=use) for use in (True, False))
    assert torch.equal(cached, whole)


@pytest.mark.parametrize("pad", [None, 0, 30])
def test_stop_tokens_and_padding(pair, pad):
    """Rows end one after the other; the batch ends with the last one."""
    theirs, ours = pair("gqa")
    free = theirs.generate(**padded(), max_new_tokens=NEW)[:, 9:]
    stops = [free[0, 4].item(), free[1, 9].item(), free[2, 2].item()]
    for eos in (stops[0], stops[:2], stops):
        options = {"max_new_tokens": NEW, "eos_token_id": eos, "pad_token_id": pad}
        want = theirs.generate(**padded(), **options)
        got = generate(ours, **padded(), **options)
        assert torch.equal(got, want)
    assert want.shape[1] < 9 + NEW  # the last case ended early
    filler = stops[0] if pad is None else pad
    assert all(row[-1] == filler for row in got[:, 9:].tolist() if row[-1] not in stops)
    assert got.eq(filler).sum(1).max() > 1


def test_the_batch_ends_with_the_step_that_ends_its_last_row(ours):
    free = generate(ours, PROMPTS[:1], max_new_tokens=NEW)[0, 9:].tolist()
    stop = free[6]
    assert (
        generate(ours, PROMPTS[:1], max_new_tokens=NEW, eos_token_id=stop)[0, 9:].tolist()
        == (free[: free.index(stop) + 1])
    )
    first = generate(ours, PROMPTS[:1], max_new_tokens=NEW, eos_token_id=free[0])
    assert first[0, 9:].tolist() == free[:1]


@every_variant
def test_repetition_penalty(pair, variant):
    theirs, ours = pair(variant)
    for prompt in PROMPTS:
        options = {"max_new_tokens": NEW, "repetition_penalty": 1.4}
        ids = torch.tensor([prompt])
        want = theirs.generate(ids, **options)
        assert not torch.equal(want, theirs.generate(ids, max_new_tokens=NEW))
        assert torch.equal(generate(ours, ids, **options), want)


def test_padding_is_no_repetition(ours):
    """A padded row is continued as if it stood alone, even if its padding is a token that it would say."""
    short = PROMPTS[1]
    for penalty in (1.5, 0.7):
        alone = generate(ours, [short], max_new_tokens=NEW, repetition_penalty=penalty)[0, 3:]
        for pad in sorted({*alone.tolist(), *short}):
            got = generate(ours, **padded(pad=pad), max_new_tokens=NEW, repetition_penalty=penalty)
            assert torch.equal(got[1, 9:], alone), pad


RULES = {
    "ngrams": {"no_repeat_ngram_size": 2},
    "long-ngrams": {"no_repeat_ngram_size": 40},  # longer than a row
    "single-tokens": {"no_repeat_ngram_size": 1},
    "words": {"bad_words_ids": [[16], [3, 44, 29], [*range(40)]]},
    "tokens": {"suppress_tokens": [16, 3]},
    "all": {"no_repeat_ngram_size": 3, "bad_words_ids": [[16]], "suppress_tokens": [3], "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("rule", RULES)
def test_rules_that_forbid_tokens(pair, rule):
    theirs, ours = pair("gqa")
    options = dict(RULES[rule])
    ids = torch.tensor(PROMPTS[:1])
    free = theirs.generate(ids, max_new_tokens=NEW)[0, 9:].tolist()
    if "bad_words_ids" in options:  # also words that begin in the prompt, and in what is new
        options["bad_words_ids"] = [*options["bad_words_ids"], [12, 50, free[0]], free[3:5]]
    if "suppress_tokens" in options:
        options["suppress_tokens"] = [*options["suppress_tokens"], free[1]]
    options |= {"max_new_tokens": NEW}
    want = theirs.generate(ids, **options)
    assert (want[0, 9:].tolist() == free) == (rule == "long-ngrams")
    for use_cache in (True, False):
        assert torch.equal(generate(ours, ids, **options, use_cache=use_cache), want)


def test_padding_is_part_of_no_sequence_of_tokens(ours):
    short = PROMPTS[1]
    options = {"no_repeat_ngram_size": 2, "max_new_tokens": NEW}
    alone = generate(ours, [short], **options, bad_words_ids=[[0, 0]])[0, 3:]
    for pad in sorted({*alone.tolist(), *short}):
        got = generate(
            ours, **padded(pad=pad), **options, bad_words_ids=[[pad, short[0], short[1], short[2], 1], [0, 0]]
        )
        assert torch.equal(got[1, 9:], alone), pad


@pytest.fixture(scope="module")
def speaking(tmp_path_factory):
    """Kind of tokenizer -> (transformers' model and tokenizer, our model)."""

    @cache
    def build(kind):
        folder = tmp_path_factory.mktemp("checkpoint")
        backend = KINDS[kind]()
        backend.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        torch.manual_seed(0)
        sizes = SIZES | {"vocab_size": backend.get_vocab_size(), "num_hidden_layers": 1}
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
        theirs.save_pretrained(folder)
        return theirs, tokenizers_in(folder)[1], LigerLlama.from_pretrained(folder, progress=False).eval()

    return build


@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings(speaking, kind):
    """Rows end where those of transformers do: at texts that begin or end within tokens, or in the prompt."""
    theirs, tokenizer, ours = speaking(kind)
    backend = ours.tokenizer.backend
    prompts = [backend.encode(text).ids for text in ("the quick brown fox", "a tool")]
    T = max(map(len, prompts))
    batch = padded(prompts)
    options = {"max_new_tokens": NEW, "eos_token_id": [1], "pad_token_id": 0, "do_sample": True, "temperature": 2.0}
    pieces = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    others = [token for token, piece in enumerate(pieces) if "<" in piece or not piece.isascii()]
    options["suppress_tokens"] = others
    ends = set()
    for seed in range(4):
        torch.manual_seed(seed)
        free = theirs.generate(**batch, **options, top_k=0)
        texts = [tokenizer.decode(row[T:]) for row in free]
        prompt = tokenizer.decode(prompts[0])
        first = tokenizer.decode(free[0, T - 3 : T + 1])
        for strings in (
            [text[2:5] for text in texts],
            [texts[0][3:9], texts[1][-4:], "not there"],
            texts[1][6:7],
            [first[-4:], prompt[-3:]],
        ):
            torch.manual_seed(seed)
            want = theirs.generate(**batch, **options, top_k=0, stop_strings=strings, tokenizer=tokenizer)
            torch.manual_seed(seed)
            got = generate(ours, **batch, **options, stop_strings=strings)
            assert torch.equal(got, want), (strings, texts)
            ends.add(tuple((got[:, T:] == 0).sum(1).tolist()))
    assert len(ends) > 3
    torch.manual_seed(3)
    out = generate(ours, **batch, **options, stop_strings=strings, tokenizer=tokenizer, return_logprobs=True)
    assert torch.equal(out.sequences, want)
    assert "stop" in out.finish_reasons


def test_characters_of_several_tokens_end_a_row(speaking):
    _, _, ours = speaking("byte_level")
    tokenizer = ours.tokenizer
    said = tokenizer.backend.encode("so 世界🦙 it goes", add_special_tokens=False).ids
    prompt = tokenizer.backend.encode("Well, 世", add_special_tokens=False).ids

    def speak(ids, logits):
        step = ids.shape[1] - len(prompt)
        return torch.full_like(logits, -9.0).index_fill(1, torch.tensor(said[step]), 9.0)

    for stop, want in (("世", "so 世"), ("🦙", "so 世界🦙"), ("Well", "so 世界🦙 it goes")):
        ids = generate(ours, [prompt], max_new_tokens=len(said), logits_processor=speak, stop_strings=stop)[0]
        assert tokenizer.decode(ids[len(prompt) :]) == want


@pytest.mark.parametrize("text", ["世界🦙🦙 it", "\N{REPLACEMENT CHARACTER}é世\n\n界", "so 世界"])
def test_text_before_a_stop_string_is_cut_at_whole_characters(speaking, text):
    """A part of a character makes this decoder replace all bytes beside it, such as those of the string."""
    tokenizer = speaking("byte_fallback")[2].tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False)
    for begin in range(len(text)):
        stop = StopStrings([text[begin : begin + 2]], tokenizer)
        ended = [stop.completed_by_last(ids[max(end - stop.window, 0) : end]) for end in range(1, len(ids) + 1)]
        read = [tokenizer.decode(ids[:end], skip_special_tokens=False) for end in range(1, len(ids) + 1)]
        assert ended.index(True) == [stop.strings[0] in each for each in read].index(True), stop.strings


@pytest.mark.parametrize("least", [0, 1, 5, 12])
def test_rows_do_not_end_before_min_new_tokens(pair, least):
    theirs, ours = pair("gqa")
    free = theirs.generate(**padded(), max_new_tokens=NEW)[:, 9:]
    options = {"eos_token_id": free[:, 3].tolist(), "pad_token_id": 2, "max_new_tokens": NEW, "min_new_tokens": least}
    got = generate(ours, **padded(), **options)
    assert torch.equal(got, theirs.generate(**padded(), **options))
    ends = torch.isin(got[:, 9:], torch.tensor(options["eos_token_id"]))
    assert not ends[:, :least].any()
    assert ends[:, least:].any()


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "dynamic"])
def test_cached_logits_are_those_of_the_full_forward(pair, variant):
    """Prefill, single tokens and longer pieces after each other, with padding.

    Not for dynamic scaling, whose cached keys keep the frequencies of their time: see the comparison above.
    """
    _, ours = pair(variant)
    torch.manual_seed(1)
    ids = torch.randint(0, VOCAB, (3, 30))
    mask = padded()["attention_mask"]
    mask = torch.cat([mask, mask.new_ones(3, 21)], 1)
    for masks in (None, mask):
        positions = torch.arange(30)[None] if masks is None else (masks.cumsum(1) - 1).clamp_min(0)
        with torch.no_grad():
            full = ours(ids, attention_mask=masks, position_ids=positions).logits
            cache = DecodeCache(30)
            for piece in torch.arange(30).split([9, 1, 1, 5, 1, 12, 1]):
                end = piece[-1] + 1
                logits = ours(
                    ids[:, piece],
                    attention_mask=None if masks is None else masks[:, :end],
                    position_ids=positions[:, piece],
                    cache=cache,
                ).logits
                keep = torch.ones_like(piece).expand(3, -1) if masks is None else masks[:, piece]
                difference = (logits - full[:, piece])[keep.bool()]
                assert difference.abs().max() <= 1e-5 * full.abs().max()
        assert cache.length == 30


@pytest.mark.parametrize("original", [9, 16, 20])
def test_cached_keys_are_made_anew_where_longrope_switches(tmp_path, original):
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 3.0, 6.0, 9.0]}
    rope = _rope(rope_type="longrope", original_max_position_embeddings=original, **factors)
    torch.manual_seed(0)
    theirs = transformers.Phi3ForCausalLM(
        transformers.Phi3Config(**SIZES, **rope, original_max_position_embeddings=original)
    ).eval()
    theirs.save_pretrained(tmp_path)
    ours = AutoLigerModel.from_pretrained(tmp_path, progress=False)
    for inputs in ({"input_ids": torch.tensor(PROMPTS[:1])}, padded()):
        want = theirs.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        for use_cache in (True, False):
            assert torch.equal(generate(ours, **inputs, max_new_tokens=NEW, use_cache=use_cache), want)


def test_rows_do_not_depend_on_one_another(ours):
    alone = [generate(ours, [prompt], max_new_tokens=NEW)[0, len(prompt) :] for prompt in PROMPTS]
    stop = alone[1][2].item()  # the row in the middle ends early
    for order in ([0, 1, 2], [2, 1], [1, 0, 0, 2]):
        got = generate(ours, [PROMPTS[row] for row in order], max_new_tokens=NEW, eos_token_id=stop, pad_token_id=9)
        for tokens, row in zip(got[:, -NEW:], order, strict=True):
            ends = (alone[row] == stop).nonzero().flatten().tolist()
            end = ends[0] + 1 if ends else NEW
            assert torch.equal(tokens[:end], alone[row][:end])
            assert (tokens[end:] == 9).all()


# --- a cache that is kept --------------------------------------------------------------------------------------------


def counted(model, monkeypatch):
    """The number of tokens in each forward, in a list that grows."""
    sizes = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda ids, **inputs: sizes.append(ids.shape[1]) or forward(ids, **inputs))
    return sizes


def test_a_conversation_computes_only_what_is_new(ours, monkeypatch):
    sizes = counted(ours, monkeypatch)
    cache = DecodeCache(40)
    prompt = PROMPTS[0]
    first = generate(ours, [prompt], max_new_tokens=5, cache=cache)[0].tolist()
    assert cache.length == 13
    # The new tokens and the last; then two that follow these; then two others instead; then the last is run again.
    for more, computed in (([4, 8], 3), ([4, 8, 30, 31], 2), ([11, 12], 2), ([], 1)):
        asked = first + more
        sizes.clear()
        got = generate(ours, [asked], max_new_tokens=3, cache=cache)
        assert sizes[0] == computed
        assert cache.length == len(asked) + 2
        assert torch.equal(got, generate(ours, [asked], max_new_tokens=3))
    sizes.clear()
    assert torch.equal(
        generate(ours, [[1, 2]], max_new_tokens=3, cache=cache), generate(ours, [[1, 2]], max_new_tokens=3)
    )
    assert sizes[0] == 2  # nothing in common


def test_a_kept_cache_of_padded_rows(ours, monkeypatch):
    """Columns are compared: other padding, or another token in one row, cuts all rows."""
    cache = DecodeCache(40)
    first = generate(ours, **padded(), max_new_tokens=4, cache=cache)
    mask = torch.nn.functional.pad(padded()["attention_mask"], (0, 6), value=1)
    sizes = counted(ours, monkeypatch)
    asked = torch.cat([first, torch.tensor([[4, 8], [9, 9], [30, 1]])], 1)
    other = asked.clone()
    other[1, 11] = (asked[1, 11] + 1) % VOCAB
    for ids, start in ((asked, 12), (other, 11)):
        sizes.clear()
        got = generate(ours, ids, attention_mask=mask, max_new_tokens=4, cache=cache)
        assert sizes[0] == ids.shape[1] - start
        assert torch.equal(got, generate(ours, ids, attention_mask=mask, max_new_tokens=4))
    sizes.clear()
    got = generate(ours, ids[:, :8], max_new_tokens=2, cache=cache)
    assert sizes[0] == 8  # no padding now, so that the first tokens differ
    assert torch.equal(got, generate(ours, ids[:, :8], max_new_tokens=2))


def test_a_kept_cache_with_several_continuations_and_with_stream(ours, monkeypatch):
    cache = DecodeCache(30)
    steps = stream(ours, PROMPTS[:1], max_new_tokens=8, cache=cache)
    said = [int(next(steps)) for _ in range(4)]
    del steps  # what was computed is there
    sizes = counted(ours, monkeypatch)
    asked = [PROMPTS[0] + said + [3]]
    options = {"max_new_tokens": 4, "do_sample": True, "num_return_sequences": 3, "seed": 5}
    got = generate(ours, asked, **options, cache=cache)
    assert sizes[0] == 2
    assert torch.equal(got, generate(ours, asked, **options))
    sizes.clear()
    more = torch.cat([got, got[:, :2]], 1)
    assert torch.equal(generate(ours, more, max_new_tokens=2, cache=cache), generate(ours, more, max_new_tokens=2))
    assert sizes[0] == 3


@pytest.mark.parametrize("limit", [6, 11, 15, 40])
def test_a_kept_cache_where_frequencies_are_dynamic(limit, monkeypatch):
    torch.manual_seed(0)
    sizes = SIZES | VARIANTS["dynamic"] | {"max_position_embeddings": limit}
    ours = AutoLigerModel.from_config({**sizes, "model_type": "llama"}).eval()
    cache, computed = DecodeCache(60), counted(ours, monkeypatch)
    asked, starts = generate(ours, PROMPTS[:1], max_new_tokens=8, cache=cache), []
    for ids in (torch.cat([asked, asked[:, 3:9]], 1), asked[:, :11], asked[:, :14], asked[:, :7]):
        computed.clear()
        got = generate(ours, ids, max_new_tokens=8, cache=cache, return_logprobs=True)
        starts.append(ids.shape[1] - computed[0])
        want = generate(ours, ids, max_new_tokens=8, return_logprobs=True)
        assert torch.equal(got.sequences, want.sequences)
        torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-4, atol=1e-5)
    assert any(starts) == (limit == 40)


@pytest.mark.parametrize("original", [9, 12, 20])
def test_a_kept_cache_where_longrope_switches(original):
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 3.0, 6.0, 9.0]}
    rope = _rope(rope_type="longrope", original_max_position_embeddings=original, **factors)
    torch.manual_seed(0)
    ours = AutoLigerModel.from_config(
        {**SIZES, "model_type": "phi3", **rope, "original_max_position_embeddings": original}
    )
    cache = DecodeCache(40)
    asked = generate(ours, PROMPTS[:1], max_new_tokens=5, cache=cache)
    for ids in (asked, torch.cat([asked, asked[:, 3:9]], 1), asked[:, :11], asked[:, :6]):
        assert torch.equal(generate(ours, ids, max_new_tokens=3, cache=cache), generate(ours, ids, max_new_tokens=3))


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_a_forward_that_fails_leaves_a_kept_cache_as_it_was(ours):
    """For example one that runs out of memory: a retry may have fewer rows or other weights."""
    options = {"max_new_tokens": 3, "eos_token_id": []}
    cache, ids = DecodeCache(40), torch.tensor([PROMPTS[0]] * 3)

    def fail(*_):
        raise RuntimeError("out of memory")

    def refused(model, prompts):
        handle = model.layers[-1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model.generate(prompts, cache=cache, **options)
        handle.remove()

    refused(ours, ids)
    for again in (ids[:1], ids[:2]):
        assert torch.equal(ours.generate(again, cache=cache, **options), ours.generate(again, **options))
        cache.length = 0
    half = LigerLlama.from_config(LlamaConfig(**SIZES), dtype=torch.bfloat16).eval()
    refused(half, ids)
    assert torch.equal(half.generate(ids, cache=cache, **options), half.generate(ids, **options))


def test_lists_of_prompts_are_padded(ours):
    want = generate(ours, **padded(pad=30), max_new_tokens=4)
    assert torch.equal(generate(ours, PROMPTS, max_new_tokens=4, pad_token_id=30), want)
    tensors = [torch.tensor(prompt, dtype=torch.int32) for prompt in PROMPTS]
    got = generate(ours, tensors, max_new_tokens=4, pad_token_id=30)
    assert got.dtype == torch.int64
    assert torch.equal(got, want)
    for single in (PROMPTS[1], torch.tensor(PROMPTS[1])):
        assert torch.equal(generate(ours, single, max_new_tokens=4)[0, 3:], want[1, 9:])


def test_what_comes_with_prompts_goes_to_the_models_device():
    elsewhere = SimpleNamespace(device=torch.device("meta"), prompt_inputs=("pixel_values", "second_per_grid_ts"))
    found = select_inputs(elsewhere, {"pixel_values": torch.ones(2), "second_per_grid_ts": [1.0], "top_k": 3})
    assert found["pixel_values"].device == elsewhere.device
    assert found["second_per_grid_ts"] == [1.0]
    assert len(found) == 2


def test_arrays_and_masks_as_lists(ours):
    batch = padded()
    want = generate(ours, **batch, max_new_tokens=3)
    for kind in (torch.Tensor.numpy, torch.Tensor.tolist):
        mask = kind(batch["attention_mask"])
        assert torch.equal(generate(ours, batch["input_ids"], attention_mask=mask, max_new_tokens=3), want)
    ids = batch["input_ids"].numpy()
    assert torch.equal(generate(ours, ids, max_new_tokens=3, pad_token_id=0), want)
    assert torch.equal(generate(ours, ids[0], max_new_tokens=3), want[:1])


def test_padding_tokens_without_a_mask(pair):
    """As transformers has it: the padding token is padding, unless it ends rows too."""
    theirs, ours = pair("gqa")
    ids = padded(pad=30)["input_ids"]
    ids[0, 4] = 30  # also in the middle of a prompt
    results = []
    for eos in (None, 30, [2, 30]):
        want = theirs.generate(ids, max_new_tokens=8, pad_token_id=30, eos_token_id=eos)
        got = generate(ours, ids, max_new_tokens=8, pad_token_id=30, eos_token_id=[] if eos is None else eos)
        assert torch.equal(got, want)
        results.append(got)
    assert not torch.equal(results[0], results[1])


def test_any_nonzero_mask_is_a_mask(ours):
    batch = padded()
    want = generate(ours, **batch, max_new_tokens=4)
    for mask in (batch["attention_mask"].bool(), batch["attention_mask"].float() * 0.5):
        assert torch.equal(generate(ours, batch["input_ids"], attention_mask=mask, max_new_tokens=4), want)


# --- sampling --------------------------------------------------------------------------------------------------------


def random_logits():
    torch.manual_seed(3)
    logits = torch.randn(16, VOCAB) * 3
    logits[3] = logits[3].round()  # ties
    logits[4] = 0.0
    logits[5, 7] = 100.0  # certain
    logits[6, 5:] = -torch.inf
    logits[7] = torch.tensor([0.0] * 4 + [-torch.inf] * (VOCAB - 4))  # quarters: sums that equal 1 − p
    return logits


@pytest.mark.parametrize("k", [1, 2, 5, VOCAB - 1, VOCAB, 1000])
def test_top_k_is_that_of_transformers(k):
    logits = random_logits()
    before = logits.clone()
    assert torch.equal(keep_top_k(logits, k), transformers.TopKLogitsWarper(k)(None, logits))
    assert torch.equal(logits, before)
    assert (keep_top_k(logits, k).isfinite().sum(1) >= min(k, 4)).all()


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.9, 0.999])
def test_top_p_is_that_of_transformers(p):
    logits = random_logits()
    before = logits.clone()
    assert torch.equal(keep_top_p(logits, p), transformers.TopPLogitsWarper(p)(None, logits))
    assert torch.equal(logits, before)
    assert keep_top_p(logits, p).isfinite().any(1).all()


@pytest.mark.parametrize("p", [1e-9, 0.05, 0.3, 1.0])
def test_min_p_is_that_of_transformers(p):
    logits = random_logits()
    before = logits.clone()
    assert torch.equal(keep_min_p(logits, p), transformers.MinPLogitsWarper(p)(None, logits))
    assert torch.equal(logits, before)
    assert keep_min_p(logits, p).isfinite().any(1).all()


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.9, 0.999])
def test_typical_p_is_that_of_transformers(p):
    logits = random_logits()
    before = logits.clone()
    want = transformers.TypicalLogitsWarper(p)(None, logits)
    assert torch.equal(keep_typical_p(logits, p), want)
    assert torch.equal(logits, before)
    dropped = want.gather(1, logits.argmax(1, keepdim=True)).isinf()
    assert dropped.any() == (p <= 0.5)  # unlike the others it may drop the most likely token


@pytest.mark.parametrize("epsilon", [1e-30, 3e-4, 0.02, 0.3, 0.999])
@pytest.mark.parametrize("keep", [keep_epsilon, keep_eta])
def test_cutoffs_are_those_of_transformers(keep, epsilon):
    logits = random_logits()
    before = logits.clone()
    warper = transformers.EpsilonLogitsWarper if keep is keep_epsilon else transformers.EtaLogitsWarper
    want = warper(epsilon)(None, logits)
    assert torch.equal(keep(logits, epsilon), want)
    assert torch.equal(logits, before)
    assert want.isfinite().any(1).all()
    assert not torch.equal(want, logits)  # all but one token of row 5 are less likely than 1e-43


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("keep", [keep_top_p, keep_typical_p])
@pytest.mark.parametrize("p", [0.0001, 0.1, 0.5, 0.9, 0.999])
def test_filters_are_the_same_where_sums_have_a_fixed_order(p, keep, device):
    logits = random_logits().to(device)
    want = keep(logits, p)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(keep(logits, p), want)
        assert torch.equal(keep(logits[:1], p), want[:1])
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_repetition_penalty_is_that_of_transformers(penalty):
    logits = random_logits()
    before = logits.clone()
    ids = torch.randint(0, VOCAB, (16, 12))
    seen = torch.zeros(16, VOCAB, dtype=torch.bool).scatter_(1, ids, True)
    want = transformers.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    assert torch.equal(penalize_repetition(logits, seen, penalty), want)
    assert torch.equal(logits, before)


def test_filters_are_applied_in_the_order_of_transformers(ours, monkeypatch):
    """The probabilities that the draw is made from, exactly."""
    drawn = []
    monkeypatch.setattr(sampling, "draw", lambda p, generator: drawn.append(p) or draw(p, generator))
    logits = random_logits()
    ids = torch.randint(0, VOCAB, (16, 12))
    words = [[20], [30], [ids[0, -1].item(), 40], [*ids[1, -2:].tolist(), 2]]
    bias = transformers.SequenceBiasLogitsProcessor({(13,): 2.5})
    options = resolved(
        ours, do_sample=True, temperature=0.7, top_k=9, top_p=0.8, min_p=0.1, typical_p=0.7, epsilon_cutoff=0.18,
        eta_cutoff=0.2, repetition_penalty=1.3, no_repeat_ngram_size=2, bad_words_ids=words, suppress_tokens=[50],
        min_new_tokens=1, eos_token_id=[30, 31], logits_processor=bias,
    )  # fmt: skip
    tokens = Sampler(options, ids, VOCAB)(ids, ids, logits)
    want = logits.clone()
    for process in (
        transformers.RepetitionPenaltyLogitsProcessor(1.3),
        transformers.NoRepeatNGramLogitsProcessor(2),
        transformers.NoBadWordsLogitsProcessor(words, [30, 31]),
        transformers.MinNewTokensLengthLogitsProcessor(12, 1, [30, 31]),
        transformers.SuppressTokensLogitsProcessor([50]),
        bias,
        transformers.TemperatureLogitsWarper(0.7),
        transformers.TopKLogitsWarper(9),
        transformers.TopPLogitsWarper(0.8),
        transformers.MinPLogitsWarper(0.1),
        transformers.TypicalLogitsWarper(0.7),
        transformers.EpsilonLogitsWarper(0.18),
        transformers.EtaLogitsWarper(0.2),
    ):
        want = process(ids, want)
    want = want.softmax(1)
    assert torch.equal(drawn[0], want)
    assert (want.gather(1, tokens[:, None]) > 0).all()


def test_draws_are_those_of_multinomial():
    for probabilities in (random_logits().softmax(1), torch.rand(3, VOCAB)):
        got, want = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
        for _ in range(20):
            assert torch.equal(draw(probabilities, got), torch.multinomial(probabilities, 1, generator=want)[:, 0])
    with pytest.raises(ValueError, match="logits must be numbers below infinity, and finite for some token"):
        draw(torch.full((2, 3), -torch.inf).softmax(1), None)


SAMPLING = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 4},
    {"top_p": 0.7},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
    {"min_p": 0.1},
    {"typical_p": 0.6},
    {"epsilon_cutoff": 0.02, "eta_cutoff": 0.01},
    {"temperature": 1.3, "min_p": 0.02, "typical_p": 0.9, "top_k": 30, "no_repeat_ngram_size": 2},
]


@pytest.mark.parametrize("options", SAMPLING, ids=lambda options: "-".join(options) or "plain")
def test_sampled_tokens_are_those_of_transformers(pair, options):
    """Both draw from the global generator in the same way."""
    theirs, ours = pair("gqa")
    ids = torch.tensor(PROMPTS[:1] * 8)
    torch.manual_seed(11)
    want = theirs.generate(ids, max_new_tokens=NEW, do_sample=True, **{"top_k": 0, **options})
    torch.manual_seed(11)
    assert torch.equal(generate(ours, ids, max_new_tokens=NEW, do_sample=True, **options), want)
    assert len({tuple(row) for row in want.tolist()}) > 1


def test_a_generator_makes_the_draw_reproducible(ours):
    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return generate(ours, PROMPTS, max_new_tokens=NEW, do_sample=True, generator=generator)

    state = torch.get_rng_state()
    first = draw(5)
    torch.rand(3)
    assert torch.equal(draw(5), first)
    assert not torch.equal(draw(6), first)
    torch.set_rng_state(state)
    draw(7)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_row_with_a_seed_depends_on_no_other(ours):
    options = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.5, "top_k": 20}
    seeds = [2**40 + 5, 5, 7]
    alone = [
        generate(ours, [prompt], **options, seed=[seed])[0, len(prompt) :]
        for prompt, seed in zip(PROMPTS, seeds, strict=True)
    ]
    state = torch.get_rng_state()
    for order in ([0, 1, 2], [2, 1], [1, 0, 0, 2]):
        got = generate(ours, [PROMPTS[row] for row in order], **options, seed=[seeds[row] for row in order])
        assert all(torch.equal(tokens, alone[row]) for tokens, row in zip(got[:, -NEW:], order, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    for other in (5 + 2**40 + 1, 2**41 + 5):
        assert not torch.equal(generate(ours, PROMPTS[:1], **options, seed=other)[0, 9:], alone[0])
    several = generate(ours, PROMPTS[:2], **options, seed=9, num_return_sequences=2)
    for row in range(4):
        prompt = PROMPTS[row // 2]
        assert torch.equal(several[row, -NEW:], generate(ours, [prompt], **options, seed=9 + row)[0, len(prompt) :])


@pytest.mark.parametrize("seed", [None, 3])
def test_low_temperatures_take_the_most_likely_token(ours, seed):
    want = generate(ours, PROMPTS, max_new_tokens=NEW)
    for temperature in (1e-9, 1e-31, 1e-39, 1e-45):
        options = {"do_sample": True, "temperature": temperature, "seed": seed, "top_p": 0.9}
        assert torch.equal(generate(ours, PROMPTS, max_new_tokens=NEW, **options), want)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_without_probabilities_are_an_error(ours, value, seed):
    def spoil(ids, logits):
        return torch.full_like(logits, value)

    with pytest.raises(ValueError, match="logits must be numbers below infinity"):
        generate(ours, PROMPTS, max_new_tokens=1, do_sample=True, seed=seed, logits_processor=spoil)


def test_draws_with_seeds_have_the_probabilities_of_the_logits(ours):
    """Pearson's test of 40,000 draws for a few steps: about 1e-6 of fair samples have a larger sum."""
    logits = random_logits()[:1]
    sampler = Sampler(resolved(ours, do_sample=True, temperature=1.3, seed=100), torch.zeros(40000, 1).long(), VOCAB)
    p = (logits[0] / 1.3).softmax(0)
    common = p > 5e-4
    for step in (0, 1, 1000):
        counts = torch.bincount(sampler.draw(logits.expand(40000, -1), step), minlength=VOCAB)
        wanted = 40000 * p[common]
        assert ((counts[common] - wanted) ** 2 / wanted).sum() < 125  # up to 53 tokens
    noise = exponential_noise(torch.arange(200), 3, 5000)
    assert noise.min() > 0
    assert abs(noise.mean() - 1) < 5e-3
    assert abs(noise.var() - 1) < 2e-2
    flat = torch.stack([noise[:-1, :-1], noise[1:, :-1], noise[:-1, 1:]]).flatten(1)  # neighbours are independent
    assert (flat.corrcoef() - torch.eye(3)).abs().max() < 5e-3


@pytest.mark.gpu
def test_seeds_mean_the_same_on_every_device():
    seeds = torch.tensor([0, 5, 2**40 + 5])
    torch.testing.assert_close(exponential_noise(seeds.cuda(), 3, 5000).cpu(), exponential_noise(seeds, 3, 5000))


def test_several_continuations_of_each_prompt(pair, use_cache, monkeypatch):
    """The same tokens as of repeated prompts, which both draw in the same order; the cache computes a prompt once."""
    theirs, ours = pair("gqa")
    options = {"max_new_tokens": 6, "do_sample": True, "top_k": 0, "num_return_sequences": 3, "use_cache": use_cache}
    sizes = []
    forward = ours.forward
    monkeypatch.setattr(ours, "forward", lambda ids, **inputs: sizes.append(ids.shape) or forward(ids, **inputs))
    for inputs in (padded(), {"input_ids": torch.tensor(PROMPTS[:1])}):
        B, T = inputs["input_ids"].shape
        torch.manual_seed(12)
        want = theirs.generate(**inputs, **options)
        torch.manual_seed(12)
        assert torch.equal(generate(ours, **inputs, **options), want)
        torch.manual_seed(12)
        assert torch.equal(torch.stack(list(stream(ours, **inputs, **options)), 1), want[:, T:])
        assert len({tuple(row) for row in want.tolist()}) == len(want) == 3 * B
        assert sizes[0] == ((B, T) if use_cache else (3 * B, T))
        assert sizes[1] == ((3 * B, 1) if use_cache else (3 * B, T + 1))
        sizes.clear()


# --- log-probabilities and processors --------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_log_probabilities_are_those_of_the_model_itself(pair, sampled):
    """The logits before any option give them, as transformers returns them."""
    theirs, ours = pair("gqa")
    options = {"max_new_tokens": NEW, "repetition_penalty": 1.3, "suppress_tokens": [4], "pad_token_id": 2}
    options |= {"do_sample": True, "temperature": 0.5, "top_k": 5} if sampled else {"do_sample": False}
    torch.manual_seed(6)
    free = theirs.generate(**padded(), **options)[:, 9:].tolist()
    options["eos_token_id"] = next(token for token in free[0][4:] if token not in free[2])
    torch.manual_seed(6)
    want = theirs.generate(**padded(), **options, return_dict_in_generate=True, output_logits=True)
    torch.manual_seed(6)
    got = generate(ours, **padded(), **options, return_logprobs=True)
    assert torch.equal(got.sequences, want.sequences)
    new = want.sequences[:, 9:]
    stops = new == options["eos_token_id"]
    ended = stops.cumsum(1) - stops.long() > 0
    assert ended.any()
    logits = torch.stack(want.logits, 1)
    logprobs = logits.log_softmax(2).gather(2, new[..., None])[..., 0].masked_fill(ended, 0)
    torch.testing.assert_close(got.logprobs, logprobs, rtol=1e-4, atol=1e-5)
    assert got.finish_reasons == tuple("stop" if any(row) else "length" for row in stops.tolist())
    assert (got.finish_reasons[0], got.finish_reasons[2]) == ("stop", "length")
    torch.manual_seed(6)
    assert torch.equal(generate(ours, **padded(), **options), got.sequences)


def test_processors_of_transformers_and_functions(pair):
    theirs, ours = pair("gqa")
    batch = padded()
    processors = [transformers.SequenceBiasLogitsProcessor({(5,): 3.0, (5, 17): 4.0}), lambda ids, x: x - ids[:, -1:]]
    options = {"max_new_tokens": NEW, "repetition_penalty": 1.2}
    for processor in (transformers.LogitsProcessorList(processors), processors, processors[:1]):
        want = theirs.generate(**batch, **options, logits_processor=processor)
        assert torch.equal(generate(ours, **batch, **options, logits_processor=processor), want)
        assert not torch.equal(want, theirs.generate(**batch, **options))
    assert torch.equal(generate(ours, **batch, **options, logits_processor=processors[0]), want)


def test_a_processor_may_overwrite_what_it_gets(ours):
    seen = []

    def forbid(ids, logits):
        seen.append(ids.clone())
        logits[:, : VOCAB // 2] = -torch.inf
        return logits

    plain = generate(ours, **padded(), max_new_tokens=4, suppress_tokens=[*range(VOCAB // 2)], return_logprobs=True)
    got = generate(ours, **padded(), max_new_tokens=4, logits_processor=forbid, return_logprobs=True)
    assert torch.equal(got.sequences, plain.sequences)
    assert torch.equal(got.logprobs, plain.logprobs)
    assert torch.equal(seen[-1], got.sequences[:, :-1])  # padding included


# --- defaults --------------------------------------------------------------------------------------------------------


def resolved(model, **given):
    return resolve(model, 1, given)


def test_generation_config_gives_the_defaults(ours, monkeypatch):
    stored = {"do_sample": True, "temperature": 0.6, "top_k": 7, "top_p": 0.9, "repetition_penalty": 1.1}
    stored |= {
        "min_p": 0.01,
        "typical_p": 0.95,
        "epsilon_cutoff": 1e-4,
        "eta_cutoff": 1e-3,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 1,
    }
    stored |= {"bad_words_ids": [[9, 8]], "suppress_tokens": [11]}
    tokens = {"eos_token_id": [4, 5], "pad_token_id": 6}
    configure(ours, monkeypatch, **stored, **tokens, transformers_version="5.0.0", num_beams=1, max_length=20)
    options = resolved(ours)
    assert {name: getattr(options, name) for name in (*stored, *tokens)} == {**stored, **tokens}
    given = {"temperature": 2.0, **UNFILTERED}
    assert given.keys() == stored.keys() - {"do_sample"} | {"stop_strings"}
    given |= {"eos_token_id": [], "pad_token_id": 8}
    options = resolved(ours, **given)
    assert options.stop_strings is None
    del given["stop_strings"]
    assert {name: getattr(options, name) for name in given} == given
    greedy = resolved(ours, do_sample=False)
    assert (greedy.do_sample, greedy.temperature, greedy.top_k, greedy.repetition_penalty) == (False, 1.0, 0, 1.1)
    assert (greedy.epsilon_cutoff, greedy.eta_cutoff) == (0.0, 0.0)
    assert (greedy.min_p, greedy.typical_p, greedy.no_repeat_ngram_size) == (0.0, 1.0, 3)

    torch.manual_seed(2)
    want = generate(ours, PROMPTS, max_new_tokens=NEW, **stored, **tokens)
    torch.manual_seed(2)
    assert torch.equal(generate(ours, PROMPTS, max_new_tokens=NEW), want)


def test_a_call_may_be_shorter_than_the_checkpoint_asks_for(ours, monkeypatch):
    configure(ours, monkeypatch, min_new_tokens=9)
    assert generate(ours, PROMPTS, max_new_tokens=2).shape == (3, 11)


def test_without_generation_config(ours, monkeypatch):
    monkeypatch.setattr(ours, "assets", {})
    options = resolved(ours)
    assert (options.do_sample, options.temperature, options.top_k, options.top_p) == (False, 1.0, 0, 1.0)
    assert (options.repetition_penalty, options.eos_token_id, options.pad_token_id) == (1.0, [], None)


@pytest.mark.parametrize(
    ("config", "stored", "given", "eos", "pad"),
    [
        ({"eos_token_id": 4, "pad_token_id": 6}, {}, {}, [4], 6),
        ({"eos_token_id": [4, 5]}, {}, {}, [4, 5], 4),
        ({"eos_token_id": 4}, {"eos_token_id": [7, 8]}, {}, [7, 8], 7),
        ({"eos_token_id": 4, "pad_token_id": 6}, {"eos_token_id": None, "pad_token_id": -1}, {}, [4], 6),
        ({"eos_token_id": 4}, {"eos_token_id": 7}, {"eos_token_id": 9}, [9], 9),
        ({"eos_token_id": 0}, {"eos_token_id": 7}, {"eos_token_id": 0}, [0], 0),
        ({"eos_token_id": 4}, {"pad_token_id": 0}, {"eos_token_id": torch.tensor([9, 3])}, [9, 3], 0),
        ({"eos_token_id": 4, "pad_token_id": -1}, {}, {}, [4], 4),
        ({"eos_token_id": 4}, {}, {"eos_token_id": []}, [], None),
    ],
)
def test_where_stop_and_padding_tokens_come_from(config, stored, given, eos, pad):
    model = LigerLlama.from_config(LlamaConfig(**{**SIZES, **config}))
    model.assets = {"generation_config.json": json.dumps(stored).encode()}
    options = resolved(model, **given)
    assert (options.eos_token_id, options.pad_token_id) == (eos, pad)


def test_what_is_without_effect_is_named(ours, monkeypatch):
    with pytest.warns(UserWarning, match=r"{'temperature': 0.5} has no effect without do_sample=True"):
        generate(ours, PROMPTS, max_new_tokens=1, temperature=0.5, top_k=0, top_p=1.0)
    configure(ours, monkeypatch, num_beams=4, top_h=0.1, min_length=0, min_p=0.1)
    with pytest.warns(UserWarning, match=r"generation_config.json: .*and ignored: num_beams, top_h\."):
        generate(ours, PROMPTS, max_new_tokens=1)


# --- stream and state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_stream_equals_generate(ours, sampled):
    batch = padded()
    free = generate(ours, **batch, max_new_tokens=NEW)[:, 9:]
    options = {"max_new_tokens": NEW, "do_sample": sampled, "eos_token_id": [free[0, 3].item(), free[1, 7].item()]}
    options["eos_token_id"].append(free[2, 5].item())
    torch.manual_seed(4)
    want = generate(ours, **batch, **options)
    torch.manual_seed(4)
    steps = []
    for tokens in stream(ours, **batch, **options):
        assert tokens.shape == (3,)
        steps.append(tokens.clone())
        tokens.zero_()  # what the consumer does with it changes nothing
    assert torch.equal(torch.stack(steps, 1), want[:, 9:])


def test_stream_computes_on_demand_but_checks_at_once(ours, monkeypatch):
    calls = []
    forward = ours.forward

    def counted(ids, **options):
        calls.append(ids.shape[1])
        assert not torch.is_grad_enabled()
        return forward(ids, **options)

    monkeypatch.setattr(ours, "forward", counted)
    steps = stream(ours, PROMPTS, max_new_tokens=5)
    assert calls == []
    next(steps)
    next(steps)
    assert calls == [9, 1]
    with pytest.raises(ValueError, match="max_new_tokens"):
        stream(ours, PROMPTS, max_new_tokens=0)


def test_the_models_methods(ours):
    want = generate(ours, **padded(), max_new_tokens=3)
    assert torch.equal(ours.generate(**padded(), max_new_tokens=3), want)
    assert torch.equal(torch.stack(list(ours.stream(**padded(), max_new_tokens=3)), 1), want[:, 9:])


def test_modes_are_restored(ours):
    """Each module's own training mode, and gradients: also between the steps, and after an error."""
    model = LigerLlama.from_config(LlamaConfig(**{**SIZES, "attention_dropout": 0.9}))
    model.load_state_dict(ours.state_dict())
    model.train()
    model.layers[1].eval()
    before = [module.training for module in model.modules()]

    def unchanged():
        return [module.training for module in model.modules()] == before and torch.is_grad_enabled()

    steps = stream(model, PROMPTS, max_new_tokens=NEW)
    tokens = []
    for step in steps:
        assert unchanged()
        tokens.append(step)
    assert torch.equal(torch.stack(tokens, 1), generate(ours, PROMPTS, max_new_tokens=NEW)[:, 9:])  # no dropout
    assert unchanged()

    def fail(*_):
        raise RuntimeError("stop here")

    handle = model.norm.register_forward_pre_hook(fail)
    model.norm.add, add = fail, model.norm.add
    with pytest.raises(RuntimeError, match="stop here"):
        generate(model, PROMPTS, max_new_tokens=1)
    handle.remove()
    model.norm.add = add
    assert unchanged()


def test_a_model_that_threads_share_is_in_eval_mode_until_the_last_of_them_ends(ours):
    model = LigerLlama.from_config(LlamaConfig(**SIZES)).train()
    model.layers[1].eval()
    before = [module.training for module in model.modules()]
    first, second = (evaluating(list(model.modules())) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not any(module.training for module in model.modules())
    second.__exit__(None, None, None)
    assert [module.training for module in model.modules()] == before


def test_tokens_can_be_trained_on(ours):
    tokens = generate(ours, PROMPTS, max_new_tokens=3)
    ours(tokens, labels=tokens).loss.backward()
    ours.zero_grad()


def test_the_prompts_are_left_alone(ours):
    batch = padded()
    copies = {name: tensor.clone() for name, tensor in batch.items()}
    generate(ours, **batch, max_new_tokens=3, repetition_penalty=1.2)
    assert all(torch.equal(batch[name], copy) for name, copy in copies.items())


# --- errors ----------------------------------------------------------------------------------------------------------

IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])


def filled_cache(rows, *names):
    cache = DecodeCache(9)
    cache.length = 1
    cache.extra = dict.fromkeys(names, torch.zeros(rows, 9))
    return cache


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, r"max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": 2.5}, r"max_new_tokens must be an integer, got 2.5"),
        ({"max_new_tokens": None}, r"max_new_tokens must be an integer, got None"),
        ({"temperature": "0.7", "do_sample": True}, r"temperature must be a number, got '0.7'"),
        ({"top_k": 2.5, "do_sample": True}, r"top_k must be an integer, got 2.5"),
        ({"eos_token_id": "a"}, r"eos_token_id must be a token or a list of tokens, got 'a'"),
        ({"eos_token_id": [3, 1.5]}, r"eos_token_id must be a token or a list of tokens, got \[3, 1.5\]"),
        ({"temperature": 0.0}, r"temperature must be positive, got 0.0.*do_sample=False"),
        ({"temperature": -1.0, "do_sample": True}, r"temperature must be positive, got -1.0"),
        ({"top_k": -1, "do_sample": True}, r"top_k must be at least 1, got -1"),
        ({"top_p": 0.0, "do_sample": True}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.01, "do_sample": True}, r"top_p must be in \(0, 1\], got 1.01"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be positive, got 0.0"),
        ({"min_p": 1.1, "do_sample": True}, r"min_p must be in \[0, 1\], got 1.1"),
        ({"typical_p": 0.0, "do_sample": True}, r"typical_p must be in \(0, 1\], got 0.0"),
        ({"epsilon_cutoff": 1.0, "do_sample": True}, r"epsilon_cutoff must be in \[0, 1\), got 1.0"),
        ({"eta_cutoff": -0.1, "do_sample": True}, r"eta_cutoff must be in \[0, 1\), got -0.1"),
        ({"no_repeat_ngram_size": -1}, r"no_repeat_ngram_size must be an integer of at least 0, got -1"),
        ({"min_new_tokens": 1.5}, r"min_new_tokens must be an integer of at least 0, got 1.5"),
        ({"min_new_tokens": 3}, r"min_new_tokens must be at most max_new_tokens \(2\), got 3"),
        ({"num_return_sequences": 0}, r"num_return_sequences must be an integer of at least 1, got 0"),
        ({"num_return_sequences": 2}, r"num_return_sequences must be 1 without do_sample, got 2.*do_sample=True"),
        ({"bad_words_ids": [[3], []]}, r"bad_words_ids must be lists of tokens in \[0, 53\), got \[\[3\], \[\]\]"),
        ({"bad_words_ids": [3, 4]}, r"bad_words_ids must be lists of tokens in \[0, 53\), got \[3, 4\]"),
        ({"suppress_tokens": 3}, r"suppress_tokens must be tokens in \[0, 53\), got 3"),
        ({"suppress_tokens": [VOCAB]}, r"suppress_tokens must be tokens in \[0, 53\), got \[53\]"),
        ({"logits_processor": 5}, r"logits_processor must be a function or a list of functions, got int"),
        (
            {"logits_processor": [len, "no"]},
            r"logits_processor must be a function .* got builtin_function_or_method, str",
        ),
        ({"logits_processor": lambda ids, x: x[:, 1:]}, r"must return logits \[2, 53\], got \[2, 52\]"),
        ({"logits_processor": lambda ids, x: None}, r"must return logits \[2, 53\], got NoneType"),
        ({"pad_token_id": VOCAB}, r"pad_token_id must be in \[0, 53\), got 53"),
        ({"pad_token_id": -1}, r"pad_token_id must be in \[0, 53\), got -1"),
        (
            {"generator": SimpleNamespace(device=torch.device("cuda:0"))},
            r"generator must be on cpu .* got cuda:0",
        ),
        ({"stop_strings": ["a", ""]}, r"stop_strings must be a text .* none of them empty, got \['a', ''\]"),
        ({"stop_strings": 3}, r"stop_strings must be a text or a list of texts, none of them empty, got \[3\]"),
        ({"stop_strings": "a"}, r"stop_strings need a tokenizer, got a model without one\. Pass tokenizer="),
        ({"cache": DecodeCache(3)}, r"cache must have room for 4 tokens, got 3\. Make it larger"),
        ({"cache": DecodeCache(9), "use_cache": False}, r"cache must be a DecodeCache, without use_cache=False"),
        ({"cache": 9}, r"cache must be a DecodeCache, .* got int"),
        ({"cache": filled_cache(3)}, r"cache must be new or filled by generate, got one that a forward filled"),
        ({"cache": filled_cache(3, TOKENS)}, r"cache must have a row for each of the 2 prompts, got 3"),
        ({"seed": 1.5}, r"seed must be an integer in \[0, 2\*\*62\) or a list of them, got 1.5"),
        ({"seed": -1}, r"seed must be an integer in \[0, 2\*\*62\) or a list of them, got -1"),
        (
            {"seed": [1, 2, 3]},
            r"seed must be one integer, or one for each of the 2 rows .* got \[1, 2, 3\]",
        ),
        ({"seed": 1, "generator": torch.Generator()}, r"seed and generator exclude each other, got both"),
        ({"input_ids": IDS[:, :0]}, r"input_ids must hold at least one token per row, got \[2, 0\]"),
        ({"input_ids": IDS[:0]}, r"input_ids must hold at least one token per row, got \[0, 3\]"),
        ({"input_ids": []}, r"list of prompts with at least one token each, got shapes \[\]"),
        ({"input_ids": [[3], []]}, r"list of prompts with at least one token each, got shapes \[\[1\], \[0\]\]"),
        ({"input_ids": [IDS, IDS]}, r"list of prompts .* got shapes \[\[2, 3\], \[2, 3\]\]"),
        ({"input_ids": None}, r"input_ids must be prompts or a tensor of them, got NoneType"),
        ({"input_ids": IDS[None]}, r"input_ids must be \[B, T\], got \[1, 2, 3\]"),
        ({"input_ids": IDS.float()}, r"input_ids must be integers, got torch.float32"),
        ({"input_ids": IDS > 3}, r"input_ids must be integers, got torch.bool"),
        ({"input_ids": [[3, VOCAB]]}, r"input_ids must be in \[0, 53\), got 3 to 53"),
        ({"input_ids": [[3, -1]]}, r"input_ids must be in \[0, 53\), got -1 to 3"),
        ({"attention_mask": torch.ones(2, 4)}, r"attention_mask must be \[2, 3\] like input_ids, got \[2, 4\]"),
        ({"attention_mask": torch.ones(3)}, r"attention_mask must be \[2, 3\] like input_ids, got \[3\]"),
        ({"input_ids": [[3]], "attention_mask": torch.ones(1, 1)}, r"attention_mask needs a tensor of prompts"),
        ({"attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}, r"padding at the end of rows \[1\].*on the left"),
        ({"attention_mask": torch.tensor([[0, 0, 0], [1, 1, 1]])}, r"padding at the end of rows \[0\]"),
        ({"pad_token_id": 8}, r"padding at the end of rows \[1\].*attention_mask if the padding tokens are meant"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_arguments(ours, arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(ours, **{"input_ids": IDS, "max_new_tokens": 2, **arguments})


def test_unknown_options(ours):
    for method in (ours.generate, ours.stream):
        with pytest.raises(TypeError, match=r"'max_length' = 3\. Pass max_new_tokens, which does not count the prompt"):
            method(PROMPTS, max_new_tokens=1, max_length=3)
        with pytest.raises(TypeError, match=r"argument 'lenght' = 3\. It takes max_new_tokens, attention_mask"):
            method(PROMPTS, max_new_tokens=1, lenght=3)
        with pytest.raises(TypeError, match="max_new_tokens"):
            method(PROMPTS)


def test_none_leaves_an_option_to_the_checkpoint(ours):
    names = Options.__annotations__.keys() - PromptInputs.__annotations__.keys()
    assert resolved(ours, **dict.fromkeys(names)) == resolved(ours)


@pytest.mark.parametrize("content", [b"{", b"[1]"])
def test_bad_generation_config(ours, monkeypatch, content):
    monkeypatch.setattr(ours, "assets", {"generation_config.json": content})
    with pytest.raises(ValueError, match=r"generation_config.json: must be"):
        generate(ours, PROMPTS, max_new_tokens=1)


# --- on an accelerator -----------------------------------------------------------------------------------------------


def cuda_model(dtype):
    torch.manual_seed(0)
    return LigerLlama.from_config(LlamaConfig(**{**SIZES, "hidden_size": 64}), dtype=dtype, device="cuda")


@pytest.mark.gpu
def test_padded_batches_on_the_gpu():
    """Padding goes through flex_attention, a prompt alone through SDPA: the same tokens."""
    model = cuda_model(torch.float32)
    generator = torch.Generator().manual_seed(0)
    for lengths in ([9, 3, 6], [130, 1, 64, 200], [17, 40]):
        prompts = [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]
        together = generate(model, prompts, max_new_tokens=NEW)
        assert together.device.type == "cuda"
        uncached = generate(model, prompts, max_new_tokens=NEW, use_cache=False)
        assert torch.equal(together, uncached)
        for row, prompt in enumerate(prompts):
            alone = generate(model, prompt, max_new_tokens=NEW)
            assert torch.equal(together[row, -NEW:], alone[0, -NEW:]), row


@pytest.mark.gpu
def test_padded_batches_on_the_gpu_in_bf16():
    """Every token is the likeliest of an fp32 model with the same weights, up to bf16's rounding."""
    model = cuda_model(torch.bfloat16)
    exact = cuda_model(torch.float32)
    exact.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    prompts = [[*range(3, 3 + length)] for length in (9, 3, 40)]
    together = generate(model, prompts, max_new_tokens=NEW)
    for row, prompt in enumerate(prompts):
        ids = together[row : row + 1, -len(prompt) - NEW :]
        assert ids[0, : len(prompt)].tolist() == prompt
        with torch.no_grad():
            logits = exact(ids).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        # Rounding reaches 0.04 with weights like these, a row that sees its padding 2.
        assert (logits.amax(1) - chosen).max() <= 0.15 * logits.std()
