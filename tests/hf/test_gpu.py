"""What only a GPU can show: nothing waits for the device, and half precision runs."""

import pytest
import torch

import liger_models.hf
from liger_models.adapters import unpack_projections
from liger_models.generation.graphs import can_capture

from .. import processes
from ..arch.families import error, make_folder
from ..late import transformers

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def models(root):
    """The model in transformers, and ours."""
    folder = make_folder("llama", "gqa", root)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="cuda", attn_implementation="eager")
    return theirs, liger_models.hf.LlamaForCausalLM.from_pretrained(folder, device_map="auto")


def test_packed_batches_cost_no_wait(models):
    _, model = models
    assert model.device.type == "cuda"
    model.train().bfloat16()
    ids, bounds = torch.randint(3, 100, (1, 256), device="cuda"), torch.tensor([0, 30, 100, 256], device="cuda").int()
    batch = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 156, "max_length_k": 156}
    batch |= {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(253, device="cuda")}
    model(**batch).loss.backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(**batch).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    positions = torch.cat([torch.arange(n, device="cuda") for n in (30, 70, 156)])[None]
    alone = model(ids, labels=ids, position_ids=positions, num_items_in_batch=253).loss
    torch.testing.assert_close(alone, model(**batch).loss, rtol=1e-3, atol=1e-3)


def test_generation(models):
    theirs, ours = models
    ids = torch.randint(3, 100, (3, 40), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    assert (
        error(ours(ids, attention_mask=mask).logits[mask == 1], theirs(ids, attention_mask=mask).logits[mask == 1])
        < 1e-4
    )
    for options in ({"do_sample": False}, {"num_beams": 3}):
        options |= {"attention_mask": mask, "max_new_tokens": 12, "pad_token_id": 0}
        assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))


def test_the_engine_behind_generate(models, reasons):
    """Criteria, streamers, prompts on the CPU, adapters and new weights between two calls of captured steps."""
    theirs, ours = models
    ids = torch.randint(3, 100, (3, 40), device="cuda")
    for model in models:
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    free = theirs.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    ends = torch.stack([free[0, 45], free[1, 60], free[2, 51]])

    class Streamer(transformers.generation.BaseStreamer):
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens.append(value)

        def end(self):
            self.tokens = torch.cat([self.tokens[0], torch.stack(self.tokens[1:], 1)], 1)

    def at_end(tokens, scores, **_):
        return tokens[:, -1] == ends

    options = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False}
    for chosen in ({}, {"stopping_criteria": [at_end]}, {"eos_token_id": 7, "stopping_criteria": [at_end]}):
        want = theirs.generate(ids, **options, **chosen)
        for _ in range(3):
            assert torch.equal(ours.generate(ids, **options, **chosen), want)
        streamer = Streamer()
        assert torch.equal(ours.generate(ids, streamer=streamer, **options, **chosen), want)
        assert torch.equal(streamer.tokens, want.cpu())
    on_host = ours.generate(ids.cpu(), **options | {"attention_mask": mask.cpu()})
    assert torch.equal(on_host, free.cpu())

    draws = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": True, "num_return_sequences": 4}
    runs = []
    for _ in range(2):
        transformers.set_seed(0)
        runs.append(ours.generate(ids, **draws))
    assert torch.equal(*runs)
    assert set(reasons) == {None}

    with torch.no_grad():
        for model in models:
            model.get_output_embeddings().weight.neg_()
    assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))


def test_graphs_of_models_with_adapters(models):
    """PEFT's adapters, switched off and with new weights."""
    peft = pytest.importorskip("peft")
    _, ours = models
    ids = torch.randint(3, 100, (3, 40), device="cuda")
    ours.generation_config.eos_token_id, ours.generation_config.pad_token_id = None, 0
    options = {"max_new_tokens": 20, "do_sample": False}
    plain = ours.generate(ids, **options)
    adapted = peft.get_peft_model(
        unpack_projections(ours), peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    ).eval()
    assert can_capture(ours.model.decoder)
    seen = [plain]
    for scale in (0.1, 0.3):
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=scale)
        want = ours.generate(ids, use_cache=False, **options)
        for _ in range(2):
            assert torch.equal(adapted.generate(input_ids=ids, **options), want)
        assert not any(torch.equal(want, tokens) for tokens in seen)
        seen.append(want)
        with adapted.disable_adapter():
            assert torch.equal(adapted.generate(input_ids=ids, **options), plain)


FSDP = """
import os
import sys
import liger_models.hf
import torch.distributed as dist
from tests.hf.test_trainer import losses, trainer

sharded = {"version": int(sys.argv[1]), "transformer_layer_cls_to_wrap": "LlamaBlock"}
options = {"fsdp": "full_shard auto_wrap", "fsdp_config": sharded} if sharded["version"] else {}
options |= {"use_cpu": False, "max_steps": 4, "output": sys.argv[2]}
options |= {"gradient_accumulation_steps": 2 // int(os.environ.get("WORLD_SIZE", 1))}
load = liger_models.hf.LlamaForCausalLM.from_pretrained
run = trainer(load("model"), **options)
run.train()
run.save_model(f"{sys.argv[2]}/final")
again = trainer(load("model"), **options)
again.train(resume_from_checkpoint=f"{sys.argv[2]}/checkpoint-2")
if run.is_world_process_zero():
    print("losses", *losses(run), *losses(again))
"""


@pytest.mark.parametrize("version", [1, 2])
def test_fsdp_of_trainer(root, tmp_path, version):
    """Two GPUs, or the one that there is, train, save, and go on as one does without FSDP."""
    ranks = min(torch.cuda.device_count(), 2)
    (tmp_path / "model").symlink_to(make_folder("llama", "gqa", root))
    (tmp_path / "run.py").write_text(FSDP)
    printed = [
        processes.torchrun(ranks, "run.py", str(kind), f"out-{kind}", cwd=tmp_path, CUDA_VISIBLE_DEVICES=gpus).stdout
        for ranks, kind, gpus in ((0, 0, "0"), (ranks, version, "0,1"[: 2 * ranks - 1]))
    ]
    one, two = ([float(x) for x in each.split("losses ")[1].split()[:8]] for each in printed)
    assert one[4:] == one[:4]
    assert two == pytest.approx(one, rel=1e-4)
    folders = [tmp_path / f"out-{kind}" / "final" for kind in (0, version)]
    models = [transformers.AutoModelForCausalLM.from_pretrained(each) for each in folders]
    for one, two in zip(*(each.parameters() for each in models), strict=True):
        assert error(two, one) < 1e-3
