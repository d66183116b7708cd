"""TRL's trainers on the models of `liger_models.hf`, beside the same trainers on the models of transformers."""

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import liger_models.hf
from liger_models.kernels.options import KernelOptions

from ..arch.families import (
    FIRST_CASES,
    LIMIT,
    assert_same_gradients,
    error,
    make_folder,
    of_each_kind,
    text_sizes,
    tokens,
)
from ..late import Late, transformers
from .test_trainer import load, words_tokenizer

trl = Late("trl", needs="TRL is not installed")
orpo = Late("trl.experimental.orpo", needs="TRL is not installed")
cpo = Late("trl.experimental.cpo", needs="TRL is not installed")
gkd = Late("trl.experimental.gkd", needs="TRL is not installed")
online_dpo = Late("trl.experimental.online_dpo", needs="TRL is not installed")
tpo = Late("trl.experimental.tpo", needs="TRL is not installed")
datasets = Late("datasets", needs="datasets is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # TRL's and transformers'

LENGTHS = (9, 4, 12, 7)
SHARED = {
    "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True, "save_strategy": "no",
    "logging_steps": 1, "learning_rate": 1e-2, "max_steps": 10, "per_device_train_batch_size": 4,
}  # fmt: skip
CHAT = (
    "{% for message in messages %}{% if message.role == 'user' %}w1 {{ message.content }} {% else %}"
    "{% generation %}{{ message.content }} w2 {% endgeneration %}{% endif %}{% endfor %}"
)


def words(n: int, seed: int = 0) -> str:
    ids = torch.randint(3, 101, (n,), generator=torch.Generator().manual_seed(100 * seed + n))
    return " ".join(f"w{i}" for i in ids.tolist())


def texts() -> Any:
    return datasets.Dataset.from_list([{"text": words(n)} for n in LENGTHS])


def chats() -> Any:
    turns = [(words(n), words(n + 2), words(3), words(13 - n)) for n in LENGTHS]
    roles = ("user", "assistant", "user", "assistant")
    messages = [[{"role": r, "content": c} for r, c in zip(roles, turn, strict=True)] for turn in turns]
    return datasets.Dataset.from_list([{"messages": each} for each in messages])


def pairs() -> Any:
    rows = [{"prompt": words(n), "chosen": f" {words(n + 2)}", "rejected": f" {words(5)}"} for n in (3, 4, 6, 2)]
    return datasets.Dataset.from_list(rows)


def judged() -> Any:
    rows = [{"prompt": words(n), "completion": f" {words(n + 2)}", "label": n % 2 == 0} for n in (3, 4, 6, 5)]
    return datasets.Dataset.from_list(rows)


@pytest.fixture
def folder(request, root, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_folder("llama", getattr(request, "param", "gqa"), root)


def lines(run: Any) -> list[dict[str, float]]:
    return [line for line in run.state.log_history if "loss" in line]


def assert_trains_the_same(make: Callable[[bool], Any], falls: bool = True) -> Any:
    """Steps with transformers' model and with ours: the first to rounding, the others close. Returns our run."""
    runs = []
    for ours in (False, True):
        runs.append(make(ours))  # which sets the seed
        runs[-1].train()
    theirs, ours = map(lines, runs)
    assert len(ours) == runs[1].args.max_steps
    for step, (want, got) in enumerate(zip(theirs, ours, strict=True)):
        rel = LIMIT if step == 0 else 1e-3
        assert want.keys() == got.keys()
        for name in got.keys() - {
            "step_time",
            "grad_norm",
            "logits/chosen",
            "logits/rejected",
        }:  # means over padding, too
            assert got[name] == pytest.approx(want[name], rel=rel, abs=1e-5), (step, name)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=10 * rel), step
        assert got["grad_norm"] > 0
    assert not falls or ours[-1]["loss"] < 0.7 * ours[0]["loss"]
    return runs[1]


def assert_saves_a_checkpoint(run: Any) -> None:
    """Transformers' own class reads it and computes the same."""
    run.save_model("saved")
    loaded = load(Path("saved"), ours=False)
    assert type(loaded).__module__.startswith("transformers.")
    ids = torch.arange(3, 12)[None]
    assert error(loaded(ids).logits, run.model.eval()(ids).logits) <= LIMIT


@pytest.mark.cases(7)
@pytest.mark.parametrize("hf", of_each_kind(FIRST_CASES), indirect=True, ids="-".join)
def test_the_head_that_trl_gives_a_model(hf):
    """It calls the body, and computes the loss from the head's weight and the configuration."""
    from trl.trainer.utils import add_fused_lm_head

    arch, variant, theirs, ours = hf
    if theirs.base_model is theirs:
        pytest.skip("transformers has no module for this body without its head")
    theirs.__dict__.pop("forward", None)
    ids = tokens(arch, variant, 2, 12)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[1, -3:], mask[1, -3:] = -100, 0
    # TRL reads the number of experts by the name `num_experts`, which the configuration of DeepSeek V3 does not have.
    routes = "num_experts_per_tok" in text_sizes(arch, variant) and hasattr(
        theirs.config.get_text_config(), "num_experts"
    )
    routed = {"output_router_logits": True} if routes else {}
    outs = []
    for model in (theirs, ours.train()):
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        outs.append(model(ids, attention_mask=mask, labels=labels, fused_lm_head=True, **routed))
        outs[-1].loss.backward()
    want, got = outs
    for name in ("loss", "log_probs", "entropy", "aux_loss"):
        one, other = getattr(got, name), getattr(want, name)
        assert (one is None and other is None) or error(one, other) <= LIMIT, name
    assert torch.equal(got.is_top1, want.is_top1)
    del theirs.forward, ours.forward
    assert_same_gradients(ours.model.decoder, theirs)


@pytest.fixture
def rows(monkeypatch) -> list[int]:
    """The number of rows of each matrix product that writes logits of the fused loss."""
    from liger_models.kernels.loss import row_chunks

    seen, write = [], row_chunks.write_logits
    monkeypatch.setattr(row_chunks, "write_logits", lambda x, *rest: seen.append(len(x)) or write(x, *rest))
    return seen


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """The warnings of the head of SFT."""
    found: list[str] = []
    monkeypatch.setattr("liger_models.hf.trl.logger.warning_once", lambda text: text in found or found.append(text))
    return found


HEADS = [("cohere2", "released"), ("gemma2", "gqa"), ("granite", "tied"), ("mixtral", "aux"), ("phimoe", "window")]


@pytest.mark.cases(5)
@pytest.mark.parametrize("shifted", [False, True], ids=["labels", "shifted"])
@pytest.mark.parametrize("hf", HEADS, indirect=True, ids="-".join)
def test_the_head_of_sft(hf, rows, monkeypatch, shifted):
    """With a scale, a cap and experts: every output, and gradients of both losses. Logits are computed once."""
    from trl.trainer.utils import add_fused_lm_head

    monkeypatch.setattr("liger_models.layers.lm_head.ROW_MULTIPLE", 4)
    arch, variant, theirs, ours = hf
    theirs.__dict__.pop("forward", None)
    ids = tokens(arch, variant, 2, 12)
    labels = torch.where(torch.arange(12) % 3 == 1, ids, -100)
    given = {"shift_labels" if shifted else "labels": labels, "num_items_in_batch": torch.tensor(5)}
    routed = {"output_router_logits": True} if variant == "aux" else {}
    for uniform in (True, False):
        outs = []
        for model in (theirs, ours.train()):
            add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
            out = model(ids, fused_lm_head=True, **given, **routed)
            per_token = -out.log_probs if uniform else -out.log_probs * out.log_probs.exp().detach() - out.entropy
            (out.loss + per_token.sum() / 3).backward()
            outs.append(out)
        want, got = outs
        assert got.keys() == want.keys()
        for name in ("loss", "log_probs", "entropy", *(["aux_loss"] if routed else [])):
            assert got[name].shape == want[name].shape
            assert error(got[name], want[name]) <= LIMIT, name
        assert torch.equal(got.is_top1, want.is_top1)
        assert torch.equal(got.label_mask, want.label_mask)
        del theirs.forward, ours.forward
        assert_same_gradients(ours.model.decoder, theirs)
        assert rows == [8] * (1 if uniform else 3)


HEADS_OF = {
    "DPO": {"outputs": ("log_probs", "entropy", "mean_logits", "is_top1")},
    "GRPO": {"outputs": ("log_probs", "entropy"), "temperature": 0.7},
    "reference": {},
}


@pytest.mark.cases(6)
@pytest.mark.parametrize("settings", HEADS_OF.values(), ids=HEADS_OF)
@pytest.mark.parametrize("hf", [*HEADS[:3], HEADS[-1]], indirect=True, ids="-".join)
def test_the_heads_of_other_trainers(hf, rows, said, monkeypatch, settings):
    """Every output, and the gradients of a loss with a factor for each target. Logits are computed twice."""
    from trl.trainer.utils import add_fused_lm_head

    monkeypatch.setattr("liger_models.layers.lm_head.ROW_MULTIPLE", 4)
    arch, variant, theirs, ours = hf
    theirs.__dict__.pop("forward", None)
    ids = tokens(arch, variant, 2, 12)
    labels = torch.where(torch.arange(12) % 3 == 1, ids, -100)
    outs = []
    for model in (theirs, ours.train()):
        add_fused_lm_head(model, **settings)
        out = model(ids, fused_lm_head=True, labels=labels)
        factors = torch.arange(out.log_probs.numel()).view(out.log_probs.shape) / 10
        (out.loss + (out.log_probs * factors).sum() - (0 if out.entropy is None else out.entropy.sum())).backward()
        outs.append(out)
        del model.forward
    want, got = outs
    assert got.keys() == want.keys()
    for name in got.keys() - {"is_top1", "label_mask"}:
        assert error(got[name], want[name]) <= LIMIT, name
    assert got.is_top1 is None or torch.equal(got.is_top1, want.is_top1)
    assert_same_gradients(ours.model.decoder, theirs)
    # Only the mean of capped logits is left to TRL.
    falls_back = "mean_logits" in settings.get("outputs", ()) and ours.lm_head.softcap is not None
    assert rows == ([] if falls_back else [8, 8])
    assert len(said) == falls_back


OLDER = """
def patch(model):
    original_forward = model.forward
    def _chunked_ce_forward(self, *args, **kwargs):
        return original_forward(*args, **kwargs)
    model.forward = types.MethodType(_chunked_ce_forward, model)
"""
"""The call that `SFTTrainer` of TRL before 1.15 makes to change a model's loss."""


@pytest.mark.parametrize("hf", [("mixtral", "aux")], indirect=True, ids="-".join)
def test_the_head_of_sft_before_trl_1_15(hf, rows, said):
    arch, variant, theirs, ours = hf
    scope = {"__name__": "trl.trainer.sft_trainer", "types": types, "_ChunkedCELMHeadOutput": types.SimpleNamespace}
    exec(OLDER, scope)
    scope["patch"](ours.train())
    ids = tokens(arch, variant, 2, 12)
    labels = torch.where(torch.arange(12) % 3 == 1, ids, -100)
    out = ours(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(5), output_router_logits=True)
    out.loss.backward()
    assert (rows, said) == ([24], [])
    want = theirs(ids, labels=labels, num_items_in_batch=torch.tensor(5), output_router_logits=True)
    want.loss.backward()
    log_probs, valid = want.logits[:, :-1].log_softmax(-1), labels[:, 1:] != -100
    assert error(out.loss, want.loss) <= LIMIT
    assert error(out.aux_loss, want.aux_loss) <= LIMIT
    assert error(out.entropy_sum, torch.special.entr(log_probs.exp()).sum(-1)[valid].sum()) <= LIMIT
    assert out.num_correct_tokens == (log_probs.argmax(-1) == labels[:, 1:]).sum()
    assert out.num_valid_tokens == valid.sum() == 8
    assert_same_gradients(ours.model.decoder, theirs)
    # Without labels, and where the fused loss is off, the function of TRL runs.
    assert error(ours(input_ids=ids).logits, want.logits) <= LIMIT
    ours.model.decoder.kernels = KernelOptions(fused_linear_cross_entropy=False)
    assert not hasattr(ours(input_ids=ids, labels=labels), "entropy_sum")
    assert len(said) == 1


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packing": True, "max_length": 16},
        {"packing": True, "max_length": 16, "packing_strategy": "wrapped"},
        {"padding_free": True, "max_length": None},
        {"loss_type": "chunked_nll", "average_tokens_across_devices": False},
        {"label_smoothing_factor": 0.1},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "gradient_checkpointing": False},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_sft(folder, options, rows):
    run = assert_trains_the_same(
        lambda ours: trl.SFTTrainer(
            load(folder, ours), trl.SFTConfig("sft", **SHARED | options), train_dataset=texts(),
            processing_class=words_tokenizer(),
        ),
    )  # fmt: skip
    assert_saves_a_checkpoint(run)
    assert len(rows) == 10 * options.get("gradient_accumulation_steps", 1)


def test_the_loss_of_dft(folder, rows):
    """Its gradients differ between targets: from the second step on, the forward computes none."""

    def make(ours: bool) -> Any:
        arguments = trl.SFTConfig("sft", **SHARED, loss_type="dft")
        return trl.SFTTrainer(load(folder, ours), arguments, train_dataset=texts(), processing_class=words_tokenizer())

    assert_trains_the_same(make, falls=False)
    assert len(rows) == 20


def test_a_head_without_the_loss(folder, rows, said):
    """A model whose kernels are switched off, or whose head the user has replaced: TRL computes the loss."""

    class Head(torch.nn.Linear):
        pass

    def make(ours: bool, replaced: bool) -> Any:
        model = load(folder, ours)
        if replaced:
            head = Head(*reversed(model.lm_head.weight.shape), bias=False)
            head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
            model.set_output_embeddings(head)
        elif ours:
            model.model.decoder.kernels = KernelOptions(fused_linear_cross_entropy=False)
        arguments = trl.SFTConfig("sft", **SHARED | {"max_steps": 2})
        return trl.SFTTrainer(
            model, arguments, train_dataset=texts(), processing_class=words_tokenizer()
        )  # fmt: skip

    for replaced in (True, False):
        assert_trains_the_same(functools.partial(make, replaced=replaced), falls=False)
    assert rows == []
    assert [text.partition("because ")[2] for text in said] == [
        "the model has another head.",
        "fused_linear_cross_entropy is off.",
    ]


def test_liger_kernel_is_an_error(folder):
    """It would patch the layers when training starts."""
    scope: dict[str, Any] = {"__name__": "liger_kernel.transformers.monkey_patch"}
    exec("def norm(model): return getattr(model, model.base_model_prefix).norm", scope)
    with pytest.raises(ValueError, match="use_liger_kernel must be False"):
        scope["norm"](load(folder))


def test_sft_evaluates(folder, rows):
    """Losses and metrics of TRL, also with the logits that a user's metrics need."""

    def make(ours: bool, metrics: Any) -> Any:
        options = SHARED | {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}
        return trl.SFTTrainer(
            load(folder, ours), trl.SFTConfig("sft", **options), train_dataset=texts(), eval_dataset=texts(),
            processing_class=words_tokenizer(), compute_metrics=metrics,
        )  # fmt: skip

    for metrics in (None, lambda out: {"sum": float(out.predictions[out.label_ids != -100].sum())}):
        logs = []
        for ours in (False, True):
            run = make(ours, metrics)
            run.train()
            logs.append([line for line in run.state.log_history if "eval_loss" in line])
        for want, got in zip(*logs, strict=True):
            assert {"eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens"} <= got.keys()
            for name in want.keys() - {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}:
                assert got[name] == pytest.approx(want[name], rel=1e-3, abs=1e-4), name
    assert len(rows) == 2 * 2 * 3


def test_sft_of_the_turns_of_the_assistant(folder):
    tokenizer = words_tokenizer()
    tokenizer.chat_template = CHAT
    options = {"assistant_only_loss": True, "packing": True, "max_length": 32}
    run = assert_trains_the_same(
        lambda ours: trl.SFTTrainer(
            load(folder, ours), trl.SFTConfig("sft", **SHARED, **options), train_dataset=chats(),
            processing_class=tokenizer,
        )
    )  # fmt: skip
    labels = next(iter(run.get_train_dataloader()))["labels"]
    assert 0.3 < (labels == -100).float().mean() < 0.7


def test_sft_of_experts(root, tmp_path, monkeypatch, rows):
    """The auxiliary loss is TRL's, from the logits of the routers."""
    monkeypatch.chdir(tmp_path)
    folder = make_folder("mixtral", "aux", root)
    run = assert_trains_the_same(
        lambda ours: trl.SFTTrainer(
            load(folder, ours), trl.SFTConfig("sft", **SHARED), train_dataset=texts(),
            processing_class=words_tokenizer(),
        )
    )  # fmt: skip
    assert lines(run)[0]["aux_loss"] > 0
    assert len(rows) == 10
    assert_saves_a_checkpoint(run)


def test_sft_resumes(folder):
    """The same bits as without a break; the weights were in the file, not in the model."""

    def run(resume: str | None = None) -> Any:
        model = load(folder)
        if resume:
            for parameter in model.parameters():
                parameter.data.add_(1.0)
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        made = trl.SFTTrainer(
            model, trl.SFTConfig("sft", **SHARED | options), train_dataset=texts(), processing_class=words_tokenizer()
        )
        made.train(resume_from_checkpoint=resume)
        return made.model

    whole, resumed = run(), run("sft/checkpoint-2")
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, resumed.get_parameter(name)), name


@pytest.mark.parametrize("kind", ["DPO", "KTO", "ORPO", "CPO"])
def test_preferences(folder, kind, rows):
    home = {"ORPO": orpo, "CPO": cpo}.get(kind, trl)

    def make(ours: bool) -> Any:
        own = {"ref_model": load(folder, ours)} if kind in ("DPO", "KTO") else {}
        arguments = getattr(home, f"{kind}Config")(kind, **SHARED)
        data = judged() if kind == "KTO" else pairs()
        return getattr(home, f"{kind}Trainer")(
            load(folder, ours), args=arguments, train_dataset=data, processing_class=words_tokenizer(), **own
        )

    assert_saves_a_checkpoint(assert_trains_the_same(make))
    assert bool(rows) == (kind in ("DPO", "KTO"))


@pytest.mark.parametrize("margin", [False, True])
def test_rewards(folder, margin):
    """The class for classification, of a causal model's checkpoint; its scores are those of transformers' model."""
    load(folder, ours=False).save_pretrained("causal")
    torch.manual_seed(0)
    auto = transformers.AutoModelForSequenceClassification
    auto.from_pretrained("causal", num_labels=1, pad_token_id=0, dtype=torch.float32).save_pretrained("rewards")

    def make(ours: bool) -> Any:
        made = liger_models.hf.LlamaForSequenceClassification if ours else auto
        model = made.from_pretrained("rewards", dtype=torch.float32)
        arguments = trl.RewardConfig("reward", **SHARED)
        data = pairs().add_column("margin", [0.1, 0.7, 0.0, 0.3]) if margin else pairs()
        return trl.RewardTrainer(model, arguments, train_dataset=data, processing_class=words_tokenizer())

    run = assert_trains_the_same(make)
    run.save_model("saved")
    ids = torch.arange(3, 12)[None]
    saved = auto.from_pretrained("saved", dtype=torch.float32)
    assert type(saved).__module__.startswith("transformers.")
    assert error(saved(ids).logits, run.model.eval()(ids).logits) <= LIMIT


PROMPTS = [{"prompt": words(3, seed)} for seed in range(8)]
GROUPS = {
    "num_generations": 4,
    "max_completion_length": 8,
    "num_iterations": 2,
    "beta": 0.1,
    "max_steps": 2,
    "epsilon": 10.0,
}


def reward(completions: list[str], **_: Any) -> list[float]:
    return [len(set(each.split())) + len(each) / 10 for each in completions]


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_groups_of_completions(folder, kind, reasons, rows):
    """The same completions, which the engine generates, and steps; the loss of a batch's second step is not 0."""
    run = assert_trains_the_same(
        lambda ours: getattr(trl, f"{kind}Trainer")(
            load(folder, ours), reward, args=getattr(trl, f"{kind}Config")(kind, **SHARED | GROUPS),
            train_dataset=datasets.Dataset.from_list(PROMPTS), processing_class=words_tokenizer(),
        ),
        falls=False,
    )  # fmt: skip
    first, second = lines(run)
    assert first["reward"] > 0
    assert abs(second["loss"]) > 0.01
    assert {*reasons} == {None}
    assert rows
    assert_saves_a_checkpoint(run)


@pytest.mark.parametrize("beta", [1.0, 0.5, 0.0])
def test_distillation(folder, beta):
    """On the student's own completions, whose logits are compared with the teacher's."""

    def make(ours: bool) -> Any:
        options = {"beta": beta, "max_completion_length": 8, "max_steps": 2}
        return trl.DistillationTrainer(
            load(folder, ours), teacher_model=teacher(folder, ours),
            args=trl.DistillationConfig("distillation", **SHARED | options),
            train_dataset=datasets.Dataset.from_list(PROMPTS), processing_class=words_tokenizer(),
        )  # fmt: skip

    run = assert_trains_the_same(make, falls=False)
    assert lines(run)[0]["loss"] > 0.01
    assert_saves_a_checkpoint(run)


def teacher(folder: Path, ours: bool) -> Any:
    """The model of the folder with other weights."""
    model, generator = load(folder, ours=False), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained("teacher")
    return load(Path("teacher"), ours)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_gkd(folder, share):
    """On the data's answers, and on the student's own."""
    tokenizer = words_tokenizer()
    tokenizer.chat_template = CHAT

    def make(ours: bool) -> Any:
        options = {"lmbda": share, "max_new_tokens": 6, "max_steps": 3}
        return gkd.GKDTrainer(
            load(folder, ours), teacher_model=teacher(folder, ours), args=gkd.GKDConfig("gkd", **SHARED | options),
            train_dataset=chats(), processing_class=tokenizer,
        )  # fmt: skip

    assert lines(assert_trains_the_same(make, falls=False))[0]["loss"] > 0.01


def test_tpo(folder):
    """Triples with a third answer to imitate."""
    rows = [{**row, "reference": f" {words(6, number)}"} for number, row in enumerate(pairs())]
    assert_trains_the_same(
        lambda ours: tpo.TPOTrainer(
            load(folder, ours), args=tpo.TPOConfig("tpo", **SHARED), train_dataset=datasets.Dataset.from_list(rows),
            processing_class=words_tokenizer(),
        )
    )  # fmt: skip


def test_online_dpo(folder):
    """Pairs of the model's own completions."""
    options = {"max_new_tokens": 8, "max_steps": 2}
    run = assert_trains_the_same(
        lambda ours: online_dpo.OnlineDPOTrainer(
            load(folder, ours), ref_model=load(folder, ours), reward_funcs=reward,
            args=online_dpo.OnlineDPOConfig("online", **SHARED | options),
            train_dataset=datasets.Dataset.from_list(PROMPTS), processing_class=words_tokenizer(),
        ),
        falls=False,
    )  # fmt: skip
    first, second = lines(run)
    assert abs(second["loss"] - first["loss"]) > 1e-3


TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("folder", ["gqa", "tied"], indirect=True)
def test_a_head_in_fp32(folder):
    """Of a model in bfloat16, tied and untied."""
    run = assert_trains_the_same(
        lambda ours: trl.GRPOTrainer(
            load(folder, ours), reward, args=trl.GRPOConfig("head", **SHARED | GROUPS, cast_lm_head_to_fp32=True),
            train_dataset=datasets.Dataset.from_list(PROMPTS), processing_class=words_tokenizer(),
        ),
        falls=False,
    )  # fmt: skip
    assert run.model.lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_adapters_by_the_names_of_transformers(folder, kind, reasons):
    """The trainer adds them; a step is that of transformers' model, which reads the file."""
    peft = pytest.importorskip("peft")

    def make(ours: bool) -> Any:
        model = load(folder, ours)
        data = {"SFT": texts, "DPO": pairs, "GRPO": lambda: datasets.Dataset.from_list(PROMPTS)}[kind]()
        extra = {"reward_funcs": reward} if kind == "GRPO" else {}
        options = GROUPS if kind == "GRPO" else {}
        return getattr(trl, f"{kind}Trainer")(
            model,
            args=getattr(trl, f"{kind}Config")(kind, **SHARED | options),
            train_dataset=data, processing_class=words_tokenizer(),
            peft_config=peft.LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"), **extra,
        )  # fmt: skip

    run = assert_trains_the_same(make, falls=kind != "GRPO")
    assert {*reasons} == ({None} if kind == "GRPO" else set())
    run.save_model("adapter")
    theirs = peft.PeftModel.from_pretrained(load(folder, ours=False), "adapter")
    ids = torch.arange(3, 12)[None]
    assert error(theirs(ids).logits, run.model.eval()(ids).logits) <= LIMIT


@pytest.mark.parametrize("kind", ["prompts", "head"])
def test_adapters_around_the_head_of_sft(folder, rows, kind):
    """Learned prompts, for which PEFT fills up the labels, and a copy of the head that is trained."""
    peft = pytest.importorskip("peft")

    def make(ours: bool) -> Any:
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
        if kind == "prompts":
            config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
        torch.manual_seed(0)
        return trl.SFTTrainer(
            load(folder, ours), trl.SFTConfig("sft", **SHARED | {"max_steps": 4}), train_dataset=texts(),
            processing_class=words_tokenizer(), peft_config=config,
        )  # fmt: skip

    run = assert_trains_the_same(make, falls=False)
    first, *_, last = lines(run)
    assert last["loss"] < first["loss"]
    assert len(rows) == 4


def test_sft_in_bfloat16(folder, rows):
    """Under autocast, with weights in fp32."""
    logs = []
    for ours in (False, True):
        run = trl.SFTTrainer(
            load(folder, ours), trl.SFTConfig("sft", **SHARED | {"bf16": True, "max_steps": 3}), train_dataset=texts(),
            processing_class=words_tokenizer(),
        )  # fmt: skip
        run.train()
        logs.append(lines(run))
    for want, got in zip(*logs, strict=True):
        for name in ("loss", "entropy", "grad_norm"):
            assert got[name] == pytest.approx(want[name], rel=0.03), name
        assert got["mean_token_accuracy"] == pytest.approx(want["mean_token_accuracy"], abs=0.1)
    assert len(rows) == 3


@pytest.mark.gpu
def test_sft_builds_no_logits(tmp_path, monkeypatch):
    if torch.cuda.device_count() > 1:
        pytest.skip("TRL wants a launcher where several GPUs are visible: CUDA_VISIBLE_DEVICES=0")
    monkeypatch.chdir(tmp_path)
    V, T, steps = 128256, 4096, 3
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=T, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    data = datasets.Dataset.from_list([{"input_ids": torch.randint(3, V, (T,)).tolist()} for _ in range(4)])
    options = {**SHARED, "use_cpu": False, "bf16": True, "max_steps": steps, "max_length": T, "optim": "sgd"}
    model = liger_models.hf.LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    run = trl.SFTTrainer(model, trl.SFTConfig("sft", **options), train_dataset=data, processing_class=words_tokenizer())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run.train()
    assert len(lines(run)) == steps
    logits = 4 * T * V * 2  # 4.2 GB
    assert torch.cuda.max_memory_allocated() - before < logits / 2


def test_sft_of_images(tmp_path, monkeypatch, rows):
    """A conversation about pictures, by the processor of transformers."""
    from ..base import test_processor_gemma3 as test_gemma3
    from ..base.conftest import picture

    pil = pytest.importorskip("transformers.models.gemma3.image_processing_pil_gemma3")
    monkeypatch.chdir(tmp_path)
    test_gemma3.make().save_pretrained("model")
    names = {"boi_token": "<boi>", "image_token": "<img>", "eoi_token": "<eoi>"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file="model/tokenizer.json", eos_token="<end>", pad_token="<end>", extra_special_tokens=names
    )
    images = pil.Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    processor = transformers.Gemma3Processor(
        images, tokenizer, image_seq_length=4, chat_template=test_gemma3.TEMPLATE.replace("<bos>", "")
    )
    chats = [
        {
            "image": picture(20 + 4 * n, 24),
            "prompt": [{"role": "user", "content": f"What is {n}?"}],
            "completion": [{"role": "assistant", "content": "a" * (n + 1)}],
        }
        for n in range(4)
    ]
    data = datasets.Dataset.from_list(chats)
    run = assert_trains_the_same(
        lambda ours: trl.SFTTrainer(
            load(Path("model"), ours, vision=True), trl.SFTConfig("sft", **SHARED), train_dataset=data,
            processing_class=processor,
        )
    )  # fmt: skip
    assert len(rows) == 10
    batch = next(iter(run.get_train_dataloader()))
    assert batch["pixel_values"].shape == (4, 3, 16, 16)
    run.save_model("saved")
    loaded, trained = load(Path("saved"), ours=False, vision=True), run.model.eval()
    with torch.no_grad():
        kept = batch.pop("attention_mask").bool()
        batch.pop("labels")
        assert error(*(model(**batch, attention_mask=kept.long()).logits[kept] for model in (loaded, trained))) <= LIMIT


def qwen_processor(folder: Path) -> Any:
    """Transformers' processor of Qwen2.5-VL without its part for videos, which needs torchvision."""
    from ..base.conftest import SPECIAL, TEMPLATE, make_model

    pil = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    make_model("qwen2_5_vl").save_pretrained(folder)

    class ImageProcessor(transformers.Qwen2_5_VLProcessor):
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str) -> None:
            self.image_token, self.video_token = SPECIAL[:2]
            self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(SPECIAL[:2])
            transformers.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    size = {"shortest_edge": 64, "longest_edge": 400}
    return ImageProcessor(pil.Qwen2VLImageProcessorPil(patch_size=4, size=size), tokenizer, TEMPLATE)


@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_preferences_and_completions_of_images(tmp_path, monkeypatch, kind):
    """Images of several sizes, with positions in time, height and width; GRPO takes them apart by prompts."""
    from ..base.conftest import picture

    monkeypatch.chdir(tmp_path)
    folder = Path("model")
    processor = qwen_processor(folder)
    answers = {"DPO": ("chosen", "rejected")}.get(kind, ())
    data = datasets.Dataset.from_list(
        [
            {"image": picture(12 + 8 * n, 24), "prompt": [{"role": "user", "content": f"What is {n}?"}]}
            | {name: [{"role": "assistant", "content": name[0] * (n + 1)}] for name in answers}
            for n in range(4)
        ]
    )

    def make(ours: bool) -> Any:
        own: dict[str, Any] = {"ref_model": load(folder, ours, vision=True)} if kind == "DPO" else {}
        if kind == "GRPO":
            own["reward_funcs"] = lambda completions, **_: [len({*each[0]["content"]}) for each in completions]
        options = GROUPS if kind == "GRPO" else {}
        model = load(folder, ours, vision=True)
        model.register_forward_pre_hook(lambda *call: seen.append({*call[2]}), with_kwargs=True)
        return getattr(trl, f"{kind}Trainer")(
            model, args=getattr(trl, f"{kind}Config")(kind, **SHARED | options), train_dataset=data,
            processing_class=processor, **own,
        )  # fmt: skip

    seen: list[set[str]] = []
    run = assert_trains_the_same(make, falls=kind == "DPO")
    assert {"pixel_values", "image_grid_thw", "mm_token_type_ids"} <= seen[-1]
    assert kind == "DPO" or abs(lines(run)[1]["loss"]) > 0.01


def test_a_reference_model_that_follows_is_an_error(folder):
    """TRL loads that of GRPO from a name: it is transformers', whose parameters are others."""
    options = {**SHARED, **GROUPS, "sync_ref_model": True, "ref_model_sync_steps": 1}
    run = trl.GRPOTrainer(
        load(folder), reward, args=trl.GRPOConfig("grpo", **options),
        train_dataset=datasets.Dataset.from_list(PROMPTS), processing_class=words_tokenizer(),
    )  # fmt: skip
    assert type(run.ref_model).__module__.startswith("transformers.")
    with pytest.raises(RuntimeError, match="size of tensor"):
        run.train()


def test_a_name_gives_the_model_of_transformers(folder):
    """Also where the models of this package are registered; the page says so."""
    with liger_models.hf.registered():
        run = trl.SFTTrainer(
            str(folder), trl.SFTConfig("sft", **SHARED), train_dataset=texts(), processing_class=words_tokenizer()
        )
    assert type(run.model).__module__.startswith("transformers.")


@pytest.mark.parametrize(("options", "policy"), [({}, ["full"] * 2), ({"gradient_checkpointing": False}, "selective")])
def test_recomputation(folder, options, policy):
    model = load(folder)
    model.model.decoder.set_checkpointing("selective")
    arguments = trl.SFTConfig("sft", **SHARED | {"max_steps": 1} | options)
    trl.SFTTrainer(model, arguments, train_dataset=texts(), processing_class=words_tokenizer()).train()
    assert model.model.decoder.checkpointing == policy
