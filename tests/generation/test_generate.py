"""Decoding against transformers: same random weights, same tokens."""

import json
from functools import cache
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from liger_models import AutoLigerModel
from liger_models.arch.llama import LigerLlama, LlamaConfig
from liger_models.generation.loop import generate, stream
from liger_models.generation.options import select_inputs
from liger_models.generation.stop_strings import StopStrings
from liger_models.layers.kv_cache import DecodeCache

from ..late import transformers
from ..text.folders import KINDS, SPECIAL
from ..text.folders import pair as tokenizers_in
from .models import NEW, PROMPTS, SIZES, VARIANTS, VOCAB, _rope, every_variant, padded


@pytest.mark.cases(12)
@every_variant
def test_greedy_tokens_are_those_of_transformers(pair, variant, use_cache):
    theirs, ours = pair(variant)
    options = {"max_new_tokens": NEW, "use_cache": use_cache, "do_sample": False}
    one = torch.tensor(PROMPTS[:1])
    want = theirs.generate(one, **options)
    assert len(set(want[0, one.shape[1] :].tolist())) > 5  # a constant continuation would test little
    assert torch.equal(generate(ours, one, **options), want)
    rotary = ours.rotary["default"]
    with mock.patch.object(rotary, "by_document", False):  # transformers takes the length of the longest row
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


@pytest.mark.cases(4)
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


@pytest.mark.cases(4)
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
    options = {"max_new_tokens": NEW, "use_cache": True}
    for options["use_cache"] in (True, False):
        # Each row as alone, and with all frequencies by the longest row as in transformers.
        rows = generate(ours, **padded(), **options)[:, -NEW:]
        for row, prompt in zip(rows, PROMPTS, strict=True):
            want = theirs.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
            assert torch.equal(row, want[0, -NEW:])
        with mock.patch.object(ours.rotary["default"], "by_document", False):
            want = theirs.generate(**padded(), max_new_tokens=NEW, do_sample=False)
            assert torch.equal(generate(ours, **padded(), **options), want)


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
