"""Where the options of a call come from, and what is refused."""

import json
from types import SimpleNamespace

import pytest
import torch

from liger_models.arch.llama import LigerLlama, LlamaConfig
from liger_models.generation.loop import generate
from liger_models.generation.options import HARMLESS, IDLE, READ, UNFILTERED, Options, PromptInputs
from liger_models.generation.prefix import TOKENS
from liger_models.layers.kv_cache import DecodeCache

from ..late import transformers
from .models import NEW, PROMPTS, SIZES, VOCAB, configure, resolved


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


def test_no_option_of_transformers_is_silent(ours, monkeypatch):
    theirs = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    assert theirs >= READ | HARMLESS
    for name in theirs - READ - HARMLESS | {"an_option_of_tomorrow"}:
        for value in (2, 0.5, [3], {"a": 3}):
            configure(ours, monkeypatch, **{name: value})
            with pytest.warns(UserWarning, match=rf"generation_config.json: not implemented and ignored: {name}\."):
                resolved(ours)
    for name in ("forced_bos_token_id", "forced_eos_token_id"):  # 0 is a token
        configure(ours, monkeypatch, **{name: 0})
        with pytest.warns(UserWarning, match=f"and ignored: {name}"):
            resolved(ours)
    configure(ours, monkeypatch, **dict.fromkeys(HARMLESS, 3), _from_model_config=True, **IDLE)
    resolved(ours)
    configure(ours, monkeypatch, sequence_bias={}, force_words_ids=[], token_healing=False, watermarking_config=None)
    resolved(ours)


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
        ({"max_new_tokens": torch.tensor(2.5)}, r"max_new_tokens must be an integer, got tensor\(2\.5\d*\)"),
        ({"max_new_tokens": torch.tensor([4, 5])}, r"max_new_tokens must be an integer, got tensor\(\[4, 5\]\)"),
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
        ({"input_ids": {"input_ids": [[5]]}}, r"input_ids must be prompts or a tensor of them, got dict"),
        ({"input_ids": "Hi"}, r"input_ids must be prompts or a tensor of them, got str"),
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
