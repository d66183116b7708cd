"""TRL's trainers with their own defaults, on a model of transformers (with Liger Kernel) or of `liger_models.hf`."""

import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import grpo
from ..clock import now, peak_gib
from ..rows import Row
from ..training import build
from ..training.job import Job
from ..training.modes import Mode
from .path import shape_of

WARM_UP = 8
"""Number of untimed steps at the beginning, in which kernels compile."""
WORKERS = 4
"""Number of processes that decode images, the same for TRL and for the training command."""


def load_model(mode: Mode) -> Any:
    """The model from the checkpoint in $START, loaded with transformers' auto class."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if "door" in mode:
        import liger_models.hf

        liger_models.hf.register()
    auto_class = AutoModelForImageTextToText if mode.library == "vision" else AutoModelForCausalLM
    return auto_class.from_pretrained(os.environ["START"], dtype=torch.bfloat16, device_map=build.DEVICE)


def image_processor(start: str) -> Any:
    """transformers' processor for Qwen2.5-VL or Qwen3-VL, without the video part, which would need torchvision."""
    from transformers import AutoTokenizer, ProcessorMixin, Qwen2_5_VLProcessor, Qwen3VLProcessor

    model_type = json.loads((Path(start) / "config.json").read_text())["model_type"]
    base: Any = {"qwen2_5_vl": Qwen2_5_VLProcessor, "qwen3_vl": Qwen3VLProcessor}[model_type]
    try:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Images
    except ImportError:  # earlier versions have one class, which uses Pillow
        from transformers import Qwen2VLImageProcessor as Images

    class ImageProcessor(base):
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str) -> None:
            self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
            tokens = [self.image_token, self.video_token]
            self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(tokens)
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    tokenizer = AutoTokenizer.from_pretrained(start)
    return ImageProcessor(Images.from_pretrained(start), tokenizer, tokenizer.chat_template)


def load_data(path: str) -> Any:
    """The data of a path, with the columns that TRL expects."""
    import datasets

    start = Path(os.environ["START"])
    if path != "vision":
        file = start / ("pairs.jsonl" if path == "dpo" else "texts.jsonl")
        return datasets.load_dataset("json", data_files=str(file), split="train")

    # TRL takes images from a separate column.
    examples = []
    for line in (start / "chats.jsonl").read_text().splitlines():
        question, answer = json.loads(line)["messages"]
        image, text = question["content"]
        messages = [{"role": "user", "content": text["text"]}, answer]
        examples.append({"messages": messages, "images": [str(start / image["image"])]})
    return datasets.Dataset.from_list(examples).cast_column("images", [datasets.Image()])


def train(job: Job, after_step: Callable[[], None]) -> list[dict[str, int]]:
    """Train, calling ``after_step`` after each step. Returns each batch's numbers of tokens and images."""
    import peft
    import trl
    from transformers import AutoTokenizer, TrainerCallback

    path, (rows, length) = job.mode.library, shape_of(job.mode.library, job)
    base: Any = trl.DPOTrainer if path == "dpo" else trl.SFTTrainer
    batches: list[dict[str, int]] = []

    class Counting(base):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            if path == "vision":
                batches.append({"tokens": inputs["attention_mask"].sum(), "images": len(inputs["image_grid_thw"])})
            return super().compute_loss(model, inputs, *rest, **more)

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            after_step()

    options: dict[str, Any] = {
        "full": {"packing": True, "packing_strategy": "wrapped", "max_length": length},
        "dpo": {"max_length": length},
        "vision": {"max_length": None, "dataloader_num_workers": WORKERS},
    }.get("full" if path in ("lora", "start") else path, {})
    on_cpu = build.DEVICE == "cpu"
    config = trl.DPOConfig if path == "dpo" else trl.SFTConfig
    model = load_model(job.mode)
    adapters = None
    if path not in ("full", "start"):
        adapters = peft.LoraConfig(**build.LORA | build.hf_targets(model), task_type="CAUSAL_LM")
    load_processor = image_processor if path == "vision" else AutoTokenizer.from_pretrained
    with tempfile.TemporaryDirectory() as folder:
        arguments = config(
            folder, per_device_train_batch_size=rows, max_steps=job.steps, bf16=not on_cpu, use_cpu=on_cpu,
            report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=1e-5,
            gradient_checkpointing="ac" in job.mode, use_liger_kernel="liger" in job.mode,
            **{"dataloader_num_workers": 2, **options},
        )  # fmt: skip
        trainer = Counting(
            model,
            args=arguments,
            train_dataset=load_data(path),
            processing_class=load_processor(os.environ["START"]),
            callbacks=[Watch()],
            peft_config=adapters,
        )
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    return batches


def measure_trainer(job: Job) -> Row:
    """Time the steps of a trainer after the first `WARM_UP` steps."""
    ends: list[float] = []

    def after_step() -> None:
        ends.append(now())

    batches = train(job, after_step)
    step = statistics.median(end - begin for begin, end in itertools.pairwise(ends[WARM_UP:]))
    rows, length = shape_of(job.mode.library, job)
    row: Row = {"peak_gib": peak_gib()}
    if job.mode.library == "vision":
        timed = batches[WARM_UP + 1 :]
        tokens, images = (statistics.mean(int(batch[name]) for batch in timed) for name in ("tokens", "images"))
        return row | {"tokens_per_s": round(tokens / step, 2), "images_per_s": round(images / step, 2)}
    sequences = 2 * rows if job.mode.library == "dpo" else rows
    return row | {"tokens_per_s": round(sequences * length / step)}


def measure_grpo(job: Job) -> Row:
    """Time the GRPO steps of TRL's trainer, and the sampling in these steps."""
    rows, length = shape_of("grpo", job)
    model = load_model(job.mode)
    model.generation_config.eos_token_id = None  # all answers have the full length
    on_cpu = build.DEVICE == "cpu"
    times = grpo.trl_steps(model, job.mode, rows, length, job.steps, bf16=not on_cpu, use_cpu=on_cpu)
    sampling, training = (statistics.median(seconds) for seconds in zip(*times[1:], strict=True))
    return {
        "tokens_per_s": round(rows * (length + job.steps) / (sampling + training)),
        "step_s": round(sampling + training, 2),
        "sampling_s": round(sampling, 2),
        "peak_gib": peak_gib(),
    }
