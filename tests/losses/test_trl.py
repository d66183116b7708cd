"""The losses against TRL's own trainers: loss, metrics and every gradient of a small model, from TRL's own batches.

The trainers' methods are called on a stand-in that has just the options which they read.
"""

import copy
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tokenizers.models import BPE
from torch import Tensor

from liger_models import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
    LigerLlama,
    preference_batch,
)
from liger_models.arch.llama import weight_map

from ..base.conftest import picture
from ..base.test_processor_gemma3 import make as image_model
from ..data.conftest import tokenizer  # noqa: F401
from ..late import Late, transformers

NEEDS = "the losses are compared with those of TRL"
cpo = Late("trl.experimental.cpo.cpo_trainer", NEEDS)
dpo = Late("trl.trainer.dpo_trainer", NEEDS)
grpo = Late("trl.trainer.grpo_trainer", NEEDS)
kto = Late("trl.trainer.kto_trainer", NEEDS)
orpo = Late("trl.experimental.orpo.orpo_trainer", NEEDS)
experimental = Late("trl.experimental.utils", NEEDS)
utils = Late("trl.trainer.utils", NEEDS)
datasets = Late("datasets", NEEDS)
gemma3 = Late("transformers.models.gemma3.image_processing_pil_gemma3", NEEDS)

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # TRL's
V, PAIRS = 40, 4
OUTPUTS = ("log_probs", "entropy", "mean_logits", "is_top1")


@pytest.fixture(autouse=True)
def _trl_does_not_warn_of_what_is_experimental(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[tuple[Any, LigerLlama]]:
    """Policy and reference, each as transformers' model and as ours."""
    made = []
    for seed in range(2):
        folder = tmp_path_factory.mktemp("model")
        torch.manual_seed(seed)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
        config = transformers.LlamaConfig(vocab_size=V, num_hidden_layers=2, initializer_range=0.3, **sizes)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        theirs = transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager")
        made.append((theirs, LigerLlama.from_pretrained(folder, progress=False)))
    return made


def draw(*bounds: int) -> list[list[int]]:
    """Rows of token ids of random lengths."""
    generator = torch.Generator().manual_seed(sum(bounds))
    lengths = torch.randint(*bounds, (PAIRS,), generator=generator).tolist()
    return [torch.randint(2, V, (length,), generator=generator).tolist() for length in lengths]


def pairs() -> list[dict[str, list[int]]]:
    """Prompts and answers of uneven lengths, as TRL has them before its collator; an answer of one token."""
    columns = {"prompt_ids": draw(1, 5), "chosen_ids": [[7], *draw(2, 8)[1:]], "rejected_ids": draw(2, 9)}
    return [{name: column[i] for name, column in columns.items()} for i in range(PAIRS)]


def stand_in(**options: Any) -> Any:
    """What the trainers' methods read of themselves, in one process and on the CPU."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        gather=lambda tensor: tensor.reshape(-1) if tensor.dim() == 0 else tensor,
        gather_for_metrics=lambda tensor: tensor,
        reduce=lambda tensor, **_: tensor,
        autocast=lambda: mock.MagicMock(),
    )
    trainer = {
        "accelerator": accelerator,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "aux_loss_enabled": False,
        "precompute_ref_logps": False,
    }
    return SimpleNamespace(**{**trainer, **options})


def prepared(model: Any, outputs: tuple[str, ...] = OUTPUTS, **options: Any) -> Any:
    """A model with TRL's head and without gradients."""
    model.__dict__.pop("forward", None)
    utils.add_fused_lm_head(model, outputs=outputs, **options)
    model.zero_grad()
    return model.train()


def assert_same_gradients(theirs: Any, ours: LigerLlama) -> None:
    parameters = dict(theirs.named_parameters())
    for name, expression in weight_map(ours.config).entries.items():
        want = expression.pack({each: parameters[each].grad for each in expression.names()})
        got = ours.get_parameter(name).grad
        assert want.abs().max() > 0, name
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * want.abs().max().item(), msg=name)


def trained(ours: LigerLlama, batch: dict[str, Tensor], function: Any) -> tuple[Tensor, Any]:
    """Loss and metrics, with gradients in the model."""
    ours.zero_grad()
    loss, metrics = ours(**batch, loss_function=function).loss
    loss.backward()
    return loss.detach(), metrics


DPO_CASES = {
    **{
        name: ({"loss_types": [name]}, {"loss_type": name})
        for name in ("sigmoid", "hinge", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop")
    },
    "robust": (
        {"loss_types": ["robust"], "label_smoothing": 0.2},
        {"loss_type": "robust", "label_smoothing": 0.2},
    ),
    "exo_pair": (
        {"loss_types": ["exo_pair"], "label_smoothing": 0.2},
        {"loss_type": "exo_pair", "label_smoothing": 0.2},
    ),
    # TRL divides both by the number of tokens.
    "ipo": ({"loss_types": ["ipo"]}, {"loss_type": "ipo", "average_log_prob": True}),
    "sigmoid_norm": ({"loss_types": ["sigmoid_norm"]}, {"loss_type": "sigmoid", "average_log_prob": True}),
    "sft": (
        {"loss_types": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]},
        {"compute_nll_loss": True, "alpha": 0.7},
    ),
}


@pytest.mark.parametrize(("options", "arguments"), DPO_CASES.values(), ids=DPO_CASES)
def test_dpo(models, options, arguments):
    (theirs, ours), (ref_theirs, ref_ours) = models
    prepared(ref_theirs, ("log_probs",)).eval()
    args = SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=0.05)
    trainer = stand_in(
        **{
            "model": prepared(theirs), "ref_model": ref_theirs, "args": args, "beta": 0.3, "ld_alpha": None,
            "label_smoothing": 0.0, "loss_weights": [1.0], "use_weighting": False, "f_divergence_type": "reverse_kl",
            **options,
        }
    )  # fmt: skip
    collated = dpo.DataCollatorForPreference(pad_token_id=0)(pairs())
    want = dpo.DPOTrainer._compute_loss(trainer, theirs, collated, False)
    want.backward()

    batch = preference_batch(collated)
    ref_log_probs = ref_ours(**batch, return_log_probs=True).log_probs.detach()
    loss = LigerFusedLinearDPOLoss(beta=0.3, **arguments)
    got, metrics = trained(ours, batch, lambda x, w, target: loss(w, x, target, ref_log_probs=ref_log_probs))
    torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-6)
    assert_same_gradients(theirs, ours)

    logged = {name: torch.tensor(values[-1]) for name, values in trainer._metrics["train"].items()}
    torch.testing.assert_close(metrics.accuracies.mean(), logged["rewards/accuracies"])
    if not loss.average_log_prob:  # TRL's are of sums in any case
        for side in ("chosen", "rejected"):
            for name in ("logps", "rewards"):
                mine = getattr(metrics, f"{side}_{name}").mean()
                torch.testing.assert_close(mine, logged[f"{name}/{side}"], rtol=1e-5, atol=1e-5)
        margins = (metrics.chosen_rewards - metrics.rejected_rewards).mean()
        torch.testing.assert_close(margins, logged["rewards/margins"], rtol=1e-5, atol=1e-5)
    if loss.compute_nll_loss:
        assert metrics.nll_loss > 0


@pytest.mark.parametrize("name", ["aot", "aot_unpaired", "sft", "sigmoid_norm"])
def test_loss_types_of_dpo_that_are_not_here(name):
    with pytest.raises(ValueError, match=rf"loss_type must be one of .* got '{name}'"):
        LigerFusedLinearDPOLoss(loss_type=name)


def concatenating() -> list[dict[str, list[int]]]:
    """The pairs as TRL's older trainers have them: prompt and answer together, with labels."""
    made = []
    for pair in pairs():
        row = {"prompt_input_ids": pair["prompt_ids"], "prompt_attention_mask": [1] * len(pair["prompt_ids"])}
        for side in ("chosen", "rejected"):
            row[f"{side}_input_ids"] = pair["prompt_ids"] + pair[f"{side}_ids"]
            row[f"{side}_labels"] = [-100] * len(pair["prompt_ids"]) + pair[f"{side}_ids"]
            row[f"{side}_attention_mask"] = [1] * len(row[f"{side}_input_ids"])
        made.append(row)
    return made


def older(cls: Any, model: Any, **options: Any) -> tuple[Tensor, dict[str, Any], dict[str, float]]:
    """Loss, collated batch and metrics of a trainer of TRL's that builds the logits."""
    trainer = stand_in(is_encoder_decoder=False, pad_token_id=0, padding_value=0, **options)
    trainer.concatenated_inputs, trainer.get_batch_logps = cls.concatenated_inputs, cls.get_batch_logps
    for name in ("concatenated_forward", "cpo_loss", "odds_ratio_loss"):
        if hasattr(cls, name):
            setattr(trainer, name, getattr(cls, name).__get__(trainer))
    collated = experimental.DPODataCollatorWithPadding(pad_token_id=0)(concatenating())
    model.__dict__.pop("forward", None)
    model.zero_grad()
    loss, metrics = cls.get_batch_loss_metrics(trainer, model.train(), collated)
    loss.backward()
    return loss.detach(), collated, metrics


def assert_same_metrics(metrics: Any, logged: dict[str, float]) -> None:
    for side in ("chosen", "rejected"):
        for name in ("logps", "rewards"):
            assert getattr(metrics, f"{side}_{name}").mean().item() == pytest.approx(logged[f"{name}/{side}"], rel=1e-4)
    assert metrics.nll_loss.item() == pytest.approx(logged["nll_loss"], rel=1e-4)
    assert metrics.accuracies.mean().item() == logged["rewards/accuracies"]


CPO_CASES = {
    "sigmoid": ({"loss_type": "sigmoid"}, LigerFusedLinearCPOLoss(beta=0.3, alpha=0.7)),
    "smoothed": (
        {"loss_type": "sigmoid", "label_smoothing": 0.2},
        LigerFusedLinearCPOLoss(beta=0.3, alpha=0.7, label_smoothing=0.2),
    ),
    "hinge": ({"loss_type": "hinge"}, LigerFusedLinearCPOLoss(beta=0.3, alpha=0.7, loss_type="hinge")),
    "ipo": (
        {"loss_type": "ipo"},
        LigerFusedLinearCPOLoss(beta=0.3, alpha=0.7, loss_type="ipo", average_log_prob=True),
    ),
    "without NLL": (
        {"loss_type": "sigmoid", "cpo_alpha": 0},
        LigerFusedLinearCPOLoss(beta=0.3, compute_nll_loss=False),
    ),
    "simpo": (
        {"loss_type": "simpo", "simpo_gamma": 0.4, "label_smoothing": 0.1, "cpo_alpha": 0},
        LigerFusedLinearSimPOLoss(beta=0.3, gamma=0.4, label_smoothing=0.1, compute_nll_loss=False),
    ),
    "simpo with NLL": (
        {"loss_type": "simpo", "simpo_gamma": 0.4},
        LigerFusedLinearSimPOLoss(beta=0.3, gamma=0.4, alpha=0.7),
    ),
}


@pytest.mark.parametrize(("options", "loss"), CPO_CASES.values(), ids=CPO_CASES)
def test_cpo_and_simpo(models, options, loss):
    theirs, ours = models[0]
    options = {"beta": 0.3, "alpha": 0.0, "cpo_alpha": 0.7, "label_smoothing": 0.0, **options}
    want, collated, logged = older(cpo.CPOTrainer, theirs, **options)
    got, metrics = trained(ours, preference_batch(collated), lambda x, w, target: loss(w, x, target))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert_same_gradients(theirs, ours)
    assert_same_metrics(metrics, logged)


def test_orpo(models):
    theirs, ours = models[0]
    want, collated, logged = older(orpo.ORPOTrainer, theirs, beta=0.3)
    batch = preference_batch(collated)
    # TRL's NLL is that of the prompt, too.
    every = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    nll_target = torch.nn.functional.pad(every[:, 1:], (0, 1), value=-100)
    loss = LigerFusedLinearORPOLoss(beta=0.3)
    got, metrics = trained(ours, batch, lambda x, w, target: loss(w, x, target, None, nll_target))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert_same_gradients(theirs, ours)
    assert_same_metrics(metrics, logged)
    for name in ("log_odds_ratio", "log_odds_chosen"):
        assert getattr(metrics, name).item() == pytest.approx(logged[name], rel=1e-4)


@pytest.mark.parametrize("labels", [[True, False, False, True], [True] * 4, [False] * 4], ids=str)
@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
def test_kto(models, kind, labels):
    (theirs, ours), (ref_theirs, ref_ours) = models
    prepared(ref_theirs, ("log_probs",)).eval()
    trainer = stand_in(
        model=prepared(theirs), ref_model=ref_theirs, args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        beta=0.3, loss_type=kind, calculate_KL=kind == "kto", desirable_weight=1.3, undesirable_weight=0.8,
    )  # fmt: skip
    trainer._compute_kl_logps = kto.KTOTrainer._compute_kl_logps.__get__(trainer)
    examples = [
        {
            "prompt_ids": pair["prompt_ids"], "completion_ids": pair["chosen_ids"],
            "KL_completion_ids": pairs()[i - 1]["rejected_ids"], "label": label,
        }
        for i, (pair, label) in enumerate(zip(pairs(), labels, strict=True))
    ]  # fmt: skip
    collated = kto.DataCollatorForUnpairedPreference(pad_token_id=0)(examples)
    want = kto.KTOTrainer._compute_loss(trainer, theirs, collated, False)
    want.backward()

    batch = preference_batch(collated)
    z = None
    if kind == "kto":
        mismatched = preference_batch({name[3:]: each for name, each in collated.items() if name.startswith("KL_")})
        with torch.no_grad():
            policy, reference = (model(**mismatched, return_log_probs=True).log_probs for model in (ours, ref_ours))
        z = (policy - reference).sum(-1).mean().clamp_min(0)
    ref_log_probs = ref_ours(**batch, return_log_probs=True).log_probs.detach()
    loss = LigerFusedLinearKTOLoss(beta=0.3, use_ref_model=True, desirable_weight=1.3, undesirable_weight=0.8)
    got, metrics = trained(
        ours,
        batch,
        lambda x, w, target: loss(x, w, target, preference_labels=collated["label"], kl=z, ref_log_probs=ref_log_probs),
    )
    torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-6)
    assert_same_gradients(theirs, ours)
    logged = trainer._metrics["train"]
    assert (0 if z is None else z.item()) == pytest.approx(logged["kl"][-1], rel=1e-4)
    for side, count in (("chosen", sum(labels)), ("rejected", len(labels) - sum(labels))):
        for name in ("logps", "rewards"):
            total = getattr(metrics, f"{side}_{name}_sum").item()
            assert total == pytest.approx(logged[f"{name}/{side}"][-1] * count if count else 0, rel=1e-4)


GRPO_CASES = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1},
    "sapo": {"loss_type": "sapo"},
    "luspo": {"loss_type": "luspo"},
    "vespo": {"loss_type": "vespo"},
    "sequence": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "luspo of sequences": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "two-sided": {"loss_type": "bnpo", "delta": 1.25},
    "corrected KL": {"loss_type": "dapo", "use_bias_correction_kl": True},
    "no KL": {"loss_type": "dapo", "beta": 0.0},
    "warm": {"loss_type": "dapo", "temperature": 0.7},
    "sampler": {"loss_type": "grpo", "vllm": True},
    "vespo and sampler": {"loss_type": "vespo", "vllm": True},
}


@pytest.mark.cases(15)
@pytest.mark.parametrize("case", GRPO_CASES.values(), ids=GRPO_CASES)
@pytest.mark.parametrize("on_policy", [False, True])
def test_grpo(models, case, on_policy):
    theirs, ours = models[0]
    options = {"beta": 0.3, "epsilon_low": 0.2, "epsilon_high": 0.2, "temperature": 1.0, **case}
    options = {"importance_sampling_level": "token", "delta": None, "use_bias_correction_kl": False, **options}
    vllm = options.pop("vllm", False)
    prepared(theirs, ("log_probs", "entropy"), temperature=options["temperature"])
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.tensor(each) for each in draw(1, 5)]
    completions = [torch.tensor(each) for each in draw(2, 9)]
    prompt_ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left")
    completion_ids = torch.nn.utils.rnn.pad_sequence(completions, batch_first=True)
    shape = completion_ids.shape
    batch = {
        "prompt_ids": prompt_ids,
        "prompt_mask": (prompt_ids != 0).long(),
        "completion_ids": completion_ids,
        "completion_mask": (completion_ids != 0).long(),
        "advantages": torch.randn(PAIRS, generator=generator),
        "num_items_in_batch": (completion_ids != 0).sum(),
    }
    input_ids = torch.cat([prompt_ids, completion_ids], 1)
    attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    labels = torch.cat([torch.full_like(prompt_ids, -100), completion_ids.masked_fill(completion_ids == 0, -100)], 1)
    with torch.no_grad():
        log_probs = ours(input_ids, labels=labels, attention_mask=attention_mask, return_log_probs=True).log_probs
        log_probs = log_probs[:, prompt_ids.shape[1] - 1 : -1]
        noise = torch.randn(2, *shape, generator=generator)
        batch["ref_per_token_logps"] = log_probs + 0.5 * noise[0]
        if not on_policy:
            batch["old_per_token_logps"] = log_probs + 0.2 * noise[1]
    if vllm:
        batch["importance_sampling_ratio"] = torch.rand(shape, generator=generator) + 0.5
        batch["importance_sampling_ratio"][completion_ids == 0] = 1.0
    trainer = stand_in(
        **{name: options[name] for name in ("beta", "epsilon_low", "epsilon_high", "loss_type")},
        importance_sampling_level=options["importance_sampling_level"], model=theirs, max_completion_length=10,
        args=SimpleNamespace(
            delta=options["delta"], use_bias_correction_kl=options["use_bias_correction_kl"], steps_per_generation=1,
            sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
            vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
        ),
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=vllm,
        vllm_importance_sampling_correction=True, current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        get_gamma_weights=grpo.GRPOTrainer.get_gamma_weights,
    )  # fmt: skip
    trainer._get_per_token_logps_and_entropies = (
        grpo.GRPOTrainer._get_per_token_logps_and_entropies.__wrapped__.__get__(trainer)
    )
    want = grpo.GRPOTrainer._compute_loss(trainer, theirs, batch)
    want.backward()

    length = 10 if options["loss_type"] == "dr_grpo" else None
    loss = LigerFusedLinearGRPOLoss(**options, max_completion_length=length)
    given = {name: batch.get(name) for name in ("ref_per_token_logps", "old_per_token_logps")}
    if options["beta"] == 0:
        del given["ref_per_token_logps"]

    def function(x: Tensor, weight: Tensor, _: Tensor) -> Any:
        completed = slice(prompt_ids.shape[1] - 1, -1)
        return loss(
            x[:, completed], weight, completion_ids, batch["completion_mask"], batch["advantages"], **given,
            vllm_is_ratio=batch.get("importance_sampling_ratio"),
        )  # fmt: skip

    got, metrics = trained(ours, {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}, function)
    torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-6)
    assert_same_gradients(theirs, ours)
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    if options["beta"]:
        assert metrics[0].item() == pytest.approx(logged["kl"], rel=1e-4)
    clipped = logged.get("clip_ratio/region_mean", logged.get("cispo_clip_ratio", 0.0))
    if options["importance_sampling_level"] == "token":  # TRL's is of sequences otherwise, ours of tokens
        assert metrics[-1].item() == pytest.approx(clipped, abs=1e-6)
        assert clipped > 0 or on_policy or options["loss_type"] in ("sapo", "vespo")


@pytest.mark.parametrize("merges", [[], [("i", "Ġ")]], ids=["bytes", "a token over the prompt's end"])
def test_pairs_are_tokenized_as_by_trl(tokenizer, merges):  # noqa: F811
    """Texts and chats, with the prompt apart or as what both answers begin with; the collator's batch; older names."""
    tokenizer = copy.deepcopy(tokenizer)
    vocab = tokenizer.backend.get_vocab()
    tokenizer.backend.model = BPE(vocab | {"".join(pair): len(vocab) for pair in merges}, merges)
    backend = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, bos_token="<s>", eos_token="</s>", chat_template=tokenizer.chat_template
    )
    texts = [
        {"prompt": "Hi", "chosen": " you", "rejected": "!"},
        {"prompt": "Hello", "chosen": "!", "rejected": " all"},
    ]
    by_role = lambda role, text: [{"role": role, "content": text}]
    chats = [
        {"prompt": by_role("user", each["prompt"])}
        | {side: by_role("assistant", each[side]) for side in ("chosen", "rejected")}
        for each in texts
    ]
    together = [{side: each["prompt"] + each[side] for side in ("chosen", "rejected")} for each in chats]
    for examples in (texts, chats, together):
        rows = datasets.Dataset.from_list(examples)
        trainer = stand_in(_tokenizer=backend)
        arguments = SimpleNamespace(dataset_num_proc=None, max_length=None)
        rows = dpo.DPOTrainer._prepare_dataset(trainer, rows, backend, arguments, "train").to_list()
        collated = dpo.DataCollatorForPreference(pad_token_id=backend.eos_token_id)(rows)
        batch = preference_batch(examples, tokenizer)
        ids = preference_batch(rows, tokenizer)
        assert all(torch.equal(tensor, ids[name]) for name, tensor in preference_batch(collated).items())
        if examples is texts:
            assert all(torch.equal(tensor, ids[name]) for name, tensor in batch.items())
            assert (batch["labels"][0] == -100).tolist()[:4] == [True, True, not merges, False]
        else:  # TRL learns what the template writes behind an answer: here a line's end
            for ours, theirs in zip(batch["labels"], ids["labels"], strict=True):
                learned = theirs[theirs != -100].tolist()
                assert ours[ours != -100].tolist() == learned[:-1]
                assert tokenizer.decode(learned[-1:]) == "\n"
            mine = batch["attention_mask"].sum(1)
            for row, length in enumerate(mine):
                assert torch.equal(batch["input_ids"][row, :length], ids["input_ids"][row, :length])
    old = concatenating()
    assert all(torch.equal(each, preference_batch(pairs())[name]) for name, each in preference_batch(old).items())


def test_pairs_with_images_as_trl_collates_them(tmp_path):
    """Log-probabilities of the answers are those of each row alone, made by our processor."""
    model = image_model()
    model.save_pretrained(tmp_path)
    names = {"boi_token": "<boi>", "image_token": "<img>", "eoi_token": "<eoi>"}
    hf_tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), extra_special_tokens=names, pad_token="<end>"
    )
    pixels = gemma3.Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    collate = dpo.DataCollatorForVisionPreference(
        transformers.Gemma3Processor(pixels, hf_tokenizer, image_seq_length=4)
    )
    pairs = [
        {"images": [picture(20, 12)], "prompt": "<boi>What?", "chosen": " Noise.", "rejected": " A cat, I think."},
        {"images": [picture(9, 30, seed=1)], "prompt": "See <boi> there", "chosen": " now", "rejected": " "},
    ]
    batch = preference_batch(collate([dict(pair) for pair in pairs]))
    found = model(**batch, return_log_probs=True).log_probs.sum(1)
    for row, (answer, pair) in enumerate((answer, pair) for answer in ("chosen", "rejected") for pair in pairs):
        alone = model.processor([pair["prompt"] + pair[answer]], images=pair["images"], bos=False)
        labels = alone["input_ids"].clone()
        labels[:, : -len(pair[answer])] = -100  # a token is a byte
        want = model(**alone, labels=labels, return_log_probs=True).log_probs.sum()
        torch.testing.assert_close(found[row], want)
    with pytest.raises(ValueError, match=r"pair 1: must be text, got images\. Pass the model's processor"):
        preference_batch(pairs, model.tokenizer)
