"""Every family through `liger_models.hf`, beside transformers: forward, gradients, generation, checkpoints."""

import copy
import inspect
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import liger_models.hf
from liger_models.adapters import unpack_projections
from liger_models.arch import get_arch

from ..arch.families import (
    FIRST_CASES,
    LIMIT,
    VISION_CASES,
    assert_same_gradients,
    auto_class,
    cross_blocks,
    error,
    make_folder,
    of_each_kind,
    take_longest_row,
    text_sizes,
    tokens,
)
from ..late import Late, transformers

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers'
hf_auto = Late("liger_models.hf.auto")
every_family = pytest.mark.parametrize("hf", FIRST_CASES, indirect=True, ids="-".join)
one_family_of_each_kind = pytest.mark.parametrize("hf", of_each_kind(FIRST_CASES), indirect=True, ids="-".join)
llama = pytest.mark.parametrize("hf", [("llama", "gqa")], indirect=True, ids="-".join)
T = 12


def experts(arch: str, variant: str) -> bool:
    return "num_experts_per_tok" in text_sizes(arch, variant)


@pytest.mark.cases(11)
@every_family
def test_logits_loss_gradients_and_checkpoint(hf, tmp_path):
    arch, variant, theirs, ours = hf
    assert type(ours).__name__ == type(theirs).__name__
    assert type(ours.config) is type(theirs.config)
    ids = tokens(arch, variant, 2, T)
    want = theirs(ids, labels=ids, output_hidden_states=True)
    want.loss.backward()
    got = ours(ids, output_hidden_states=True)
    assert error(got.logits, want.logits) <= LIMIT
    # Transformers leaves out the states of blocks that attend to images.
    skipped = bool(cross_blocks(dict(ours.named_parameters())))
    hidden, their_hidden = got.hidden_states[-skipped:], want.hidden_states[-skipped:]
    if arch == "mamba2":  # in transformers, the state before the norm takes the place of the embeddings
        hidden, their_hidden = hidden[1:], (*their_hidden[:-2], their_hidden[-1])
    if arch == "gemma3n_text":  # ours are the first of the streams, and theirs all of them, without the normed output
        hidden, their_hidden = hidden[:-1], [streams[0] for streams in their_hidden[:-1]]
    for one, other in zip(hidden, their_hidden, strict=True):
        assert error(one, other) <= LIMIT
    body = ours.base_model(input_ids=ids, use_cache=False)
    assert body.past_key_values is None
    assert error(ours.get_output_embeddings()(body.last_hidden_state), want.logits) <= LIMIT
    assert (ours.lm_head.weight is ours.get_input_embeddings().weight) == ours.model.decoder.config.tie_word_embeddings

    assert ours(ids, labels=ids).logits.shape == want.logits.shape  # from_pretrained has called eval()
    out = ours.train()(ids, labels=ids)
    assert out.logits is None
    assert out.past_key_values is None
    assert error(out.loss, want.loss) <= LIMIT
    out.loss.backward()
    assert_same_gradients(ours.model.decoder, theirs)
    loss, *_ = ours(ids, labels=ids, return_dict=False)
    assert error(loss, want.loss) <= LIMIT

    ours.eval().save_pretrained(tmp_path)
    again = auto_class(arch).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    assert type(again) is type(theirs)
    assert error(again(ids).logits, want.logits) <= LIMIT
    file = load_file(tmp_path / "model.safetensors")
    fresh = type(ours)(ours.config)
    assert fresh.load_state_dict(file) == ([], [])
    assert all(map(torch.equal, fresh.parameters(), ours.parameters()))
    assert ours.load_state_dict(ours.state_dict()) == ([], [])


@pytest.mark.cases(5)
@one_family_of_each_kind
def test_generation(hf):
    arch, variant, theirs, ours = hf
    ids = tokens(arch, variant, 2, T)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    options = {"max_new_tokens": 6, "attention_mask": mask, "pad_token_id": 0}
    theirs.__dict__.pop("forward", None)  # with router logits transformers cannot use its cache
    theirs.config.get_text_config().output_router_logits = False
    take_longest_row(ours.model.decoder)
    for chosen in ({"do_sample": False}, {"num_beams": 3, "num_return_sequences": 2}, {"use_cache": False}):
        want = theirs.generate(ids, **options, **chosen)
        assert torch.equal(ours.generate(ids, **options, **chosen), want), chosen


@llama
def test_the_parts_of_generation(hf):
    """Streamers, criteria, processors, scores, a cache that is passed back, drafts."""
    arch, variant, theirs, ours = hf
    ids = tokens(arch, variant, 1, T)

    class Streamer(transformers.generation.BaseStreamer):
        def __init__(self):
            self.got, self.ended = [], False

        def put(self, value):
            self.got += value.flatten().tolist()

        def end(self):
            self.ended = True

    class AtLength(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            return torch.full((len(input_ids),), input_ids.shape[1] >= T + 5)

    streamer = Streamer()
    options = {"max_new_tokens": 9, "stopping_criteria": [AtLength()], "repetition_penalty": 1.3, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    want = theirs.generate(ids, **options)
    got = ours.generate(ids, streamer=streamer, **options)
    assert torch.equal(got.sequences, want.sequences)
    assert streamer.got == got.sequences.flatten().tolist()
    assert streamer.ended
    assert len(got.scores) == 5
    assert error(torch.stack(got.scores), torch.stack(want.scores)) <= LIMIT
    assert got.past_key_values.get_seq_length() == T + 4
    following = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(
        ours.generate(got.sequences, past_key_values=got.past_key_values, **following),
        theirs.generate(want.sequences, past_key_values=want.past_key_values, **following),
    )
    drafts = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(ours.generate(ids, **drafts), theirs.generate(ids, **drafts))
    assisted = ours.generate(ids, assistant_model=copy.deepcopy(ours), max_new_tokens=12, do_sample=False)
    assert torch.equal(assisted, theirs.generate(ids, max_new_tokens=12, do_sample=False))
    ours.generation_config.max_new_tokens = 2
    assert ours.generate(ids).shape == (1, T + 2)


@llama
def test_generation_with_a_tokenizer(hf):
    """generate needs it for texts that end a row, and passes it on to the forward."""
    arch, variant, theirs, ours = hf
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({chr(48 + n): n for n in range(101)}, unk_token="0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="0")
    ids = tokens(arch, variant, 2, T)
    options = {"max_new_tokens": 9, "do_sample": False, "tokenizer": tokenizer}
    free = ours.generate(ids, **options)
    stop = tokenizer.decode(free[0, T + 2 : T + 4])
    want = theirs.generate(ids, **options, stop_strings=[stop])
    assert torch.equal(ours.generate(ids, **options, stop_strings=[stop]), want)
    assert not torch.equal(want, free)


@pytest.mark.parametrize("unpacked", [True, False])
@llama
def test_prompts_that_peft_learns(hf, unpacked):
    """Generation, too, puts them before the prompt. Their mask has floats."""
    peft = pytest.importorskip("peft")
    arch, variant, theirs, _ = hf
    ours = copy.deepcopy(hf[-1])
    ids = tokens(arch, variant, 2, T)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    options = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    plain = ours.generate(**options)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    answers = []
    for model in (copy.deepcopy(theirs), unpack_projections(ours) if unpacked else ours):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, config).eval()
        with torch.no_grad():
            adapted.prompt_encoder["default"].embedding.weight.mul_(50)
        answers.append((adapted.generate(**options), adapted(input_ids=ids, attention_mask=mask).logits))
    (want, theirs_logits), (got, ours_logits) = answers
    assert torch.equal(got, want)
    assert not torch.equal(got, plain)
    assert error(ours_logits[:1], theirs_logits[:1]) <= LIMIT
    with pytest.raises(ValueError, match="values below 0, as in a mask that is added to scores"):
        hf[-1](ids, attention_mask=torch.where(mask == 1, 0.0, float("-inf")))
    for call in (hf[-1], hf[-1].generate):
        with pytest.raises(ValueError, match=r"got fractions.* pass mask > 0"):
            call(ids, attention_mask=torch.where(mask == 1, 1.0, 0.5))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap runs ops row by row
@pytest.mark.parametrize(
    "hf", [("llama", "gqa"), ("mixtral", "aux"), ("qwen3_next", "mixed")], indirect=True, ids="-".join
)
def test_gradients_of_each_row(hf):
    """By the transforms of torch.func, of the model in the door, and of the one in it."""
    arch, variant, _, ours = hf
    ids = tokens(arch, variant, 2, 9)
    for model in (ours.train(), ours.model.decoder):
        parameters = {name: each.detach() for name, each in model.named_parameters()}

        def loss(values, row, model=model):
            return torch.func.functional_call(model, values, (row[None],), {"labels": row[None]}).loss

        rows = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, ids)
        first = torch.func.grad(loss)(parameters, ids[0])
        for i, row in enumerate(ids):
            model.zero_grad()
            model(row[None], labels=row[None]).loss.backward()
            for name, parameter in model.named_parameters():
                want = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                assert error(rows[name][i], want) <= LIMIT, name
                assert i > 0 or error(first[name], want) <= LIMIT, name


@llama
def test_continuous_batching_is_refused(hf):
    """Its loop runs in a thread, where an error ends no call: the requests would come back empty."""
    ours = hf[-1]
    with pytest.raises(ValueError, match=r"continuous batching .* model.model.decoder.rollout"):
        ours.generate_batch([[5, 6, 7]], generation_config=transformers.GenerationConfig(max_new_tokens=2))


@pytest.mark.parametrize("hf", [("phi3", "longrope")], indirect=True, ids="-".join)
def test_generation_across_the_length_at_which_all_frequencies_change(hf):
    arch, variant, theirs, ours = hf
    length = theirs.config.original_max_position_embeddings
    ids = tokens(arch, variant, 1, length - 2)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))


@pytest.mark.parametrize(
    "hf", [("llama", "gqa"), ("gemma2", "gqa"), ("gemma4_text", "shared")], indirect=True, ids="-".join
)
def test_a_cache_of_transformers(hf):
    """It is filled in place, by a model with windows and one with shared keys as well."""
    arch, variant, theirs, ours = hf
    ids = tokens(arch, variant, 2, T)
    want = theirs(ids).logits
    for options in ({}, {"config": ours.config}):
        cache, logits = transformers.DynamicCache(**options), []
        for start, end in ((0, 5), (5, 6), (6, 7), (7, T)):
            out = ours(ids[:, start:end], past_key_values=cache)
            assert out.past_key_values is cache
            assert cache.get_seq_length() == end
            logits.append(out.logits)
        assert error(torch.cat(logits, 1), want) <= LIMIT
        answers = [
            model.generate(ids, past_key_values=transformers.DynamicCache(**options), max_new_tokens=4, do_sample=False)
            for model in (ours, theirs)
        ]
        assert torch.equal(*answers)


@pytest.mark.parametrize("hf", [("qwen3_next", "mixed"), ("qwen2_vl", "gqa")], indirect=True, ids="-".join)
def test_a_cache_of_transformers_for_more_than_keys(hf):
    arch, variant, _, ours = hf
    with pytest.raises(ValueError, match=r"must be what this model returned, or None .* got DynamicCache"):
        ours(tokens(arch, variant, 1, T), past_key_values=transformers.DynamicCache())


@pytest.mark.parametrize("hf", [("llama", "gqa"), ("gemma2", "gqa")], indirect=True, ids="-".join)
def test_prefixes_that_peft_learns(hf):
    """They are keys and values in a cache of transformers, with gradients."""
    peft = pytest.importorskip("peft")
    arch, variant, theirs, _ = hf
    ids = tokens(arch, variant, 2, T)
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[1, :3], labels[1, :4] = 0, -100  # the first token after padding has no target in this package
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    runs = []
    for model in (copy.deepcopy(theirs), copy.deepcopy(hf[-1]), unpack_projections(copy.deepcopy(hf[-1]))):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, copy.deepcopy(config)).train()
        loss = adapted(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        (prefix,) = (parameter for parameter in adapted.parameters() if parameter.requires_grad)
        options = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
        adapted.eval()
        runs.append((loss, prefix.grad, adapted.generate(**options), adapted.generate(**options, num_beams=2)))
    want, *others = runs
    for got in others:
        assert error(got[0], want[0]) <= LIMIT
        assert error(got[1], want[1]) <= LIMIT
        assert torch.equal(got[2], want[2])
        assert torch.equal(got[3], want[3])


@llama
def test_cache(hf):
    arch, variant, theirs, ours = hf
    ids = tokens(arch, variant, 3, T)
    want = theirs(ids).logits
    first = ours(ids[:, :5])  # the default of the configuration
    assert first.past_key_values.get_seq_length() == 5
    assert len(first.past_key_values.layers) == ours.config.num_hidden_layers == len(first.past_key_values)
    with torch.no_grad():
        layers = theirs(ids[:, :5], use_cache=True).past_key_values.layers
    for got, want_layer in zip(first.past_key_values.layers, layers, strict=True):
        assert error(got.keys, want_layer.keys) <= LIMIT
        assert error(got.values, want_layer.values) <= LIMIT
    rest = ours(ids[:, 5:], past_key_values=first.past_key_values)
    assert error(rest.logits, want[:, 5:]) <= LIMIT
    with pytest.raises(ValueError, match=r"must be 0 or minus the number .* got 5. To keep n tokens"):
        rest.past_key_values.crop(5)
    rest.past_key_values.crop(0)
    rest.past_key_values.crop(-4)
    rest.past_key_values.batch_repeat_interleave(2)
    assert rest.past_key_values.batch_size == 6
    rest.past_key_values.batch_select_indices(torch.tensor([4, 1]))
    again = ours(ids[[2, 0], -4:], past_key_values=rest.past_key_values, logits_to_keep=1)
    assert error(again.logits, want[[2, 0], -1:]) <= LIMIT
    assert ours(ids, use_cache=False).past_key_values is None
    assert ours.train()(ids).past_key_values is None
    with pytest.raises(ValueError, match=r"must be a DynamicCache, what this model returned, .* got StaticCache with"):
        ours(ids, past_key_values=transformers.StaticCache(config=ours.config, max_cache_len=T))
    with pytest.raises(ValueError, match="output_attentions must be False"):
        ours(ids, output_attentions=True)


@llama
def test_arguments_of_the_forward(hf):
    arch, variant, theirs, ours = hf
    ids = tokens(arch, variant, 2, T)
    want = theirs(ids)
    assert error(ours(inputs_embeds=ours.get_input_embeddings()(ids)).logits, want.logits) <= LIMIT
    kinds = {"token_type_ids": torch.ones_like(ids)}  # which some tokenizers return; transformers ignores them
    assert error(ours(ids, **kinds).logits, theirs(ids, **kinds).logits) <= LIMIT
    kept = torch.tensor([1, 5])
    assert error(ours(ids, logits_to_keep=kept).logits, want.logits[:, kept]) <= LIMIT
    ours.train()
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    items = torch.tensor(31)
    loss = theirs(ids, labels=ids, num_items_in_batch=items).loss
    assert error(ours(ids, labels=ids, num_items_in_batch=items).loss, loss) <= LIMIT
    assert error(ours(ids, shift_labels=shifted, num_items_in_batch=items).loss, loss) <= LIMIT
    assert error(ours(ids, labels=ids[:, :1], shift_labels=shifted, num_items_in_batch=items).loss, loss) <= LIMIT
    assert ours(ids, labels=ids, skip_logits=False).logits is not None
    with torch.no_grad():
        assert ours(ids, labels=ids).logits is not None
        assert ours(ids, labels=ids, skip_logits=True).logits is None
    with pytest.raises(TypeError, match="attention_masks"):
        ours(ids, attention_masks=None or torch.ones_like(ids))


@pytest.mark.parametrize("hf", [("mixtral", "aux")], indirect=True, ids="-".join)
def test_auxiliary_loss_of_experts(hf):
    arch, variant, theirs, ours = hf
    ids = tokens(arch, variant, 2, T)
    want = theirs(ids, labels=ids, output_router_logits=True)
    got = ours(ids, labels=ids, output_router_logits=True)
    for name in ("loss", "aux_loss"):
        assert error(got[name], want[name]) <= LIMIT
    for one, other in zip(got.router_logits, want.router_logits, strict=True):
        assert error(one.flatten(0, -2), other) <= LIMIT
    without = ours(ids, labels=ids, output_router_logits=False)
    assert without.aux_loss is None
    assert error(without.loss, theirs(ids, labels=ids, output_router_logits=False).loss) <= LIMIT
    assert len(ours.model(ids).router_logits) == len(want.router_logits)
    # Without a weight, with which a trainer may multiply it later, and in an evaluation, which makes a cache.
    theirs.config.router_aux_loss_coef = ours.config.router_aux_loss_coef = 0.0
    mask = torch.ones_like(ids)
    mask[1, T - 3 :] = 0
    for labels in (ids, None):
        got, want = (
            model.eval()(ids, attention_mask=mask, labels=labels, output_router_logits=True) for model in (ours, theirs)
        )
        assert error(got.aux_loss, want.aux_loss) <= LIMIT


@pytest.mark.parametrize("hf", [("glm4_moe", "norms")], indirect=True, ids="-".join)
def test_experts_that_an_engine_recorded(hf):
    """The experts are those of all blocks, in uint8. The dense first block and the last token of a row have zeros."""
    arch, variant, _, ours = hf
    ids, decoder = tokens(arch, variant, 2, T), ours.model.decoder
    own = torch.rand(2, T, 1, 4, generator=torch.Generator().manual_seed(0)).topk(decoder.routers[0].top_k).indices
    recorded = torch.zeros(2, T, 2, own.shape[-1], dtype=torch.uint8)
    recorded[:, :-1, 1:] = own[:, :-1]
    own[:, -1] = -1
    want = decoder(ids, labels=ids, routed_experts=own).loss
    assert torch.equal(ours(ids, labels=ids, routed_experts=recorded).loss, want)
    assert not torch.equal(ours(ids, labels=ids).loss, want)
    assert torch.equal(
        ours.model(ids, routed_experts=recorded).last_hidden_state,
        decoder(ids, routed_experts=own, return_logits=False, output_hidden_states=True).hidden_states[-1],
    )


@llama
def test_parameters_that_openrlhf_sends(hf):
    """Its module ppo_actor sends them to vLLM by the names of the checkpoint. For all others, they are as in memory."""
    _, _, theirs, ours = hf
    scope = {"__name__": "openrlhf.trainer.ray.ppo_actor"}
    exec("def params_to_sync(model): return [(n, p) for n, p in model.named_parameters() if p.requires_grad]", scope)
    sent, stored = dict(scope["params_to_sync"](ours)), dict(theirs.named_parameters())
    assert sent.keys() == stored.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in stored.items())
    assert "model.decoder.layers.0.self_attn.qkv_proj.weight" in dict(ours.named_parameters())
    next(ours.parameters()).ds_id = 0  # ZeRO-3 has partitioned it
    with pytest.raises(ValueError, match="zero_stage 2"):
        scope["params_to_sync"](ours)


def test_transformers_without_dummy_layers(monkeypatch):
    """Such as 5.6 to 5.15, in which checkpoints with ``auto_map`` load."""
    monkeypatch.delattr(transformers.cache_utils, "DummyLayer")
    older: Any = {"__name__": "liger_models.hf.older_cache"}
    exec(Path(sys.modules["liger_models.hf.cache"].__file__).read_text(encoding="utf-8"), older)
    empty = older["DummyLayer"]()
    assert (empty.get_seq_length(), type(empty) in older["KEYS_AND_VALUES"]) == (0, False)


@llama
def test_training_aids(hf):
    arch, variant, _, ours = hf
    ids = tokens(arch, variant, 2, T)
    ours.train()
    ours(ids, labels=ids).loss.backward()
    want = [parameter.grad.clone() for parameter in ours.parameters()]
    ours.zero_grad()
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert ours.is_gradient_checkpointing
    assert ours.model.decoder.checkpointing == ["full", "full"]
    ours.enable_input_require_grads()
    ours(ids, labels=ids).loss.backward()
    for parameter, gradient in zip(ours.parameters(), want, strict=True):
        assert error(parameter.grad, gradient) <= LIMIT
    ours.disable_input_require_grads()
    ours.gradient_checkpointing_disable()
    assert not ours.is_activation_checkpointing
    ours._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=torch.utils.checkpoint.checkpoint)
    assert ours.is_activation_checkpointing
    ours._set_gradient_checkpointing(enable=False)
    assert not ours.is_activation_checkpointing
    assert ours.model.decoder.checkpointing == "none"

    before = ours(ids).logits
    ours.resize_token_embeddings(140)
    assert ours.config.vocab_size == ours.get_output_embeddings().out_features == 140
    assert error(ours(ids).logits[..., :101], before) <= LIMIT
    copied = pickle.loads(pickle.dumps(ours))
    assert type(copied) is type(ours)
    assert torch.equal(copied(ids).logits, ours(ids).logits)
    twin = copy.deepcopy(ours)
    twin.lm_head.weight.data.zero_()
    assert not twin(ids).logits.any()
    assert ours(ids).logits.any()
    ours.lm_head = twin.lm_head
    assert [name for name, _ in ours.named_parameters() if "lm_head" in name] == ["model.decoder.lm_head.weight"]
    assert not ours(ids).logits.any()


def test_changes_of_the_configuration_are_saved(root, tmp_path):
    model = liger_models.hf.LlamaForCausalLM.from_pretrained(make_folder("llama", "gqa", root))
    model.resize_token_embeddings(110)
    model.config.pad_token_id = 7
    model.generation_config.max_new_tokens = 3
    model.save_pretrained(tmp_path)
    for made in (transformers.AutoModelForCausalLM, liger_models.hf.LlamaForCausalLM):
        loaded = made.from_pretrained(tmp_path)
        assert (loaded.config.vocab_size, loaded.config.pad_token_id) == (110, 7)
        assert loaded.generation_config.max_new_tokens == 3
        assert loaded.get_output_embeddings().weight.shape == (110, 64)


def test_names_of_the_inputs_of_images():
    """generate and Trainer read them from the signature."""
    parameters = inspect.signature(liger_models.hf.Qwen2VLForConditionalGeneration.forward).parameters
    assert {"pixel_values", "image_grid_thw", "labels"} <= parameters.keys()
    assert [name for name in parameters if "label" in name] == ["labels"]


def test_a_wrapped_model_shares_its_weights(root, tmp_path):
    folder = make_folder("llama", "gqa", root)
    model = get_arch("llama").from_pretrained(folder, progress=False)
    wrapped = liger_models.hf.wrap(model)
    assert isinstance(wrapped, liger_models.hf.LlamaForCausalLM)
    assert wrapped.model.decoder is model
    ids = torch.arange(9)[None]
    assert torch.equal(wrapped.eval()(ids).logits, model(ids).logits)
    wrapped.save_pretrained(tmp_path)
    torch.testing.assert_close(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits
    )
    with pytest.raises(AttributeError, match="has no attribute 'BertForCausalLM'"):
        _ = liger_models.hf.BertForCausalLM


def test_a_new_model_draws_its_weights():
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = liger_models.hf.LlamaForCausalLM(config)
    assert 0.01 < model.lm_head.weight.std() < 0.03
    assert model._no_split_modules == {"LlamaBlock"}
    half = hf_auto.model_class("llama")._from_config(config, dtype=torch.bfloat16)
    assert half.dtype == half.config.dtype == torch.bfloat16


@pytest.mark.cases(10)
@pytest.mark.parametrize("case", [case for case in FIRST_CASES if case in VISION_CASES], ids="-".join)
def test_auto_image_text_to_text(case, root):
    folder = make_folder(*case, root)
    with liger_models.hf.registered():
        ours = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    assert type(ours).__module__ == "liger_models.hf"
