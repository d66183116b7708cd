"""What users change in a model after it was loaded: configuration, head, embedding, loss; beside a model loaded so."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import liger_models.hf

from ..arch.families import FIRST_CASES, LIMIT, error, make_folder, of_each_kind, text_sizes, tokens
from ..late import Late, transformers

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers'
hf_auto = Late("liger_models.hf.auto")
every_family = pytest.mark.parametrize("hf", FIRST_CASES, indirect=True, ids="-".join)
one_family_of_each_kind = pytest.mark.parametrize("hf", of_each_kind(FIRST_CASES), indirect=True, ids="-".join)
llama = pytest.mark.parametrize("hf", [("llama", "gqa")], indirect=True, ids="-".join)
tied = pytest.mark.parametrize("hf", [("gemma2", "gqa")], indirect=True, ids="-".join)
untied_and_tied = pytest.mark.parametrize(
    "hf", [("llama", "gqa"), ("gemma2", "gqa")], indirect=True, ids=["untied", "tied"]
)
T = 12


def reload(model, folder, **options):
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, **options)


# The configuration


@pytest.mark.cases(11)
@every_family
def test_an_edited_constant_is_computed_with(hf, tmp_path):
    """As by a model that is loaded with it."""
    arch, variant, _, ours = hf
    ids = tokens(arch, variant, 2, T)
    before = ours(ids).logits
    text = ours.config.get_text_config()
    name = next(name for name in vars(text) if name.endswith(("eps", "epsilon")))
    setattr(text, name, 0.5)
    edited = ours(ids).logits
    assert error(edited, before) > 1e-3
    assert getattr(ours.model.decoder.config, name, 0.5) == 0.5
    assert torch.equal(reload(ours, tmp_path)(ids).logits, edited)


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("hf", "name", "value"),
    [
        (("gemma2", "gqa"), "final_logit_softcapping", 0.05),
        (("gemma2", "gqa"), "sliding_window", 2),
        (("granite", "tied"), "logits_scaling", 3.0),
        (("granite", "tied"), "embedding_multiplier", 3.0),
        (("cohere2", "released"), "logit_scale", 3.0),
        (("mistral", "window"), "sliding_window", 3),
        (("mixtral", "aux"), "router_aux_loss_coef", 3.0),
        (("mixtral", "aux"), "num_experts_per_tok", 1),
        (("llama", "gqa"), "rope_parameters", {"rope_type": "default", "rope_theta": 5.0}),
    ],
    indirect=["hf"],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_an_edited_field(hf, name, value, tmp_path):
    arch, variant, _, ours = hf
    ids = tokens(arch, variant, 2, T)
    options = {"labels": ids, "output_router_logits": True} if arch == "mixtral" else {"labels": ids}
    before = ours(ids, **options)
    setattr(ours.config.get_text_config(), name, value)
    edited = ours(ids, **options)
    assert edited.loss != before.loss
    again = reload(ours, tmp_path)
    assert getattr(again.config.get_text_config(), name) == value
    assert torch.equal(again(ids, **options).loss, edited.loss)


@llama
def test_an_edit_that_needs_other_parameters_is_refused(hf, tmp_path):
    arch, variant, _, ours = hf
    ids = tokens(arch, variant, 2, T)
    fields = {"num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 50, "num_key_value_heads": 4}
    for name, value in fields.items():
        edited = copy.deepcopy(ours)
        setattr(edited.config, name, value)
        todo = "Call resize_token_embeddings" if name == "vocab_size" else r"from_pretrained\(folder, config=config\)"
        for call in (lambda: edited(ids), lambda: edited.save_pretrained(tmp_path)):  # noqa: B023
            with pytest.raises(ValueError, match=rf"got {name} = {value} \(built with .*{todo}"):
                call()
    ours.config.hidden_act = "relu"
    with pytest.raises(ValueError, match="hidden_act"):
        ours(ids)


@llama
def test_fields_that_change_no_result(hf):
    arch, variant, _, ours = hf
    ids = tokens(arch, variant, 2, T)
    before = ours(ids).logits
    config = ours.config
    config.pad_token_id, config.eos_token_id, config.use_cache, config.max_position_embeddings = 5, [3, 4], False, 999
    assert torch.equal(ours(ids).logits, before)
    assert ours.model.decoder.config.max_position_embeddings == 999
    assert ours.model.decoder.embed_tokens.padding_idx == 0  # as the layer was built
    ours.config = copy.deepcopy(config)
    ours.config.rms_norm_eps = 0.5
    assert not torch.equal(ours(ids).logits, before)


def test_the_callers_configuration_stays_as_it_is(root):
    config = transformers.Gemma2Config.from_pretrained(make_folder("gemma2", "gqa", root))
    before = copy.deepcopy(vars(config))
    for name in ("Gemma2ForCausalLM", "Gemma2ForSequenceClassification"):
        model = getattr(liger_models.hf, name)(config)
        model(torch.arange(9)[None])
        assert vars(config) == before
        assert model.config is model.model.config


# Tied and untied


@tied
def test_a_head_of_its_own_in_a_tied_model(hf, tmp_path):
    """Is kept by moving, loading and saving, and the configuration says so."""
    arch, variant, _, ours = hf
    ids = tokens(arch, variant, 2, T)
    ours.lm_head.weight = nn.Parameter(torch.randn_like(ours.lm_head.weight))
    want = ours(ids).logits
    assert ours.config.tie_word_embeddings is False
    assert torch.equal(ours.to("cpu", torch.float64).to(torch.float32)(ids).logits, want)
    for auto in (type(ours), transformers.AutoModelForCausalLM):
        ours.save_pretrained(tmp_path)
        again = auto.from_pretrained(tmp_path, dtype=torch.float32)
        assert error(again(ids).logits, want) <= LIMIT
        assert again.config.tie_word_embeddings is False
    other = type(ours)(ours.config)
    other.load_state_dict({**again.state_dict()})
    assert error(other(ids).logits, want) <= LIMIT
    again = type(ours).from_pretrained(tmp_path)
    again.config.tie_word_embeddings = True
    again.tie_weights()
    assert again.lm_head.weight is again.get_input_embeddings().weight
    assert reload(again, tmp_path / "tied").config.tie_word_embeddings is True


@untied_and_tied
def test_the_field_ties_and_unties(hf, tmp_path):
    arch, variant, _, ours = hf
    ids = tokens(arch, variant, 2, T)
    was = ours.config.tie_word_embeddings
    ours.config.tie_word_embeddings = not was
    out = ours(ids).logits
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) is not was
    assert ours.model.decoder.config.tie_word_embeddings is not was
    assert torch.equal(reload(ours, tmp_path)(ids).logits, out)


@tied
def test_a_merged_adapter_on_a_tied_head(hf, tmp_path):
    from liger_models.adapters import LoRAConfig, apply_lora, merge_lora

    arch, variant, _, ours = hf
    ids = tokens(arch, variant, 2, T)
    decoder = apply_lora(ours.model.decoder, LoRAConfig(r=2, target_modules=["lm_head"]))
    nn.init.normal_(decoder.lm_head.lora["lm_head"].lora_B)
    want = ours(ids).logits
    merge_lora(decoder)
    again = reload(ours, tmp_path)
    assert again.config.tie_word_embeddings is ours.config.tie_word_embeddings is False
    assert error(again(ids).logits, want) <= LIMIT


@untied_and_tied
def test_resizing_anywhere(hf, tmp_path):
    """By the model, by its body, and by the model of this package in it."""
    for size, part in ((120, hf[-1]), (130, hf[-1].model), (140, hf[-1].model.decoder)):
        part.resize_token_embeddings(size)
        again = reload(hf[-1], tmp_path / str(size))
        assert hf[-1].vocab_size == again.vocab_size == again.config.vocab_size == size
        assert again(torch.tensor([[size - 1, 1]])).logits.shape[-1] == size


def test_resizing_a_classifier(root, tmp_path):
    folder = make_folder("llama", "gqa", root)
    model = liger_models.hf.LlamaForSequenceClassification.from_pretrained(folder, num_labels=3)
    model.resize_token_embeddings(120)
    ids = torch.tensor([[119, 1]])
    assert torch.equal(reload(model, tmp_path)(ids).logits, model(ids).logits)


# Head, embedding, loss


@pytest.mark.cases(8)
@one_family_of_each_kind
def test_a_new_head_and_a_new_embedding(hf, tmp_path):
    """Layers of PyTorch take the place of ours; scales and caps of the model stay."""
    arch, variant, theirs, ours = hf
    theirs.__dict__.pop("forward", None)
    ids = tokens(arch, variant, 2, T)
    rows, width = ours.lm_head.weight.shape
    head = nn.Linear(width, rows, bias=ours.lm_head.bias is not None)
    for model in (theirs, ours):
        model.set_output_embeddings(copy.deepcopy(head))
    embedding = nn.Embedding(*ours.get_input_embeddings().weight.shape)
    new = copy.deepcopy(embedding)
    ours.set_input_embeddings(new)
    assert ours.get_input_embeddings() is new
    with torch.no_grad():  # transformers scales in the layer, in some families
        theirs.get_input_embeddings().weight.copy_(embedding.weight)
    want, got = (model(ids, labels=ids) for model in (theirs, ours))
    assert error(got.loss, want.loss) <= LIMIT
    assert error(got.logits, want.logits) <= LIMIT
    assert torch.equal(reload(ours, tmp_path)(ids).logits, got.logits)


@llama
def test_heads_of_other_sizes(hf, tmp_path):
    ours = hf[-1]
    C, ids = ours.config.hidden_size, torch.tensor([[3, 7, 119]])
    for layer in (nn.Linear(C + 1, 9, bias=False), nn.Linear(C, 9)):
        with pytest.raises(ValueError, match=rf"set_output_embeddings: must have {C} columns"):
            ours.set_output_embeddings(layer)
    with pytest.raises(ValueError, match=rf"set_input_embeddings: must have {C} columns"):
        ours.set_input_embeddings(nn.Embedding(9, C + 1))
    ours.set_output_embeddings(nn.Linear(C, 120, bias=False))
    with pytest.raises(ValueError, match=r"same number of rows, got 101 and 120.* resize_token_embeddings"):
        ours.save_pretrained(tmp_path)
    ours.set_input_embeddings(nn.Embedding(120, C))
    assert torch.equal(reload(ours, tmp_path)(ids).logits, ours(ids).logits)
    assert ours.config.vocab_size == 120


@untied_and_tied
def test_a_head_of_ones_own(hf):
    """Any module that returns logits; the loss is transformers'."""
    arch, variant, theirs, ours = hf
    ids = tokens(arch, variant, 2, T)
    head = nn.Sequential(nn.Linear(ours.config.hidden_size, 16), nn.Tanh(), nn.Linear(16, ours.config.vocab_size))
    for model in (theirs, ours):
        model.lm_head = head
        getattr(model.config, "final_logit_softcapping", None)
    if getattr(theirs.config, "final_logit_softcapping", None):
        theirs.config.final_logit_softcapping = None
    want, got = (model(ids, labels=ids) for model in (theirs, ours))
    assert error(got.logits, want.logits) <= LIMIT
    assert error(got.loss, want.loss) <= LIMIT


@pytest.mark.parametrize("hf", [("llama", "gqa"), ("mixtral", "aux")], indirect=True, ids="-".join)
def test_a_loss_of_ones_own(hf):
    """It is called as by transformers; the auxiliary loss of experts is added."""
    arch, variant, theirs, ours = hf
    ids = tokens(arch, variant, 2, T)
    shifted = nn.functional.pad(ids[:, 1:], (0, 1), value=-100)

    def own(logits, labels, vocab_size, num_items_in_batch=None, shift_labels=None, **_):
        target = nn.functional.pad(labels[:, 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
        total = nn.functional.cross_entropy(
            logits.view(-1, vocab_size), target.flatten(), reduction="sum", label_smoothing=0.3
        )
        return total / (num_items_in_batch or 10)

    for model in (theirs, ours):
        model.train().loss_function = own
    options = {"output_router_logits": True} if "num_experts_per_tok" in text_sizes(arch, variant) else {}
    want, got = (model(ids, labels=ids, **options) for model in (theirs, ours))
    assert error(got.loss, want.loss) <= LIMIT
    got.loss.backward()
    assert ours.lm_head.weight.grad.any()
    assert error(ours(ids, shift_labels=shifted, **options).loss, want.loss) <= LIMIT
    want, got = (model(ids, labels=ids, num_items_in_batch=7, **options) for model in (theirs, ours))
    # transformers adds the whole auxiliary loss, the model this batch's share of it: 2 (T - 1) of 7 targets.
    aux = ours.config.router_aux_loss_coef * want.aux_loss if options else 0.0
    assert error(got.loss, want.loss + (2 * (T - 1) / 7 - 1) * aux) <= LIMIT
    ours.train().loss_function = None
    del ours._loss_function
    assert ours(ids, labels=ids).logits is None


# Freezing


@pytest.mark.cases(8)
@one_family_of_each_kind
def test_freezing_the_body_leaves_the_head(hf):
    arch, variant, theirs, ours = hf
    ids = tokens(arch, variant, 2, T)
    tied = ours.lm_head.weight is ours.model.embed_tokens.weight
    for parameter in ours.base_model.parameters():
        parameter.requires_grad = False
    assert {name for name, each in ours.named_parameters() if each.requires_grad} == (
        set() if tied else {f"model.decoder.lm_head.{name}" for name, _ in ours.lm_head.named_parameters()}
    )
    if theirs.base_model is not theirs:  # Llama 4 with images has no module for its body
        outside = [model.num_parameters() - model.base_model.num_parameters() for model in (theirs, ours)]
        assert outside[0] == outside[1]
    if not tied:
        ours.train()(ids, labels=ids).loss.backward()
        assert ours.lm_head.weight.grad.any()
    ours.requires_grad_(True)
    ours.model.embed_tokens.requires_grad_(False)
    ours.model.layers[0].requires_grad_(False)
    frozen = {name for name, each in ours.named_parameters() if not each.requires_grad}
    assert frozen
    assert all(name.startswith(("model.decoder.embed_tokens.", "model.decoder.layers.0.")) for name in frozen)
    with pytest.raises(AttributeError, match=r"has no attribute 'language_model'. Its parts are embed_tokens, layers"):
        _ = ours.model.language_model


@pytest.mark.cases(6)
@one_family_of_each_kind
def test_a_body_is_saved(hf, tmp_path):
    """`AutoModel` loads it; a model with a head says that there is none, unless it is the embedding."""
    arch, variant, theirs, ours = hf
    if theirs.base_model is theirs:
        pytest.skip("transformers has no class for this body without its head")
    ids = tokens(arch, variant, 2, T)
    ours.base_model.save_pretrained(tmp_path)
    body, info = transformers.AutoModel.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert body.config.architectures == [type(body).__name__]
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert error(body(ids).last_hidden_state, theirs.base_model(ids).last_hidden_state) <= LIMIT
    if ours.model.decoder.config.tie_word_embeddings:
        assert torch.equal(type(ours).from_pretrained(tmp_path)(ids).logits, ours(ids).logits)
        return
    with pytest.raises(ValueError, match=r"Missing: [^ ]*lm_head.weight"):
        type(ours).from_pretrained(tmp_path)


def test_fields_are_compared_by_what_layers_hold(root):
    """Models that are built twice from one configuration differ in nothing."""
    from liger_models.hf.edits import _INTERNALS, _same

    for arch, variant in FIRST_CASES:
        made = hf_auto.model_class(arch)
        config = made.config_class.from_pretrained(make_folder(arch, variant, root))
        with torch.device("meta"):
            one, other = made(config).model.decoder, made(config).model.decoder
        for (path, module), twin in zip(one.named_modules(), other.modules(), strict=True):
            for name in vars(module).keys() - _INTERNALS - {"config"}:
                assert _same(vars(module)[name], vars(twin)[name]), (arch, path, name)
        assert dataclasses.is_dataclass(one.config)
