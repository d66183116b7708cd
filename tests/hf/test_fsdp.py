"""Trainer with FSDP2, which Accelerate applies: two ranks train, save and go on as one process does."""

import json
from typing import Any

import pytest
import torch

import liger_models.hf

from .. import processes
from ..arch.families import error, make_folder
from ..late import Late, transformers
from . import test_trainer

trl = Late("trl", needs="TRL is not installed")
datasets = Late("datasets", needs="datasets is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.distributed, pytest.mark.slow]  # transformers'
CASES = {
    "tied": ("gemma2", "Gemma2ForCausalLM"),
    "classes": ("llama", "LlamaForSequenceClassification"),
    "sft": ("llama", "LlamaForCausalLM"),
}
RANKS = """
import json
import sys
import torch.distributed as dist
from tests.hf.test_fsdp import make

found = {}
for case in sys.argv[1:]:
    whole = make(case, output=case, fsdp=True)
    whole.train()
    whole.save_model(f"{case}-trained")
    resumed = make(case, output=case, fsdp=True)
    resumed.train(resume_from_checkpoint=f"{case}/checkpoint-2")
    groups = [module for module in whole.model.modules() if type(module).__name__.startswith("FSDP")]
    found[case] = [whole.state.log_history, resumed.state.log_history, len(groups)]
if dist.get_rank() == 0:
    print("found", json.dumps(found))
dist.destroy_process_group()
"""


def make(case: str, output: str, fsdp: bool = False) -> Any:
    """Trainer of rows of uneven lengths, four in a step of one process or of two ranks, in two batches each."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    model = getattr(liger_models.hf, CASES[case][1]).from_pretrained(f"{case}-model", dtype=torch.float32)
    options = {"fsdp": True, "fsdp_config": {"version": 2}} if fsdp else {}
    arguments = (trl.SFTConfig if case == "sft" else transformers.TrainingArguments)(
        output, per_device_train_batch_size=1 if fsdp else 2, gradient_accumulation_steps=2, max_steps=3, save_steps=2,
        logging_steps=1, learning_rate=1e-2, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
        **options,
    )  # fmt: skip
    if fsdp:  # Accelerate shards on accelerators alone
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    if case == "sft":
        rows = [{"input_ids": row["input_ids"]} for row in test_trainer.ROWS]
        return trl.SFTTrainer(
            model, arguments, train_dataset=datasets.Dataset.from_list(rows),
            processing_class=test_trainer.words_tokenizer(),
        )  # fmt: skip
    rows, collate = test_trainer.ROWS, test_trainer.collate
    if case == "classes":
        rows = [{"input_ids": row["input_ids"], "label": n % 3} for n, row in enumerate(rows)]

        def collate(batch):
            labels = torch.tensor([row["label"] for row in batch])
            return test_trainer.collate([{**row, "labels": row["input_ids"]} for row in batch]) | {"labels": labels}

    return transformers.Trainer(model, arguments, train_dataset=rows, data_collator=collate)


@pytest.mark.parametrize(
    "cases", [("tied",), pytest.param(("classes", "sft"), marks=pytest.mark.matrix)], ids=["tied", "others"]
)
def test_two_ranks_are_as_one(tmp_path, monkeypatch, cases):
    monkeypatch.chdir(tmp_path)
    for case in cases:
        arch, name = CASES[case]
        folder = make_folder(arch, "gqa", tmp_path / "made")
        options = {"num_labels": 3, "pad_token_id": 0} if case == "classes" else {}
        torch.manual_seed(0)
        model = getattr(liger_models.hf, name).from_pretrained(folder, dtype=torch.float32, **options)
        model.save_pretrained(f"{case}-model")
    (tmp_path / "run.py").write_text(RANKS)
    printed = processes.run("run.py", *cases, cwd=tmp_path, ranks=2)
    found = json.loads(printed.stdout.partition("found ")[2].splitlines()[0])
    assert "the head of TRL" not in printed.stderr  # the ranks use the fused loss
    for case, (whole, resumed, groups) in found.items():
        one = make(case, output=f"{case}-one")
        one.train()
        for log in (whole, resumed):
            for want, got in zip(one.state.log_history[:3], log[:3], strict=True):
                assert got["loss"] == pytest.approx(want["loss"], rel=1e-4), case
                assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-3), case
                assert got.keys() == want.keys()
        assert groups > 3, case
        auto = getattr(transformers, CASES[case][1])
        trained = auto.from_pretrained(f"{case}-trained", dtype=torch.float32)
        ids = torch.arange(3, 14)[None]
        assert error(trained(ids).logits, one.model.eval()(ids).logits) < 1e-3, case
    assert found.keys() == {*cases}
