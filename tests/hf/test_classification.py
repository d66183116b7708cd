"""Models with a head for classification, beside transformers': logits, losses, gradients, files."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file

import liger_models.hf
from liger_models.adapters import LoRAConfig, apply_lora, merge_lora, unpack_projections

from ..arch.families import LIMIT, error, hf_gradients, make_folder, tokens
from ..convert.test_hub import hub  # noqa: F401
from ..late import Late, transformers

peft = Late("peft", "it adapts models of this package")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers'
CASES = [
    ("llama", "gqa"), ("gemma2", "gqa"), ("qwen3", "gqa"), ("mixtral", "aux"), ("phi3", "gqa"), ("phimoe", "window"),
]  # fmt: skip


def make(folder: Path, labels: int = 3) -> tuple[Any, Any]:
    """Transformers' model, with drawn scores, and this package's from its files in ``classifier``."""
    torch.manual_seed(0)
    auto = transformers.AutoModelForSequenceClassification
    theirs = auto.from_pretrained(folder, num_labels=labels, dtype=torch.float32, attn_implementation="eager")
    theirs.config.pad_token_id = theirs.config.get_text_config().pad_token_id = 0
    theirs.save_pretrained("classifier")
    ours = getattr(liger_models.hf, type(theirs).__name__).from_pretrained("classifier", dtype=torch.float32)
    return theirs, ours


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.cases(4)
@pytest.mark.parametrize(("arch", "variant"), CASES)
def test_as_transformers(root, arch, variant):
    """With padding on both sides; the saved files are transformers' bit for bit, of a causal model without its head."""
    theirs, ours = make(make_folder(arch, variant, root))
    assert type(ours).__module__ == "liger_models.hf"
    ids = tokens(arch, variant, 3, 12).clamp(min=1)
    ids[1, :3], ids[2, -4:] = 0, 0
    labels = torch.tensor([0, 2, 1])
    want = theirs(ids, attention_mask=(ids != 0).long(), labels=labels)
    got = ours(ids, attention_mask=(ids != 0).long(), labels=labels)
    assert got.logits.shape == (3, 3)
    assert error(got.logits, want.logits) <= LIMIT
    assert error(got.loss, want.loss) <= LIMIT
    want.loss.backward()
    got.loss.backward()
    gradients = dict(liger_models.hf_gradients(ours.model.decoder)) | {"score.weight": ours.score.weight.grad}
    expected = hf_gradients(theirs)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert error(gradients[name], gradient) <= LIMIT, name

    with pytest.raises(ValueError, match=rf"auto_map must be False .* liger_models.hf.{type(ours).__name__}"):
        ours.save_pretrained("saved", auto_map=True)
    ours.save_pretrained("saved")
    read, written = load_file("classifier/model.safetensors"), load_file("saved/model.safetensors")
    assert read.keys() == written.keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in read.items())
    again = transformers.AutoModelForSequenceClassification.from_pretrained(
        "saved", dtype=torch.float32, attn_implementation="eager"
    )
    assert type(again) is type(theirs)
    assert error(again(ids).logits, theirs(ids).logits) <= LIMIT


@pytest.mark.parametrize("labels", [1, 3])
def test_losses(root, labels):
    """Of a score, and of several classes at once; one text needs no padding."""
    theirs, ours = make(make_folder("llama", "gqa", root), labels)
    ids = tokens("llama", "gqa", 4, 9).clamp(min=1)
    target = torch.rand(4, labels).squeeze(1)
    for model in (theirs, ours):
        model.config.problem_type = None
    want, got = (model(ids, labels=target, return_dict=False) for model in (theirs, ours))
    assert error(got[0], want[0]) <= LIMIT
    assert error(got[1], want[1]) <= LIMIT
    ours.config.pad_token_id = None
    assert error(ours(ids[:1]).logits, theirs(ids[:1]).logits) <= LIMIT
    with pytest.raises(ValueError, match="pad_token_id must be set for several texts, got None and 4"):
        ours(ids)


@pytest.mark.parametrize("kind", ["score", "class", "classes"])
def test_the_loss_of_a_step(root, kind):
    """Of uneven batches, divided by all their labels, it is that of one batch."""
    _, ours = make(make_folder("llama", "gqa", root), 1 if kind == "score" else 3)
    ours.config.problem_type = None
    ids = tokens("llama", "gqa", 5, 9).clamp(min=1)
    labels = {"score": torch.rand(5), "class": torch.tensor([0, 2, -100, 1, 1]), "classes": torch.rand(5, 3)}[kind]
    count = (labels != -100).sum()
    want = ours(ids, labels=labels).loss
    parts = [ours(ids[rows], labels=labels[rows], num_items_in_batch=count).loss for rows in (slice(4), slice(4, 5))]
    assert error(sum(parts), want) <= LIMIT
    assert parts[0] > parts[1] > 0


def test_the_auto_class(root):
    """Transformers' auto class returns it where it is registered, and state dicts load under both kinds of names."""
    theirs, ours = make(make_folder("llama", "gqa", root))
    with liger_models.hf.registered():
        found = transformers.AutoModelForSequenceClassification.from_pretrained("classifier", dtype=torch.float32)
    assert type(found) is type(ours)
    assert type(ours) is liger_models.hf.LlamaForSequenceClassification
    for state in (theirs.state_dict(), ours.state_dict()):
        new = type(ours)(ours.config)
        new.load_state_dict(state)
        assert all(torch.equal(new.get_parameter(name), each) for name, each in ours.named_parameters())


def test_of_a_causal_model(root):
    """Its head is left out, and scores are drawn."""
    folder = make_folder("llama", "gqa", root)
    ours = liger_models.hf.LlamaForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    body = liger_models.hf.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokens("llama", "gqa", 2, 9)
    assert error(ours.model(ids).last_hidden_state, body.model(ids).last_hidden_state) <= LIMIT
    assert ours.score.weight.shape[0] == 1
    assert ours.score.weight.std().item() == pytest.approx(ours.config.initializer_range, rel=0.5)


def test_lora(root):
    """Of this package, on the body; the checkpoint with the adapters merged is transformers'."""
    _, ours = make(make_folder("llama", "gqa", root))
    body = ours.model.decoder
    apply_lora(body, LoRAConfig(r=4))
    ids = tokens("llama", "gqa", 4, 9).clamp(min=1)
    optimizer = torch.optim.AdamW([each for each in ours.parameters() if each.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        losses.append(ours(ids, labels=torch.tensor([0, 1, 2, 1])).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[2] < losses[0] - 0.1
    expected = ours.eval()(ids).logits
    merge_lora(body)
    ours.save_pretrained("merged")
    merged = transformers.AutoModelForSequenceClassification.from_pretrained("merged", dtype=torch.float32)
    assert error(merged(ids).logits, expected) <= LIMIT


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["score"]}),
        ("gemma2", {"target_modules": ["v_proj"], "modules_to_save": ["score", "embed_tokens"]}),
        ("phi3", {"target_modules": "all-linear", "task_type": "SEQ_CLS"}),  # PEFT then trains the scores, too
    ],
    ids=["two", "embedding", "all"],
)
def test_peft(root, arch, options):
    """Adapters and scores are trained as on transformers' model; the files of either load into the other; merged."""
    theirs, ours = make(make_folder(arch, "gqa", root))
    folder = "classifier"
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(**options))
    theirs.save_pretrained("start")
    new = peft.get_peft_model(type(ours).from_pretrained(folder), peft.LoraConfig(**options))
    ours = peft.PeftModel.from_pretrained(ours, "start", is_trainable=True).train()
    names = [{name for name, each in model.named_parameters() if each.requires_grad} for model in (theirs, new, ours)]
    assert "base_model.model.score.modules_to_save.default.weight" in names[0]
    assert names[1] == names[2] == names[0]
    ids = tokens(arch, "gqa", 4, 9).clamp(min=1)
    losses = []
    for model in (theirs.train(), ours):
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
        for _ in range(3):
            loss = model(input_ids=ids, labels=torch.tensor([0, 1, 2, 1])).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-4)
    assert losses[5] < losses[3] - 0.1

    expected = ours.eval()(input_ids=ids).logits
    ours.save_pretrained("adapter")
    auto = partial(transformers.AutoModelForSequenceClassification.from_pretrained, attn_implementation="eager")
    loaded = peft.PeftModel.from_pretrained(auto(folder, dtype=torch.float32), "adapter").eval()
    assert error(loaded(input_ids=ids).logits, expected) <= LIMIT
    ours.merge_and_unload().save_pretrained("merged")
    assert error(auto("merged", dtype=torch.float32)(ids).logits, expected) <= LIMIT


def test_rows_that_are_trained_alone(root):
    """A classifier has no head that is tied to the embedding, whatever its causal model has."""
    folder = make_folder("llama", "gqa", root)
    theirs, ours = make(folder)
    config = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3, 5], task_type="SEQ_CLS")
    ids = tokens("llama", "gqa", 4, 9).clamp(min=1)
    losses = []
    for model in (theirs, unpack_projections(ours)):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, config)
        with torch.no_grad():
            adapted.get_input_embeddings()
            for name, parameter in adapted.named_parameters():
                if "trainable_tokens_delta" in name:
                    parameter.add_(1)
        losses.append(adapted(input_ids=ids, labels=torch.tensor([0, 1, 2, 1])).loss)
    assert error(losses[1], losses[0]) <= LIMIT


@pytest.mark.parametrize("part", ["classifier", "body"])
def test_a_failed_save_leaves_the_old_files(root, monkeypatch, part):
    """Only the first of several files of tensors can be written."""
    _, ours = make(make_folder("llama", "gqa", root))
    model = ours if part == "classifier" else ours.model
    model.save_pretrained("saved")
    before = {path.name: path.read_bytes() for path in Path("saved").iterdir()}
    with torch.no_grad():
        ours.model.embed_tokens.weight.add_(1)
    save_file, written = safetensors.torch.save_file, []

    def fail(tensors, path, metadata=None):
        if written:
            raise OSError(28, "No space left on device")
        written.append(path)
        save_file(tensors, path, metadata)

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", fail)
        patch.setattr(transformers.modeling_utils, "safe_save_file", fail)
        with pytest.raises(OSError, match=r"saved: .*No space left"):
            model.save_pretrained("saved", max_shard_size="20KB")
    assert written
    assert {path.name: path.read_bytes() for path in Path("saved").iterdir()} == before
    model.save_pretrained("saved", max_shard_size="20KB")
    assert not Path("saved", "model.safetensors").exists()
    assert Path("saved", "model.safetensors.index.json").exists()


@pytest.mark.parametrize("is_main", [True, False])
def test_an_upload_follows_a_save(root, hub, is_main):  # noqa: F811
    """The rank that saves also uploads what it has written."""
    _, ours = make(make_folder("llama", "gqa", root))
    options = {"token": hub.token, "max_shard_size": "20KB", "variant": "small"}
    ours.save_pretrained("saved", is_main, push_to_hub=True, repo_id="me/saved", **options)
    assert Path("saved", "model.safetensors.index.small.json").exists() == is_main
    uploads = [files for repo in hub.repos.values() for files in repo.commits.values() if files]
    assert uploads == [{path.name: path.read_bytes() for path in Path("saved").glob("*")}] * is_main
