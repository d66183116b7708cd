"""``generate`` of `liger_models.hf`: the engine beside the loop of transformers, and when that loop runs instead."""

import copy
import threading
import time

import pytest
import torch

from liger_models.adapters import unpack_projections
from liger_models.generation import graphs
from liger_models.generation.model_state import describe
from liger_models.layers import recompute

from ..arch.families import FIRST_CASES, LIMIT, error, take_longest_row, tokens
from ..late import Late, transformers

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers'
generate = Late("liger_models.hf.generate")
processors = Late("transformers.generation.logits_process")
llama = pytest.mark.parametrize("hf", [("llama", "gqa")], indirect=True, ids="-".join)
every_family = pytest.mark.parametrize("hf", FIRST_CASES, indirect=True, ids="-".join)
T = 12


@pytest.fixture
def deferred(monkeypatch):
    """On the CPU, too, criteria are asked after several steps."""
    monkeypatch.setattr("liger_models.hf.generate.ACCELERATORS", ("cpu",))
    return generate.STEPS_PER_CHECK


def without_eos(*models):
    for model in models:
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0


def padded(ids):
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return mask


def word_tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({chr(48 + n): n for n in range(101)}, unk_token="0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="0")


@pytest.mark.cases(5)
@every_family
def test_greedy_tokens_of_every_family(hf, reasons):
    arch, variant, theirs, ours = hf
    theirs.__dict__.pop("forward", None)  # with router logits transformers cannot use its cache
    theirs.config.get_text_config().output_router_logits = False
    without_eos(theirs, ours)
    decoder = ours.model.decoder
    take_longest_row(decoder)
    ids = tokens(arch, variant, 3, T)
    free = theirs.generate(ids, max_new_tokens=8, do_sample=False)
    eos = [int(free[0, T + 2]), int(free[2, T + 4])]
    for options in (
        {},
        {"attention_mask": padded(ids), "eos_token_id": eos, "min_new_tokens": 2},
        {"attention_mask": padded(ids), "repetition_penalty": 1.5, "suppress_tokens": eos[:1]},
        {"no_repeat_ngram_size": 2, "bad_words_ids": [[eos[1]], [eos[0], eos[1]]]},
        {"use_cache": bool(decoder.prompt_inputs)},  # the forward refuses placeholders that the model has generated
    ):
        options |= {"max_new_tokens": 8, "do_sample": False}
        assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options)), options
    assert reasons == [None] * 5


WARPERS = {
    "none": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "typical_p": {"typical_p": 0.5},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "eta_cutoff": {"eta_cutoff": 0.1},
    "repetition_penalty": {"repetition_penalty": 2.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[n] for n in range(40)]},
    "together": {
        "temperature": 1.3, "top_k": 60, "top_p": 0.97, "min_p": 0.01, "typical_p": 0.95, "epsilon_cutoff": 0.002,
        "eta_cutoff": 0.004, "repetition_penalty": 1.2, "suppress_tokens": [5, 7],
    },
    "top_h, which the engine does not have": {"top_h": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("name", WARPERS)
@llama
def test_the_distribution_of_draws(hf, name, reasons):
    """10,000 draws after one prompt have the probabilities that transformers' processors leave."""
    arch, variant, theirs, ours = hf
    without_eos(theirs, ours)
    ids = tokens(arch, variant, 1, T)
    spread = theirs(ids).logits[0, -1].std().item()
    for model in (theirs, ours):
        model.get_output_embeddings().weight.data.mul_(1.5 / spread)
    options = {"max_new_tokens": 1, "do_sample": True, "top_k": 0} | WARPERS[name]
    scores = theirs.generate(ids, **options, return_dict_in_generate=True, output_scores=True).scores[0]
    want = scores.softmax(1)[0].double()
    torch.manual_seed(1)
    draws = ours.generate(ids, **options, num_return_sequences=10_000)[:, -1]
    assert reasons == [None]
    counts = draws.bincount(minlength=len(want)).double()
    assert not counts[want == 0].any()
    if name not in ("none", "temperature", "repetition_penalty"):
        assert 1 < (want > 0).sum() < len(want)

    # Pearson's statistic over tokens with at least five expected draws and one group of the others.
    is_common = want * 10_000 >= 5
    expected = torch.cat([want[is_common], want[~is_common].sum()[None]]) * 10_000
    observed = torch.cat([counts[is_common], counts[~is_common].sum()[None]])
    kept = expected > 0
    statistic = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = int(kept.sum()) - 1
    assert statistic <= freedom + 4 * (2 * freedom) ** 0.5


@llama
def test_sampling_with_a_seed(hf, reasons):
    """The random numbers are consumed as in transformers, so that the same seed gives the same tokens."""
    arch, variant, theirs, ours = hf
    without_eos(theirs, ours)
    ids = tokens(arch, variant, 2, T)
    options = {"attention_mask": padded(ids), "max_new_tokens": 9, "do_sample": True, "num_return_sequences": 3}
    options |= {"eos_token_id": [*range(20)], **WARPERS["together"]}
    runs = []
    for model in (theirs, ours, ours):
        transformers.set_seed(7)
        runs.append(model.generate(ids, **options))
    assert torch.equal(runs[1], runs[0])
    assert torch.equal(runs[2], runs[1])
    assert not torch.equal(ours.generate(ids, **options), runs[1])
    assert reasons == [None] * 3


def test_options_of_processors():
    """Each warper is an option of the engine. A list in another order is not."""
    chain, ids = transformers.LogitsProcessorList, torch.zeros(2, 3, dtype=torch.long)

    def options(*items, mask=None):
        return generate.options_of(chain(items), ids, mask, [1], 9)

    temperature, top_k = processors.TemperatureLogitsWarper(0.5), processors.TopKLogitsWarper(3)
    assert options(temperature, top_k) == {"temperature": 0.5, "top_k": 3}
    assert options() == {}
    assert options(top_k, temperature) is None
    assert options(top_k, top_k) is None
    assert options(processors.TopKLogitsWarper(3, min_tokens_to_keep=2)) is None
    assert options(processors.TopPLogitsWarper(0.5, filter_value=-1.0)) is None
    assert options(processors.LogitNormalization()) is None
    shortest = processors.MinLengthLogitsProcessor(5, [1]), processors.MinNewTokensLengthLogitsProcessor(3, 1, [1])
    assert options(*shortest) == {"min_new_tokens": 2}
    assert options(processors.MinLengthLogitsProcessor(5, [2])) is None
    assert options(processors.NoBadWordsLogitsProcessor([[9]])) is None
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    assert options(processors.NoRepeatNGramLogitsProcessor(2)) == {"no_repeat_ngram_size": 2}
    assert options(processors.NoRepeatNGramLogitsProcessor(2), mask=mask) is None
    penalty = processors.RepetitionPenaltyLogitsProcessor
    assert options(penalty(1.5)) == {"repetition_penalty": 1.5}
    assert options(penalty(1.5, torch.tensor([0, 1])), mask=mask) == {"repetition_penalty": 1.5}
    assert options(penalty(1.5, torch.tensor([1, 1])), mask=mask) is None
    assert options(penalty(1.5, 2)) is None


@llama
def test_processors_that_the_engine_calls(hf, reasons):
    """Those of a user, of transformers, and the usual ones beside padding or in another order."""
    arch, variant, theirs, ours = hf
    without_eos(theirs, ours)
    ids = tokens(arch, variant, 2, T)
    calls = []

    class Odd(transformers.LogitsProcessor):
        def __call__(self, input_ids, scores):
            calls.append(input_ids.view(-1).shape[0] // len(input_ids))
            return scores.masked_fill(torch.arange(scores.shape[1]) % 2 == 0, -float("inf"))

    for options in (
        {"logits_processor": [Odd()]},
        {"logits_processor": [processors.TopKLogitsWarper(9)], "temperature": 1.7},
        {"no_repeat_ngram_size": 1, "attention_mask": padded(ids)},
        {"forced_eos_token_id": 3, "renormalize_logits": True},
        {"guidance_scale": 1.5},
        {"prefix_allowed_tokens_fn": lambda row, ids: [5, 6, 7 + row]},
    ):
        options |= {"max_new_tokens": 6, "do_sample": True}
        runs = []
        for model in (theirs, ours):
            torch.manual_seed(0)
            runs.append(model.generate(ids, **options))
        assert torch.equal(*runs), options
    assert calls == 2 * [*range(T, T + 6)]
    assert reasons == [None] * 6


@llama
def test_scores_logits_and_the_cache(hf, reasons):
    arch, variant, theirs, ours = hf
    without_eos(theirs, ours)
    ids = tokens(arch, variant, 2, T)
    options = {"attention_mask": padded(ids), "max_new_tokens": 5, "do_sample": True, "top_k": 20, "temperature": 0.7}
    options |= {
        "return_dict_in_generate": True,
        "output_logits": True,
        "output_scores": True,
        "num_return_sequences": 2,
    }
    outputs = []
    for model in (theirs, ours):
        torch.manual_seed(3)
        outputs.append(model.generate(ids, **options))
    want, got = outputs
    assert type(got) is type(want)
    assert got.keys() == want.keys()
    assert torch.equal(got.sequences, want.sequences)
    assert len(got.scores) == len(got.logits) == 5
    for one, other in zip(got.logits, want.logits, strict=True):
        assert error(one, other) <= LIMIT
    for one, other in zip(got.scores, want.scores, strict=True):
        assert torch.equal(one.isinf(), other.isinf())
        assert error(one.clamp(min=-99), other.clamp(min=-99)) <= LIMIT
    transitions = [
        model.compute_transition_scores(out.sequences, out.scores) for model, out in ((theirs, want), (ours, got))
    ]
    assert error(*transitions) <= LIMIT

    # The cache is computed when it is used.
    assert got.past_key_values.get_seq_length() == T + 4
    mask = torch.nn.functional.pad(padded(ids).repeat_interleave(2, 0), (0, 5), value=1)
    following = {"max_new_tokens": 4, "do_sample": False, "attention_mask": mask}
    again = [
        model.generate(out.sequences, past_key_values=out.past_key_values, **following)
        for model, out in ((theirs, want), (ours, got))
    ]
    assert torch.equal(*again)
    assert reasons == [None, "past_key_values"]

    plain = ours.generate(ids, return_dict_in_generate=True, max_new_tokens=2, use_cache=False, do_sample=False)
    assert plain.scores is plain.logits is plain.past_key_values is None


@pytest.mark.cases(4)
@every_family
def test_going_on_with_the_returned_cache(hf, reasons):
    ours = hf[-1]
    without_eos(ours)
    ids = tokens(*hf[:2], 2, T)
    options = {"do_sample": False, "use_cache": True}
    want = ours.generate(ids, max_new_tokens=7, **options)
    first = ours.generate(ids, max_new_tokens=3, return_dict_in_generate=True, **options)
    cache, given = first.past_key_values, first.sequences.clone()
    first.sequences.fill_(3)  # the cache does not depend on what the caller does with the sequences
    assert cache.get_seq_length() == T + 2
    if bool((given == ours.generation_config.pad_token_id).any()):  # would be masked without a mask
        options["attention_mask"] = torch.ones_like(given)
    assert torch.equal(ours.generate(given, past_key_values=cache, max_new_tokens=4, **options), want)
    assert reasons == [None, None, "past_key_values"]


class Recorded:
    """A criterion that ends a row at a token, and remembers the lengths that it was asked about."""

    def __init__(self, ends):
        self.ends, self.lengths, self.scores = ends, [], []

    def __call__(self, input_ids, scores, **_):
        input_ids.view(-1)  # contiguous, as in transformers
        self.lengths.append(input_ids.shape[1])
        self.scores.append(scores and len(scores))
        return input_ids[:, -1] == self.ends.to(input_ids)


@pytest.mark.parametrize("with_eos", [True, False])
@llama
def test_stopping_criteria(hf, reasons, deferred, with_eos):
    """Tokens, padding and the questions that a criterion gets are those of transformers."""
    arch, variant, theirs, ours = hf
    without_eos(theirs, ours)
    ids = tokens(arch, variant, 3, T)
    free = theirs.generate(ids, max_new_tokens=2 * deferred, do_sample=False)
    ends = torch.stack([free[0, T + 2], free[1, T + deferred], free[2, T + 1]])
    options = {"max_new_tokens": 2 * deferred, "do_sample": False, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    if with_eos:
        options["eos_token_id"] = [int(free[0, T + 4]), int(free[2, T + 1])]
    runs = []
    for model in (theirs, ours):
        criterion = Recorded(ends)
        output = model.generate(ids, stopping_criteria=[criterion], **options)
        runs.append((output.sequences, len(output.scores), criterion.lengths, criterion.scores))
    (want, *theirs_calls), (got, *ours_calls) = runs
    assert torch.equal(got, want)
    assert ours_calls == theirs_calls
    assert reasons == [None]
    # In the middle of the second group of steps.
    assert T + 1 < want.shape[1] < T + 2 * deferred


@llama
def test_the_time_limit(hf, reasons, deferred, monkeypatch):
    """The tokens that were computed within the time are kept."""
    _, _, _, ours = hf
    without_eos(ours)
    ids = tokens("llama", "gqa", 2, T)
    assert ours.generate(ids, max_new_tokens=4 * deferred, max_time=60.0).shape[1] == T + 4 * deferred
    assert ours.generate(ids, max_new_tokens=4 * deferred, max_time=0.0).shape[1] == T + deferred
    now = iter(range(100))
    monkeypatch.setattr(time, "time", lambda: next(now))
    assert ours.generate(ids, max_new_tokens=4 * deferred, max_time=1.5).shape[1] == T + 2 * deferred
    assert reasons == [None] * 3


@llama
def test_stop_strings_and_pipelines(hf, reasons, deferred):
    arch, variant, theirs, ours = hf
    without_eos(theirs, ours)
    tokenizer = word_tokenizer()
    ids = tokens(arch, variant, 2, T)
    options = {"max_new_tokens": 20, "do_sample": False, "tokenizer": tokenizer}
    free = theirs.generate(ids, **options)
    stops = [tokenizer.decode(free[0, T + 2 : T + 4]), tokenizer.decode(free[1, T + 9 : T + 11])]
    want = theirs.generate(ids, stop_strings=stops, **options)
    assert torch.equal(ours.generate(ids, stop_strings=stops, **options), want)
    assert want.shape[1] < free.shape[1]

    texts = ["4AB", "Zab1"]
    answers = [
        transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)(
            texts, max_new_tokens=6, do_sample=False, batch_size=2
        )
        for model in (theirs, ours)
    ]
    assert answers[0] == answers[1]
    assert set(reasons) == {None}


@pytest.mark.parametrize("by_criterion", [True, False])
@llama
def test_streamers(hf, reasons, deferred, capsys, by_criterion):
    arch, variant, theirs, ours = hf
    without_eos(theirs, ours)
    tokenizer = word_tokenizer()
    ids = tokens(arch, variant, 1, T)
    end = theirs.generate(ids, max_new_tokens=9, do_sample=False)[:, -2]
    texts = []
    for model in (theirs, ours):
        options = {"max_new_tokens": 12, "do_sample": False}
        options |= {"stopping_criteria": [Recorded(end)]} if by_criterion else {"eos_token_id": end.item()}
        tokens_of = model.generate(ids, streamer=transformers.TextStreamer(tokenizer), **options)
        printed = capsys.readouterr().out
        streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True)
        thread = threading.Thread(target=model.generate, args=(ids,), kwargs={"streamer": streamer, **options})
        thread.start()
        texts.append((tokens_of.tolist(), printed, "".join(streamer)))
        thread.join()
    assert texts[0] == texts[1]
    assert texts[1][2]
    assert reasons == [None] * 2


def hooked(model):
    model.model.register_forward_hook(lambda *_: None)


def replaced(model):
    forward = model.forward
    model.forward = lambda *args, **options: forward(*args, **options)


def replaced_in_a_class(model):
    class Derived(type(model)):
        def prepare_inputs_for_generation(self, *args, **options):
            return super().prepare_inputs_for_generation(*args, **options)

    model.__class__ = Derived


def with_padding_inside(ids):
    mask = padded(ids)
    mask[0, 5] = 0
    return mask


FALLBACKS = {
    "output_hidden_states": (None, lambda ids: {"output_hidden_states": True, "return_dict_in_generate": True}),
    "past_key_values": (None, lambda ids: {"past_key_values": transformers.DynamicCache()}),
    "prefill_chunk_size": (None, lambda ids: {"prefill_chunk_size": 5}),
    "synced_gpus": (None, lambda ids: {"synced_gpus": True}),
    "the argument inputs_embeds": (None, lambda ids: {"inputs_embeds": torch.ones(2, T, 64)}),
    "an attention_mask with other padding": (None, lambda ids: {"attention_mask": with_padding_inside(ids)}),
    "hooks of LigerModel": (hooked, lambda ids: {}),
    "a replaced or compiled forward of LlamaForCausalLM": (replaced, lambda ids: {}),
    "prepare_inputs_for_generation of": (replaced_in_a_class, lambda ids: {}),
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("reason", FALLBACKS)
@llama
def test_when_the_loop_of_transformers_runs(hf, reason, reasons, monkeypatch):
    """It gives the same tokens. A line of the log, not a warning, says why it runs."""
    arch, variant, theirs, ours = copy.deepcopy(hf)
    without_eos(theirs, ours)
    change, options_for = FALLBACKS[reason]
    ids = tokens(arch, variant, 2, T)
    options = {"max_new_tokens": 5, "do_sample": False} | options_for(ids)
    if reason == "synced_gpus":
        pytest.importorskip("torch.distributed")
        monkeypatch.setattr(type(ours), "_has_unfinished_sequences", lambda self, done, *_, **__: not done)
        monkeypatch.setattr(type(theirs), "_has_unfinished_sequences", lambda self, done, *_, **__: not done)
    if "inputs_embeds" in options:
        options["inputs_embeds"] = theirs.get_input_embeddings()(ids).detach()
    want = theirs.generate(ids, **copy.deepcopy(options))
    if change is not None:
        change(ours)
    lines = []
    monkeypatch.setattr(generate.logger, "debug", lines.append)
    got = ours.generate(ids, **options)
    want, got = (getattr(output, "sequences", output) for output in (want, got))
    assert torch.equal(got, want)
    (found,) = reasons
    assert reason in found
    assert lines == [f"generate: the loop of transformers runs, because of {found}."]


@llama
def test_other_ways_of_generating_are_reported(hf, reasons, monkeypatch):
    ours = hf[-1]
    without_eos(ours)
    ids, lines = tokens("llama", "gqa", 1, T), []
    monkeypatch.setattr(generate.logger, "debug", lines.append)
    options = {"max_new_tokens": 4, "do_sample": False}
    ours.generate(ids, num_beams=2, **options)
    want = ours.generate(ids, **options)
    assert torch.equal(ours.generate(ids, prompt_lookup_num_tokens=2, **options), want)
    assert torch.equal(ours.generate(ids, assistant_model=copy.deepcopy(ours), **options), want)
    assert [line.partition("because of ")[2] for line in lines][:2] == ["num_beams.", "drafts of an assistant."]
    assert {line.partition("because of ")[2] for line in lines[2:]} == {"drafts of an assistant.", "is_assistant."}
    ours.generation_config.pad_token_id = None
    with pytest.raises(ValueError, match="pad_token_id must be given with a stopping criterion that has stop tokens"):
        ours.generate(ids, stopping_criteria=[transformers.EosTokenCriteria(5)], **options)


@llama
def test_positions_of_the_caller(hf, reasons):
    arch, variant, theirs, ours = hf
    without_eos(theirs, ours)
    ids = tokens(arch, variant, 2, T)
    positions = torch.arange(T).expand(2, T) + torch.tensor([[0], [5]])
    for chosen in ({"position_ids": positions}, {"position_ids": positions[1:], "attention_mask": padded(ids)}):
        options = {"max_new_tokens": 6, "do_sample": False} | chosen
        assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))
    assert reasons == [None, None]


def test_equal_prompts_are_computed_once():
    ids = torch.tensor([[1, 2], [1, 2], [1, 2], [1, 2], [3, 2], [3, 2]])
    assert generate.count_repeats(ids, None) == 2
    assert generate.count_repeats(ids[:4], None) == 4
    assert generate.count_repeats(ids[1:], None) == 1
    assert generate.count_repeats(ids[:1], None) == 1
    mask = torch.ones_like(ids)
    assert generate.count_repeats(ids, mask) == 2
    mask[1] = torch.tensor([0, 1])
    assert generate.count_repeats(ids, mask) == 1


@llama
def test_groups_of_equal_prompts(hf, reasons, monkeypatch):
    """As GRPO passes them. The engine runs each prompt once, and the answers differ."""
    arch, variant, theirs, ours = hf
    without_eos(theirs, ours)
    ids = tokens(arch, variant, 2, T)
    sizes = []
    original = type(ours.model.decoder).forward
    monkeypatch.setattr(
        type(ours.model.decoder),
        "forward",
        lambda self, ids, *x, **y: sizes.append(len(ids)) or original(self, ids, *x, **y),
    )
    options = {"attention_mask": padded(ids).repeat_interleave(4, 0), "max_new_tokens": 6, "do_sample": True}
    runs = []
    for model in (theirs, ours):
        torch.manual_seed(0)
        runs.append(model.generate(ids.repeat_interleave(4, 0), **options))
    assert torch.equal(*runs)
    assert sizes == [2] + 5 * [8]
    assert len(runs[1][:4].unique(dim=0)) > 1


@llama
def test_training_between_two_calls(hf, reasons):
    """In train mode, with new weights, under inference mode, with an edited configuration."""
    arch, variant, theirs, ours = copy.deepcopy(hf)
    without_eos(theirs, ours)
    ids = tokens(arch, variant, 2, T)
    options = {"max_new_tokens": 6, "do_sample": False}
    first = ours.generate(ids, **options)
    ours.train()
    with torch.no_grad():
        for model in (theirs, ours):
            model.get_output_embeddings().weight.data.neg_()
            model.config.rms_norm_eps = 0.5
    theirs.load_state_dict(theirs.state_dict())
    for norm in (module for module in theirs.modules() if hasattr(module, "variance_epsilon")):
        norm.variance_epsilon = 0.5
    want = theirs.generate(ids, **options)
    assert torch.equal(ours.generate(ids, **options), want)
    assert not torch.equal(first, want)
    assert all(module.training for module in ours.modules())
    with torch.inference_mode():
        assert torch.equal(ours.generate(ids, **options), want)
    assert reasons == [None] * 3


@llama
@pytest.mark.parametrize("outputs", [("log_probs",), ("log_probs", "entropy", "is_top1")], ids="-".join)
def test_models_in_mixed_precision(hf, reasons, monkeypatch, outputs):
    """Trainers of TRL generate with a model whose forward has a loss of TRL and the casts of Accelerate around it."""
    accelerate = pytest.importorskip("accelerate")
    trl = pytest.importorskip("trl.trainer.utils")
    ours = copy.deepcopy(hf[-1])
    without_eos(ours)
    ids = tokens("llama", "gqa", 2, T)
    options = {"max_new_tokens": 6, "do_sample": False}
    want = ours.generate(ids, **options)
    trl.add_fused_lm_head(ours, outputs=outputs)
    for state in (accelerate.state.AcceleratorState, accelerate.state.PartialState):  # not that of other tests
        monkeypatch.setattr(state, "_shared_state", {})
    prepared = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare_model(ours)
    assert "forward" in vars(prepared)
    assert torch.equal(prepared.generate(ids, **options), want)
    replaced(prepared)
    prepared.generate(ids, **options)
    assert reasons[:2] == [None, None]
    assert "a replaced or compiled forward" in reasons[2]


@llama
def test_adapters_of_peft(hf, reasons, tmp_path):
    """They generate without dropout, whatever the mode is. Switching them off and merging them have an effect."""
    peft = pytest.importorskip("peft")
    arch, variant, theirs, ours = hf
    without_eos(theirs, ours)
    ids = tokens(arch, variant, 2, T)
    options = {"input_ids": ids, "max_new_tokens": 6, "do_sample": False}
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.5)
    adapted = peft.get_peft_model(unpack_projections(ours), config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3)
    got = adapted.train().generate(**options)
    assert adapted.training
    with adapted.disable_adapter():
        assert torch.equal(adapted.generate(**options), theirs.generate(**options))
    adapted.save_pretrained(tmp_path)
    reloaded = peft.PeftModel.from_pretrained(theirs, tmp_path).eval()
    want = reloaded.generate(**options)
    assert torch.equal(got, want)
    assert torch.equal(adapted.eval().generate(**options), want)
    assert torch.equal(adapted.merge_and_unload().generate(**options), want)
    assert reasons == [None] * 4


@llama
def test_steps_with_adapters_of_peft_are_captured(hf, monkeypatch):
    """The hook that puts PEFT's modules into the model runs once before the steps. Other hooks prevent graphs."""
    peft = pytest.importorskip("peft")
    ours = hf[-1]
    decoder = ours.model.decoder
    monkeypatch.setattr(graphs, "use_triton", lambda _: True)
    monkeypatch.setattr(type(decoder), "device", torch.device("cuda"))
    assert graphs.can_capture(decoder)
    adapted = peft.get_peft_model(
        unpack_projections(ours), peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    )
    assert graphs.can_capture(decoder)
    before = describe(decoder)
    assert before == describe(decoder)
    with adapted.disable_adapter():
        assert before != describe(decoder)
    assert before == describe(decoder)

    # A module of the tree that PEFT replaces without notice.
    mlp = adapted.base_model.model.get_submodule("model.layers.0.mlp")
    layer = mlp.down_proj
    mlp.down_proj = layer.base_layer
    recompute.run_preparing_hooks(decoder)
    assert before != describe(decoder)
    assert not any(module is layer for module in decoder.modules())
    decoder.layers[0].register_forward_hook(lambda *_: None)
    assert not graphs.can_capture(decoder)


@llama
def test_errors_of_generate(hf):
    ours = hf[-1]
    ids = tokens("llama", "gqa", 2, T)
    with pytest.raises(ValueError, match=r"input_ids must be in \[0, "):
        ours.generate(ids + 10_000, max_new_tokens=2)
    with pytest.raises(ValueError, match="model_kwargs"):
        ours.generate(ids, max_new_tokens=2, no_such_option=1)
    with pytest.raises(ValueError, match="tokenizer"):
        ours.generate(ids, max_new_tokens=2, stop_strings=["a"])
    # transformers would shorten the configuration for its draft.
    layers = ours.config.num_hidden_layers
    with pytest.raises(ValueError, match="assistant_early_exit must be left out"):
        ours.generate(ids[:1], max_new_tokens=2, do_sample=False, assistant_early_exit=1)
    assert ours.config.num_hidden_layers == layers
    assert ours.generate(ids[:1], max_new_tokens=2, do_sample=False).shape == (1, T + 2)
