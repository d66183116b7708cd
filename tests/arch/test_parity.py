"""Every architecture against transformers: same random weights, fp32, logits, loss and every gradient."""

from dataclasses import fields

import pytest
import torch
from safetensors.torch import load_file

from liger_models.arch import get_arch
from liger_models.cli.compare import first_difference, part_errors, tensor_differences, trace, where_it_differs
from liger_models.convert.config_map import read_config, write_config
from liger_models.kernels.options import KernelOptions
from liger_models.layers.kv_cache import DecodeCache
from liger_models.layers.layer import CHECKPOINTING_POLICIES

from ..late import transformers
from .families import (
    ARCHS,
    CASES,
    LIMIT,
    assert_same_gradients,
    auto_class,
    beyond_first,
    beyond_kinds,
    beyond_settings,
    error,
    every_case,
    gradients_of,
    hf_model,
    load,
    one_case_each,
    one_case_of_each_family,
    one_case_of_each_kind,
    one_case_of_each_setting,
    take_longest_row,
    tokens,
    variants,
)

T = 40  # past the original length of every scaled variant
SEEDS = {("mamba2", "groups"): 3, ("deepseek_v2", "yarn"): 1}
"""Case -> seed of its tokens, where seed 0 makes rounding decide: the terms of a gradient cancel but for a thirtieth of
their usual sum, or two experts have scores that differ by 1e-7."""
COMPILED = [
    (("llama", "gqa"), True),
    (("gemma2", "gqa"), False),
    (("mixtral", "aux"), False),
    (("qwen3_vl", "gqa"), False),
]
"""Families that differ, with packed documents or not: plain, windows and softcaps, experts, images."""


def steady_length(variant: str) -> int:
    """A length up to which no frequency depends on the longest sequence at hand."""
    return 16 if "dynamic" in variant or "longrope" in variant else T


@every_case
def test_logits_loss_and_gradients(pair):
    arch, variant, theirs, ours = pair
    ids = tokens(arch, variant, 2, T, SEEDS.get((arch, variant), 0))
    ids[:, 4::9] = ours.config.pad_token_id  # whose embedding is not trained
    labels = ids.clone()
    labels[0, :7] = -100
    want = theirs(ids, labels=labels)
    want.loss.backward()
    types = {"token_type_ids": (labels != -100).long()} if "token_type_ids" in ours.prompt_inputs else {}
    got = ours(ids, **types).logits
    assert error(got, want.logits) <= LIMIT, where_it_differs(ours, theirs, input_ids=ids, **types)
    got = ours(ids, labels=labels)
    assert got.logits is None
    assert error(got.loss, want.loss) <= LIMIT
    got.loss.backward()
    assert_same_gradients(ours, theirs)


@pytest.mark.cases(20)
@one_case_each
def test_every_part_of_each_block_is_compared_by_itself(pair):
    """What names the part that differs finds none in an equal model, and leaves out none that transformers runs."""
    arch, variant, theirs, ours = pair
    ids = tokens(arch, variant, 2, 12)
    recorded = trace(theirs, input_ids=ids)
    errors = part_errors(ours, recorded, input_ids=ids)
    assert first_difference(errors) == ""
    for index, block in enumerate(recorded.blocks):
        branches = {name for name, child in ours.layers[index].named_children() if hasattr(child, "add_norm")}
        assert not block or branches | {"output"} <= errors[f"layers.{index}"].keys()
    assert errors.keys() >= {"embed_tokens", "norm", "lm_head"}
    assert not any("add_norm" in vars(module) or module._forward_hooks for module in ours.modules())


@pytest.mark.cases(20)
@one_case_each
def test_every_layer_follows_the_kernel_options(pair):
    """A layer to which a family does not hand an option on computes the same numbers, so only its attribute tells."""
    _, _, _, ours = pair
    off = KernelOptions(**{field.name: False for field in fields(KernelOptions)})
    with torch.device("meta"):
        model = type(ours)(ours.config, kernels=off)
    switches = {
        f"{name}.{switch}": getattr(module, switch)
        for name, module in model.named_modules()
        for switch in ("kernel", "rope_kernel", "kernels")
        if hasattr(module, switch)
    }
    assert switches.keys() >= {".kernels", "lm_head.kernels", "norm.kernel"}
    assert {name: switch for name, switch in switches.items() if switch not in (False, off)} == {}


@pytest.mark.cases(20)
@one_case_each
def test_num_items_in_batch(pair):
    arch, variant, theirs, ours = pair
    ids = tokens(arch, variant, 2, 12)
    want = theirs(ids, labels=ids, num_items_in_batch=torch.tensor(37)).loss
    balance = ours(ids, labels=ids).aux_loss
    if balance is not None:  # transformers adds all of it in each batch, we the batch's share: it has 2 · 11 targets
        want = want - (1 - 22 / 37) * balance
    for items in (37, torch.tensor(37)):
        assert error(ours(ids, labels=ids, num_items_in_batch=items).loss, want) <= LIMIT


PADDED = [pytest.param(case, "left", marks=beyond_settings(case)) for case in CASES]
PADDED += [pytest.param(case, "right", marks=beyond_first(case) or beyond_kinds(case[0])) for case in CASES]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "side"), PADDED, indirect=["pair"], ids=lambda part: "-".join(part) if isinstance(part, tuple) else part
)
def test_padded_batches(pair, side):
    """The tokens' logits, the loss on them, and all gradients are those of transformers with the same mask."""
    arch, variant, theirs, ours = pair
    take_longest_row(ours)
    ids = tokens(arch, variant, 3, T)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 5, 11)):
        mask[row, slice(0, padding) if side == "left" else slice(T - padding, T)] = 0
    labels = ids.masked_fill(mask == 0, -100)
    # A padding token before the first real one has nothing to predict it from: we ignore that target.
    first = (mask == 1) & (torch.nn.functional.pad(mask, (1, 0))[:, :-1] == 0)
    labels = labels.masked_fill(first, -100)
    want = theirs(ids, attention_mask=mask, labels=labels)
    want.loss.backward()
    kept = mask.bool()
    assert error(ours(ids, attention_mask=mask).logits[kept], want.logits[kept]) <= LIMIT
    got = ours(ids, attention_mask=mask, labels=ids)  # padding has no targets, whatever its labels
    assert error(got.loss, want.loss) <= LIMIT
    got.loss.backward()
    assert_same_gradients(ours, theirs)


@one_case_of_each_setting
def test_packed_documents_are_separate_documents(pair):
    """One packed row gives the logits, the loss and the gradients of each document alone."""
    arch, variant, theirs, ours = pair
    lengths = [9, 1, steady_length(variant), 14]
    ids = tokens(arch, variant, 1, sum(lengths))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    targets = sum(length - 1 for length in lengths)
    logits = []
    for document in ids.split(lengths, 1):
        out = theirs(document)
        logits.append(out.logits)
        if document.shape[1] > 1:
            loss = torch.nn.functional.cross_entropy(out.logits[0, :-1], document[0, 1:], reduction="sum")
            (loss / targets).backward()
    assert error(ours(ids, cu_seqlens=bounds).logits, torch.cat(logits, 1)) <= LIMIT
    out = ours(ids, labels=ids, cu_seqlens=bounds.int())
    # The balance of the experts is that of the whole batch, however it is cut.
    (out.loss - (0 if out.aux_loss is None else out.aux_loss)).backward()
    assert_same_gradients(ours, theirs)


@pytest.mark.cases(20)
@one_case_each
def test_tokens_after_the_last_boundary_and_rows_are_documents(pair):
    arch, variant, _, ours = pair
    ids = tokens(arch, variant, 2, 12)
    packed = ours(ids, cu_seqlens=torch.tensor([0, 5, 15])).logits
    pieces = [(0, slice(0, 5)), (0, slice(5, 12)), (1, slice(0, 3)), (1, slice(3, 12))]
    for row, part in pieces:
        assert error(packed[row, part], ours(ids[row : row + 1, part]).logits[0]) <= LIMIT


@pytest.mark.cases(20)
@one_case_each
def test_position_ids(pair):
    arch, variant, theirs, ours = pair
    ids = tokens(arch, variant, 2, 10)
    positions = torch.stack([torch.arange(10) + 3, torch.arange(10) * 2])
    mask = torch.ones_like(ids)
    # Row by row: transformers takes frequencies that depend on the length from the longest one.
    rows = zip(ids.split(1), positions.split(1), mask.split(1), strict=True)
    want = torch.cat([theirs(row, position_ids=of_row, attention_mask=ones).logits for row, of_row, ones in rows])
    assert error(ours(ids, position_ids=positions).logits, want) <= LIMIT
    want = theirs(ids, position_ids=positions[:1], attention_mask=mask).logits
    assert error(ours(ids, position_ids=positions[0]).logits, want) <= LIMIT


@pytest.mark.cases(20)
@one_case_each
def test_causality(pair):
    arch, variant, _, ours = pair
    ids = tokens(arch, variant, 1, 16)
    changed = ids.clone()
    changed[0, 9] = (ids[0, 9] + 1) % 50 + 3
    before, after = ours(ids).logits, ours(changed).logits
    # Not bit for bit: an expert's product has other rows when a later token goes elsewhere.
    assert error(after[:, :9], before[:, :9]) <= LIMIT
    assert error(after[:, 9:], before[:, 9:]) > 1e-2


@one_case_of_each_setting
def test_cached_decode(pair):
    """Pieces after each other, at last single tokens, give the logits of the whole."""
    arch, variant, _, ours = pair
    length = steady_length(variant)
    ids = tokens(arch, variant, 2, length)
    cache = DecodeCache(length)
    with torch.no_grad():
        sizes = [7, 1, 4, 1, 1, 1, 1, *([length - 24, *[1] * 8] if length > 24 else [])]
        pieces = [ours(piece, cache=cache).logits for piece in ids.split(sizes, 1)]
        assert error(torch.cat(pieces, 1), ours(ids).logits) <= LIMIT


@pytest.mark.cases(14)
@one_case_of_each_kind
def test_checkpointing_policies_give_identical_gradients(pair):
    arch, variant, _, ours = pair
    ids = tokens(arch, variant, 2, 16)
    gradients = []
    for policy in CHECKPOINTING_POLICIES:
        ours.zero_grad()
        ours.set_checkpointing(policy)
        ours(ids, labels=ids).loss.backward()
        gradients.append(gradients_of(ours))
    for other in gradients[1:]:
        assert all(torch.equal(gradient, other[name]) for name, gradient in gradients[0].items())


@pytest.mark.cases(20)
@one_case_each
def test_logits_beside_the_loss_and_only_the_last(pair):
    arch, variant, _, ours = pair
    ids = tokens(arch, variant, 2, 10)
    full = ours(ids).logits
    assert torch.equal(ours(ids, labels=ids, return_logits=True).logits, full)
    assert error(ours(ids, logits_to_keep=1).logits, full[:, -1:]) <= LIMIT
    with torch.no_grad():
        assert ours.eval()(ids, labels=ids).logits is None


@pytest.mark.cases(20)
@one_case_each
def test_inputs_embeds(pair):
    arch, variant, theirs, ours = pair
    ids = tokens(arch, variant, 2, 10)
    embeds = theirs.get_input_embeddings()(ids)
    assert error(ours(inputs_embeds=embeds).logits, theirs(inputs_embeds=embeds).logits) <= LIMIT


@pytest.mark.cases(20)
@one_case_each
def test_one_token_and_no_token(pair):
    arch, variant, theirs, ours = pair
    one = tokens(arch, variant, 1, 1)
    assert error(ours(one).logits, theirs(one).logits) <= LIMIT, where_it_differs(ours, theirs, input_ids=one)
    for ids in (one, one[:0], one[:, :0]):
        out = ours(ids, labels=ids)
        assert out.loss == (out.aux_loss or 0)  # nothing to predict


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "packed", "compiler"),
    [
        (*COMPILED[0], "aot_eager"),  # the C++ compiler takes longer than all other tests of a family
        *(pytest.param(*case, "inductor", marks=pytest.mark.matrix) for case in COMPILED),
    ],
    indirect=["pair"],
    ids=str,
)
def test_compiled(pair, packed, compiler, fresh_dynamo):
    """The compiler's code computes what the model does without it, which the other tests compare with transformers."""
    arch, variant, _, ours = pair
    del ours.layers[2 if arch == "gemma2" else 1 :]  # layers of a kind compile to the same code
    ids = tokens(arch, variant, 1 if packed else 2, 16)
    options = {"labels": ids} | ({"cu_seqlens": torch.tensor([0, 7, 16])} if packed else {})
    want = ours(ids, **options).loss
    want.backward()
    gradients = gradients_of(ours)
    ours.zero_grad()
    got = torch.compile(ours, fullgraph=True, backend=compiler)(ids, **options).loss
    got.backward()
    assert error(got, want) <= LIMIT
    for name, gradient in gradients.items():
        assert error(ours.get_parameter(name).grad, gradient) <= LIMIT, name


@pytest.mark.cases(2)
@pytest.mark.compile
@one_case_of_each_kind
def test_forward_and_backward_are_one_graph(pair, fresh_dynamo):
    """With a policy for each layer, and packed documents where `test_compiled` has none."""
    arch, variant, _, ours = pair
    packed = ((arch, variant), True) not in COMPILED
    ids = tokens(arch, variant, 1 if packed else 2, 16)
    options = {"labels": ids} | ({"cu_seqlens": torch.tensor([0, 7, 16])} if packed else {})
    want = ours(ids, **options).loss
    want.backward()
    gradients = [parameter.grad for parameter in ours.parameters()]
    ours.zero_grad()
    assert len(ours.layers) > 1
    ours.set_checkpointing([("selective", "full", "none")[layer % 3] for layer in range(len(ours.layers))])
    got = torch.compile(ours, fullgraph=True, backend="eager")(ids, **options).loss
    got.backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close([parameter.grad for parameter in ours.parameters()], gradients)


@every_case
def test_export_reloads_in_transformers_bit_for_bit(pair, tmp_path):
    arch, variant, theirs, ours = pair
    ours.save_pretrained(tmp_path / "export")
    again = hf_model(tmp_path / "export")
    want = theirs.state_dict()
    got = again.state_dict()
    assert [*map(str, tensor_differences(want, got))] == []
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    ids = tokens(arch, variant, 1, T)
    assert torch.equal(again(ids).logits, theirs(ids).logits)


@pytest.mark.cases(11)
@one_case_of_each_family
def test_what_transformers_holds_in_memory_is_read(pair, tmp_path):
    """The names and shapes of its parameters, which it writes on demand, give the same model as the hub's."""
    arch, variant, theirs, ours = pair
    theirs.save_pretrained(tmp_path / "memory", save_original_format=False)
    assert load_file(tmp_path / "memory" / "model.safetensors").keys() <= theirs.state_dict().keys()
    again = load(arch, tmp_path / "memory")
    want = dict(ours.named_parameters())
    assert [*map(str, tensor_differences(want, dict(again.named_parameters())))] == []
    assert all(torch.equal(parameter, want[name]) for name, parameter in again.named_parameters())
    ids = tokens(arch, variant, 1, T)
    assert error(again(ids).logits, theirs(ids).logits) <= LIMIT, where_it_differs(again, theirs, input_ids=ids)
    ours.save_pretrained(tmp_path / "a")
    again.save_pretrained(tmp_path / "b")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.cases(20)
@one_case_each
def test_fresh_weights(pair):
    """from_config draws what the constructor draws, and ties what is tied."""
    arch, _, _, ours = pair
    torch.manual_seed(1)
    drawn = get_arch(arch).from_config(ours.config)
    for name, parameter in drawn.named_parameters():
        assert parameter.isfinite().all(), name
        if parameter.dim() > 1 and not name.endswith("_bias"):  # the experts', a row for each
            chance = 4 / (2 * parameter.numel()) ** 0.5  # four standard errors, of a gate with few elements
            assert (parameter.std() / ours.config.initializer_range - 1).abs() < max(0.2, chance), name
    assert (drawn.lm_head.weight is drawn.embed_tokens.weight) == ours.config.tie_word_embeddings


@pytest.mark.cases(34)
@pytest.mark.parametrize(
    ("arch", "pad"),
    [(arch, 5) for arch in ARCHS]
    + [pytest.param(arch, pad, marks=beyond_kinds(arch)) for arch in ARCHS for pad in (None, -1)],
)
def test_the_row_of_the_padding_token(arch, pad):
    """It is the row that transformers does not train, and zero in a new model; null and -1 are in published files."""
    sizes = next(iter(variants(arch).values()))
    part = "text_config" if "text_config" in sizes else None
    sizes = (
        {**sizes, part: {**sizes[part], "pad_token_id": pad}, "pad_token_id": 7}
        if part
        else sizes | {"pad_token_id": pad}
    )
    config = transformers.AutoConfig.for_model(arch, **sizes)
    theirs = auto_class(arch).from_config(config).get_input_embeddings()
    hf = config.to_dict() | ({"pad_token_id": 7} if part else {})  # beside the text's it means nothing
    ours = get_arch(arch).from_config(read_config(get_arch(arch).config_class, hf))
    assert ours.embed_tokens.padding_idx == theirs.padding_idx
    assert torch.equal(*(embedding.weight.eq(0).all(1) for embedding in (ours.embed_tokens, theirs)))
    written = write_config(ours.config, hf, torch.float32)
    assert read_config(type(ours.config), written).pad_token_id == ours.config.pad_token_id == pad


@pytest.mark.cases(20)
@one_case_each
def test_cast_keeps_the_rotary_tables(pair):
    """Half-precision weights must not round the frequencies."""
    _, _, _, ours = pair
    positions = torch.arange(60)[None]

    def tables(model):
        return [table for rotary in model.rotary.values() for table in rotary(positions)]

    want = tables(ours)
    assert all(torch.equal(a, b) for a, b in zip(tables(ours.bfloat16()), want, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tables(ours.half().to("cpu")), want, strict=True))


@pytest.mark.cases(9)
@one_case_each
def test_more_tokens(pair, tmp_path):
    """With more rows, new tokens among them, saved and read by transformers; then with as few as before."""
    arch, variant, _, ours = pair
    V, before = ours.config.vocab_size, ours.embed_tokens.weight.detach().clone()
    if len(before) != V:
        with pytest.raises(ValueError, match=rf"must have vocab_size \({V}\) rows, got {len(before)} and {V}"):
            ours.resize_token_embeddings(V + 1)
        return
    tied = ours.lm_head.weight is ours.embed_tokens.weight
    assert ours.resize_token_embeddings(V + 3, pad_to_multiple_of=8) is ours.embed_tokens
    size = -(-(V + 3) // 8) * 8
    assert ours.config.vocab_size == ours.embed_tokens.num_embeddings == ours.lm_head.out_features == size
    assert (ours.lm_head.weight is ours.embed_tokens.weight) == tied
    assert torch.equal(ours.embed_tokens.weight[:V], before)
    torch.testing.assert_close(ours.embed_tokens.weight[V:], before.mean(0).expand(size - V, -1))
    ours.save_pretrained(tmp_path)
    theirs = hf_model(tmp_path)
    ids = tokens(arch, variant, 2, T, SEEDS.get((arch, variant), 0))
    ids[:, 3:6] = torch.arange(V, V + 3)
    want, got = theirs(ids, labels=ids), ours(ids, labels=ids)
    assert error(ours(ids).logits, want.logits) <= LIMIT
    assert error(got.loss, want.loss) <= LIMIT
    want.loss.backward()
    got.loss.backward()
    assert_same_gradients(ours, theirs)
    ours.resize_token_embeddings(V)
    assert torch.equal(ours.embed_tokens.weight, before)
    assert len(ours.lm_head.weight) == ours.config.vocab_size == V


@pytest.mark.parametrize("arch", ["qwen3_moe"])
def test_a_mixture_without_experts_is_dense(arch, tmp_path):
    config = transformers.AutoConfig.for_model(arch, **variants(arch)["plain"] | {"num_experts": 0})
    auto_class(arch).from_config(config).save_pretrained(tmp_path)
    theirs, ours = hf_model(tmp_path), load(arch, tmp_path)
    ids = tokens(arch, "plain", 1, 9)
    assert error(ours(ids).logits, theirs(ids).logits) <= LIMIT, where_it_differs(ours, theirs, input_ids=ids)
    ours.save_pretrained(tmp_path / "export")
    assert torch.equal(hf_model(tmp_path / "export")(ids).logits, theirs(ids).logits)


def test_mistral_with_layer_types_has_the_window_in_some_layers(tmp_path):
    """Transformers loads it as Ministral."""
    types = ["full_attention", "sliding_attention"]
    config = transformers.AutoConfig.for_model("mistral", **variants("mistral")["window"], layer_types=types)
    auto_class("mistral").from_config(config).save_pretrained(tmp_path)
    theirs, ours = hf_model(tmp_path), load("mistral", tmp_path)
    assert theirs.config.model_type == "ministral"
    ids = tokens("mistral", "window", 1, 20)
    assert error(ours(ids).logits, theirs(ids).logits) <= LIMIT, where_it_differs(ours, theirs, input_ids=ids)
    ours.save_pretrained(tmp_path / "export")
    assert torch.equal(hf_model(tmp_path / "export")(ids).logits, theirs(ids).logits)
