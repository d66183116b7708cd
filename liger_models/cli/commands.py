"""The commands of ``liger-models``. Each command is a function, and its docstring is its manual."""

import dataclasses
import io
import json
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from liger_models.common.printable import printable

if TYPE_CHECKING:
    from liger_models.base.causal_lm import CausalLM

# torch and the package are imported inside of each command, so that --help and completion answer at once.

FAILED, WRONG, DIFFERS = 1, 2, 3
"""Exit codes for a failure, for a wrong command line, and for differences. 0 is success."""


class _Screen(Console):
    """A console that prints strings without interpreting markup, and prints control characters as escapes.

    Names of tensors and error messages may contain untrusted text. A command that needs a style prints a `Text`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Convert a string to a `Text`. Rich calls this method for each string in lines and tables."""
        return super().render_str(printable(text), **options)


CHAT_COMMANDS = (
    "Commands: /image PATH and /video PATH add to the next message, /help shows this, /exit or Ctrl-D ends the chat. A "
    "message that begins with a slash needs a space before it."
)

screen, messages = _Screen(), _Screen(stderr=True)


class _Commands(typer.core.TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Run a command. Expected errors are printed in one line; any other error is printed with its traceback."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except typer.BadParameter as error:
            if error.param is not None:  # raised by typer, which then shows the usage
                raise
            # A frame would break the hint into pieces that users could not copy.
            messages.print(Text("error:", "bold red"), error.message, soft_wrap=True)
            raise typer.Exit(WRONG) from error
        except (ImportError, MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
            if ctx.params.get("debug"):
                raise
            messages.print(Text("error:", "bold red"), str(error) or type(error).__name__, soft_wrap=True)
            raise typer.Exit(FAILED) from error


app = typer.Typer(cls=_Commands, no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False)


def path(text: str) -> Path:
    """Convert an argument to a path. Empty text is refused, because it would mean the working directory."""
    if not text:
        raise typer.BadParameter("a path must have a name, got ''. Give one.")
    return Path(text)


def _named(model: str) -> str:
    path(model)
    return model


Model = Annotated[
    str, typer.Argument(callback=_named, help="Folder of a checkpoint, or its name on the Hugging Face hub.")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document for scripts, without progress.")]
Device = Annotated[str | None, typer.Option(help="Such as cuda:1 or cpu. Default: the accelerator, if there is one.")]
Dtype = Annotated[str, typer.Option(help="Dtype of the weights, such as bf16; auto keeps the checkpoint's.")]
Adapter = Annotated[
    Path | None, typer.Option(parser=path, help="Folder of LoRA adapters (PEFT's files) to merge into the model.")
]
Mxfp4 = Annotated[
    Path | None,
    typer.Option(
        file_okay=False,
        help="Folder of the MXFP4 checkpoint that the model comes from (GPT-OSS): writes its experts in MXFP4 again.",
    ),
]


def _version(is_requested: bool) -> None:
    if is_requested:
        from liger_models import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option(help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Open LLMs as native PyTorch models on fused Triton kernels.

    Look at models (**list**, **info**), download and check them (**download**, **verify**), rewrite
    checkpoints (**convert**), merge adapters (**merge**), find options that fit a GPU (**recipe**), **train**,
    generate text (**generate**), and measure speed (**bench**). Start a new architecture (**new-arch**).

    Exit codes: 0 success, 1 failure, 2 wrong command line, 3 **verify** found differences.
    """


@app.command("list")
def list_command(as_json: AsJson = False) -> None:
    """List the supported architectures, with the checkpoints that each reads."""
    from liger_models.arch.auto import get_arch, list_model_types

    # A module's docstring begins with the names of its checkpoints, which end at a colon or with the paragraph.
    families = []
    for name in list_model_types():
        model_class = get_arch(name)
        doc = getattr(sys.modules.get(model_class.__module__), "__doc__", None) or ""
        reads = " ".join(doc.partition("\n\n")[0].partition(":")[0].split())
        families.append({"model_type": name, "class": model_class.__name__, "reads": reads})
    if as_json:
        return _print_json(families)

    # Print a table for people.
    table = Table("model_type", "class", "reads")
    for row in families:
        table.add_row(*row.values())
    screen.print(table)


@app.command()
def info(
    model: Model,
    revision: Revision = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a training step, for the memory estimate.")] = 8192,
    dtype: Annotated[str, typer.Option(help="Dtype of weights, gradients, moments and activations.")] = "bfloat16",
    moments_8bit: Annotated[bool, typer.Option("--moments-8bit", help="AdamW's moments in 8 bits.")] = False,
    muon: Annotated[bool, typer.Option("--muon", help="Muon for the weights of linear layers.")] = False,
    gate_up_8bit: Annotated[
        bool, typer.Option("--gate-up-8bit", help="Gate and up of the MLPs saved in 8 bits.")
    ] = False,
    budget: Annotated[
        str | None, typer.Option("--memory", help="Plan a step within this memory, such as 60GB.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a model's architecture, sizes and parameters, and estimate the memory that training needs.

    Reads config.json only. The estimate is for training all parameters on one GPU with AdamW, or with Muon, for each
    checkpointing policy. With --memory the command also plans the fastest step that fits: it chooses what to recompute
    and what to keep in host memory.
    """
    from liger_models.memory.estimate import training_memory
    from liger_models.memory.plan import plan_memory

    # Create the model on the meta device, the estimate and, if there is a budget, the plan.
    empty = _empty_model(model, revision)
    if gate_up_8bit:
        empty.set_gate_up_8bit()
    memory = training_memory(empty, tokens, _dtype(dtype), moments_8bit=moments_8bit, muon=muon)
    plan = None
    if budget is not None:  # Muon's momentum stays on the device, and Muon needs whole gradients
        plan = plan_memory(empty, tokens, budget, memory=memory, host_moments=not muon, in_backward=not muon)

    # Collect the result for scripts.
    sizes = {name: value for name, value in dataclasses.asdict(empty.config).items() if value is not None}
    result: dict[str, Any] = {
        "class": type(empty).__name__,
        "parameters": empty.num_parameters(),
        "parameters_without_embedding": empty.num_parameters(exclude_embeddings=True),
        "config": sizes,
        "training": {
            "tokens": tokens,
            "dtype": dtype,
            **memory._asdict(),
            "peak": {policy: memory.peak(policy) for policy in memory.activations},
            **({} if plan is None else {"plan": {**dataclasses.asdict(plan), "peak": plan.peak}}),
        },
    }
    if as_json:
        return _print_json(result)

    # Print tables for people: the architecture, and the estimate for each policy.
    table = Table(show_header=False)
    table.add_row("class", result["class"])
    table.add_row("parameters", f"{result['parameters']:,}")
    table.add_row("without the embedding", f"{result['parameters_without_embedding']:,}")
    for name, value in sizes.items():
        table.add_row(name, str(value))
    screen.print(table)
    table = Table("policy", "activations", "peak", title=f"Training on {tokens:,} tokens in {dtype}, estimate in GiB")
    for policy, size in memory.activations.items():
        table.add_row(policy, f"{size / 2**30:.2f}", f"{memory.peak(policy) / 2**30:.2f}")
    screen.print(table)
    fixed = f"weights {memory.weights / 2**30:.2f}, gradients {memory.gradients / 2**30:.2f}"
    screen.print(f"{fixed}, {'Muon' if muon else 'AdamW'} {memory.optimizer / 2**30:.2f} GiB", soft_wrap=True)
    if plan is not None:
        screen.print(str(plan), soft_wrap=True)


@app.command()
def download(
    model: Annotated[str, typer.Argument(help="Name on the hub, such as meta-llama/Llama-3.2-1B.")],
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Download the files that loading needs into the hub client's cache, and print the folder.

    Unsupported models are not downloaded. The hub client reads HF_TOKEN, HF_HOME and HF_ENDPOINT.
    """
    from liger_models.arch.auto import get_arch
    from liger_models.convert import hub
    from liger_models.convert.files import read_model_type

    if Path(model).is_dir():
        raise typer.BadParameter(
            f"model must be a name on the hub, got the folder {model}. There is nothing to download."
        )

    # Read config.json first, so that an unsupported model is refused before its weights are downloaded.
    folder = hub.download(
        model, lambda config: get_arch(read_model_type(config)), revision=revision, progress=not as_json
    )
    if as_json:
        return _print_json({"folder": str(folder)})
    print(folder)


@app.command()
def verify(
    model: Annotated[
        str, typer.Argument(help="Folder of a checkpoint. With --packing also a name on the hub, or a model_type.")
    ],
    packing: Annotated[bool, typer.Option("--packing", help="Check that packed documents are independent.")] = False,
    adapter: Annotated[Path | None, typer.Option(help="Folder of LoRA adapters (PEFT's files) to check.")] = None,
    served: Annotated[
        bool, typer.Option("--served", help="With --adapter: check the layout that vLLM and SGLang load.")
    ] = False,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens in each of the two random rows to compare. Default: 64.")
    ] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Check the tensors of a checkpoint against its config.json, and its logits against transformers.

    The logits are computed for random tokens in float32. If transformers is not installed or does not know the model,
    only the tensors are checked. The exit code is 3 if anything differs.

    With --packing, documents of 1 to 130 tokens are packed into one row. Each document must have the same logits and
    gradients in this row and alone, and must not read another document. If the checkpoint does not fit into memory, a
    smaller model with random weights is checked.

    With --adapter, every tensor of the adapter must have moved from its initial value, and must get a gradient. The
    adapter must change the logits, and the logits must equal those of PEFT with transformers' model. With --served, the
    adapter must also have the layout that vLLM and SGLang load.
    """
    if packing and adapter:
        raise typer.BadParameter("give --packing or --adapter, not both")
    if served and not adapter:
        raise typer.BadParameter("--served needs --adapter: give both")
    if length is not None and (packing or adapter):
        raise typer.BadParameter("--length has no effect with --packing or --adapter. Leave it out.")
    if packing:
        return _verify_packing(model, _device(device), as_json)
    if adapter:
        return _verify_adapter(model, adapter, served, _device(device), as_json)
    from liger_models.cli.compare import LIMIT, verify_checkpoint

    # Run both models one after the other, ours first.
    verification = verify_checkpoint(Path(model), length=length or 64, device=_device(device), progress=not as_json)
    # Print the differences, the error of the logits, and the verdict.
    if as_json:
        _print_json(verification.as_json())
    else:
        screen.print(f"{verification.tensors} tensors")
        for difference in verification.differences:
            screen.print(str(difference), soft_wrap=True)
        if verification.logits_error is not None:
            error = f"{verification.logits_error:.1e} of their norm (limit {LIMIT:.0e})"
            screen.print(f"logits differ from transformers' by {error}", soft_wrap=True)
        elif verification.not_compared:
            screen.print(f"logits not compared: {verification.not_compared}", soft_wrap=True)
        if verification.place:
            screen.print(f"first difference at {verification.place}", soft_wrap=True)
        screen.print(Text("same", "green") if verification.same else Text("differs", "red"))
    if not verification.same:
        raise typer.Exit(DIFFERS)


def _verify_packing(model: str, device: str, as_json: bool) -> None:
    from liger_models.arch.auto import list_model_types
    from liger_models.cli.packing import check_packing, empty_default, model_to_pack

    is_type = model in list_model_types() and not Path(model).exists()
    empty = empty_default(model) if is_type else _empty_model(model, None)
    loaded, reason = model_to_pack(model, empty, device, progress=not as_json)

    # Show each check when it is done.
    weights = f"random weights, because {reason}" if reason else "its weights"
    about = f"{type(loaded).__name__}: {len(loaded.layers)} layers, {loaded.dtype} on {device}, {weights}"
    checks = []
    if not as_json:
        screen.print(about.replace("torch.", ""), soft_wrap=True)
    for check in check_packing(loaded):
        checks.append(check)
        if not as_json:
            screen.print(str(check), soft_wrap=True)

    # Print the verdict.
    passed = all(check.passed for check in checks)
    if as_json:
        _print_json({"model": about, "checks": [check._asdict() for check in checks], "same": passed})
    else:
        verdict = "packed documents are independent" if passed else "packed documents are NOT what they are alone"
        screen.print(Text(verdict, "green" if passed else "red"))
    if not passed:
        raise typer.Exit(DIFFERS)


def _verify_adapter(model: str, adapter: Path, served: bool, device: str, as_json: bool) -> None:
    from liger_models.cli.adapter import verify_adapter

    # Show each check when it is done. Each finding has its own line.
    problems, checks = 0, []
    for text, findings in verify_adapter(model, adapter, served=served, device=device, progress=not as_json):
        problems += len(findings)
        checks.append({"check": text, "problems": [finding._asdict() for finding in findings]})
        if not as_json:
            lines = [f"PROBLEM: {finding}" for finding in findings] or [f"ok: {text}"]
            screen.print(*lines, sep="\n", soft_wrap=True)

    # Print the verdict.
    if as_json:
        _print_json({"checks": checks, "problems": problems})
    else:
        verdict = f"{problems} problem{'s' * (problems > 1)}" if problems else "the adapter is whole"
        screen.print(Text(verdict, "red" if problems else "green"))
    if problems:
        raise typer.Exit(DIFFERS)


@app.command()
def convert(
    model: Model,
    output: Annotated[
        Path,
        typer.Argument(
            parser=path, help="Folder to write, or with --gguf a file OUT.gguf; a checkpoint there is replaced."
        ),
    ],
    revision: Revision = None,
    dtype: Dtype = "auto",
    adapter: Adapter = None,
    max_shard_size: Annotated[str | None, typer.Option(help="Largest size of one file. Default: 5GB.")] = None,
    mxfp4: Mxfp4 = None,
    gguf: Annotated[
        str | None, typer.Option(help="Write one GGUF file for llama.cpp, with matrices in q8_0, f16 or bf16.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rewrite a Hugging Face checkpoint with another dtype, merged adapters, or files of another size.

    With **--gguf q8_0**, this writes one file for llama.cpp instead: **convert MODEL OUT.gguf --gguf q8_0**.
    """
    from liger_models.convert.files import ASSETS
    from liger_models.convert.gguf import check_target, save_gguf
    from liger_models.retrieval.settings import MODULES, copy_settings, has_settings, settings_folder

    # Report wrong arguments before the model is loaded.
    if gguf is not None and mxfp4 is not None:
        raise typer.BadParameter("--mxfp4 and --gguf must not be given together. Choose one of the formats.")
    if gguf is not None and max_shard_size is not None:
        raise typer.BadParameter("--max-shard-size has no effect with --gguf, which writes one file. Leave it out.")
    if gguf is not None:
        check_target(output, gguf)
    elif output.is_file():
        raise typer.BadParameter(f"OUTPUT must be a folder, but '{output}' is a file. Choose another place.")
    if adapter is not None and output.resolve() == Path(model).resolve():
        raise typer.BadParameter(
            f"OUTPUT must be another folder than MODEL with an adapter, got '{output}' for both. Merging replaces the "
            "weights for which the adapter was made, and a second time would add it again."
        )
    # With an adapter, load in the target dtype, because the adapter is merged in this dtype. Otherwise, saving converts
    # each tensor.
    target = None if dtype == "auto" else _dtype(dtype)
    load_dtype = "auto" if adapter is None and gguf is None else dtype
    # Embedding models may have no head.
    source = settings_folder(model, revision=revision)
    embeds = has_settings(source) or (adapter is not None and has_settings(adapter))
    loaded = _load(
        model, revision, load_dtype, "cpu", adapter,
        progress=not as_json, head=None if embeds else True,
    )  # fmt: skip

    if gguf is not None:
        with messages.status(Text(f"Writing {printable(str(output))}")):
            save_gguf(loaded, output, gguf, name=Path(model).name)
        if as_json:
            return _print_json({"file": str(output)})
        return print(output)

    # Old files of another checkpoint in the folder, such as a chat template, would be read together with the new files.
    settings = source if adapter is None else adapter
    replaced = {*loaded.current_assets(), *([MODULES] if has_settings(settings) else [])}
    names = [name for name in (*ASSETS, MODULES, "adapter_config.json") if name.endswith((".json", ".jinja", ".model"))]
    others = [name for name in names if name not in replaced and (output / name).exists()]
    if others and output.resolve() != Path(model).resolve():
        raise ValueError(
            f"OUTPUT must not hold files of another checkpoint that {model} does not replace, got {', '.join(others)} "
            f"in '{output}'. Remove them, or choose another folder."
        )

    # The new folder is completed before it replaces an earlier one.
    with messages.status(Text(f"Writing {printable(str(output))}")):
        loaded.save_pretrained(output, dtype=target, max_shard_size=max_shard_size or "5GB", mxfp4=mxfp4)
        copy_settings(settings, output)
    written = sorted(path.name for path in output.iterdir())
    if as_json:
        return _print_json({"folder": str(output), "files": written})
    print(output)


@app.command()
def merge(
    model: Model,
    adapter: Annotated[Path, typer.Argument(parser=path, help="Folder of the LoRA adapters (PEFT's files).")],
    output: Annotated[
        Path, typer.Argument(parser=path, help="Folder to write; an existing checkpoint there is replaced.")
    ],
    revision: Revision = None,
    dtype: Dtype = "auto",
    mxfp4: Mxfp4 = None,
    as_json: AsJson = False,
) -> None:
    """Merge LoRA adapters into their model and write a plain checkpoint, as **convert** does with an adapter."""
    convert(model, output, revision, dtype, adapter, mxfp4=mxfp4, as_json=as_json)


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(ctx: typer.Context) -> None:
    """Train a model on data: **train MODEL DATA --lora-r 16**; **train --help** lists the options.

    A YAML or JSON file may hold the options: **train config.yaml --lr 1e-5**.

    This runs on one device. For several devices: torchrun --nproc-per-node 8 -m liger_models.train config.yaml
    """
    from liger_models.train.loop import main

    # `main` parses the arguments itself. Its errors reach `_Commands`, which prints them.
    main(ctx.args, ctx.command_path, standalone=False)


@app.command()
def recipe(
    model: Model,
    memory: Annotated[
        str | None, typer.Option(help="Memory of the GPU, such as 24GB. Default: that of this machine's GPU.")
    ] = None,
    method: Annotated[str, typer.Option(help="full, lora, 4bit, or auto: the first of these that fits.")] = "auto",
    length: Annotated[
        int | None, typer.Option(min=2, help="Tokens in a row. Default: 4096, or fewer if nothing fits with more.")
    ] = None,
    output: Annotated[Path | None, typer.Option(dir_okay=False, help="File to write instead of printing it.")] = None,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Write a file of options for **train** with which a model should fit into the memory of one GPU.

    Reads config.json only. The memory is an estimate without the activations of images. For models with images, a fifth
    of the memory is left free, mainly for the images' activations.
    """
    import torch

    from liger_models.common.replacing import replacing
    from liger_models.convert.folder import reporting
    from liger_models.memory.plan import parse_memory
    from liger_models.train.recipe import Planner

    # Find the given memory, or the memory of this machine's GPU.
    if memory is None:
        if not torch.accelerator.is_available():
            raise typer.BadParameter("give --memory, such as 24GB: this machine has no GPU")
        size = int(torch.get_device_module().get_device_properties().total_memory)
    else:
        size = parse_memory("recipe: memory", memory, torch.accelerator.current_accelerator(check_available=True))

    # Choose the options, and write them to a file that is named after the model and the method.
    chosen = Planner(_empty_model(model, revision).config).plan(size, method, length)
    name = Path(model).resolve().name if Path(model).exists() else model.rpartition("/")[2]
    text = chosen.yaml(model, f"{name.lower()}-{chosen.method}")
    if output is not None:
        with reporting(output):
            output.parent.mkdir(parents=True, exist_ok=True)
            with replacing(output) as new:
                new.write_text(text, encoding="utf-8")
    if as_json:
        return _print_json({**chosen._asdict(), "output": None if output is None else str(output)})
    print(text if output is None else output, end="" if output is None else "\n")


@app.command()
def generate(
    model: Model,
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue or to answer. With --chat it may be left out, to converse.")
    ] = None,
    chat: Annotated[
        bool, typer.Option(help="Use the chat template. Without a prompt, read messages line by line.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(
            help="Image for a model with images, before the prompt: a path, file:// URL or data URI. Repeatable."
        ),
    ] = None,
    video: Annotated[
        list[str] | None, typer.Option(help="Video file for a model with videos, before the prompt. Repeatable.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens to generate.")] = 256,
    sample: Annotated[
        bool | None, typer.Option(help="Sample tokens, or take the most probable. Default: the checkpoint's setting.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Default: the checkpoint's setting.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Default: the checkpoint's setting; 0 for all tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Default: the checkpoint's setting.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Default: the checkpoint's setting.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Default: the checkpoint's setting.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer. Repeatable.")] = None,
    seed: Annotated[int | None, typer.Option(min=-(2**63), max=2**64 - 1, help="Seed of the sampling.")] = None,
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="Smaller model with the same tokenizer, whose drafts save time; mtp for the model's own block for "
            "multi-token prediction."
        ),
    ] = None,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device: Device = None,
    adapter: Adapter = None,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt, or chat. The text is printed while it is generated. **/exit** or Ctrl-D ends a chat.

    With --image or --video, the chat template renders the prompt as a question about the images or videos. In a
    conversation, **/image PATH** and **/video PATH** add an image or a video to the next message, and **/help**
    lists the commands.
    """
    if prompt is None and (not (chat or image or video) or as_json):
        raise typer.BadParameter("give a prompt, or --chat without --json to converse")
    if system is not None and not (chat or image or video):
        raise typer.BadParameter("--system needs --chat: give both")
    import torch

    from liger_models.cli.conversation import Conversation, open_medium

    # Open media first, so that errors come before a large model is loaded.
    sources = [("image", source) for source in image or ()] + [("video", source) for source in video or ()]
    media = [open_medium(medium, source) for medium, source in sources]
    if seed is not None:
        torch.manual_seed(seed)

    # Load the model and the draft model, and collect the options. Options that are None come from the checkpoint's
    # generation_config.json.
    loaded = _load(model, revision, dtype, _device(device), adapter, progress=not as_json)
    settings: dict[str, Any] = {
        "do_sample": sample, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "max_new_tokens": max_new_tokens, "stop_strings": stop or None
    }  # fmt: skip
    if draft_model == "mtp":
        from liger_models.adapters.mtp import LigerMTP

        settings["draft_model"] = LigerMTP(loaded)
    elif draft_model is not None:
        draft = _load(draft_model, None, dtype, _device(device), None, progress=not as_json)
        if draft.tokenizer.backend.get_vocab() != loaded.tokenizer.backend.get_vocab():
            raise typer.BadParameter(
                f"--draft-model must have the tokenizer of {model}, got another vocabulary in {draft_model}. Choose a "
                "smaller model of the same family."
            )
        settings["draft_model"] = draft
        settings["seed"] = torch.initial_seed() % 2**62
    conversation = Conversation(loaded, settings, media, chat or bool(media), system)

    # Print a single answer.
    if as_json:
        return _print_json({"prompt": prompt, "text": "".join(conversation.answer(prompt or ""))})
    if prompt is not None:
        return _print_pieces(conversation.answer(prompt))

    # Run a conversation until the input ends. Invalid UTF-8 in the input must not end it.
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        command, _, argument = line.partition(" ")
        if command == "/exit":
            return
        if command in ("/image", "/video"):
            try:
                conversation.attach(command, argument.strip())
            except (OSError, ValueError) as error:
                messages.print(str(error), soft_wrap=True)
        elif re.fullmatch(r"/\w+", command):  # a path would have a second slash
            unknown = "" if command == "/help" else f"{command} is no command. "
            messages.print(f"{unknown}{CHAT_COMMANDS}", soft_wrap=True)
        elif line.strip() or conversation.media:
            try:
                _print_pieces(conversation.answer(line))
            except ValueError as error:  # such as an error of the chat template
                messages.print(str(error), soft_wrap=True)


def _print_pieces(pieces: Iterable[str]) -> None:
    # A file or another program gets the text unchanged.
    show = printable if sys.stdout.isatty() else str
    for piece in pieces:
        print(show(piece), end="", flush=True)
    print()


@app.command()
def bench(
    model: Model,
    revision: Revision = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows in a step.")] = 1,
    length: Annotated[int, typer.Option(min=2, help="Tokens in a row.")] = 4096,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps, after one warm-up step.")] = 10,
    checkpointing: Annotated[str, typer.Option(help="Checkpointing policy: none, selective or full.")] = "none",
    dtype: Annotated[str, typer.Option(help="Dtype of weights and moments.")] = "bfloat16",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Time training steps with LigerAdamW on random tokens and weights. Reads config.json only."""
    import torch

    from liger_models.cli.compare import random_text
    from liger_models.train.metrics import PEAK_FLOPS, flops
    from liger_models.train.optimizer import LigerAdamW

    # Create the model with random weights, and draw random tokens.
    target = _device(device)
    empty = _empty_model(model, revision)
    loaded = type(empty).from_config(empty.config, dtype=_dtype(dtype), device=target)
    loaded.set_checkpointing(checkpointing)
    optimizer = LigerAdamW(loaded.parameters(), lr=1e-5)
    ids = random_text(loaded.config, rows, length).to(target)
    accelerated = target != "cpu"

    def step() -> None:
        loaded(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if accelerated:
            torch.accelerator.synchronize(target)

    # The first step is not timed, because it compiles kernels and fills caches.
    step()
    start = time.perf_counter()
    for _ in track(range(steps), "Steps", console=messages, disable=as_json):
        step()
    seconds = (time.perf_counter() - start) / steps

    # Compute the speed, and its fraction of the device's peak. Each row is a separate document.
    bounds = torch.arange(0, rows * length + 1, length, device="cpu")
    operations = flops(loaded, [{"input_ids": ids.cpu(), "cu_seqlens": bounds}])
    name = torch.get_device_module(target).get_device_name(target) if accelerated else "cpu"
    peak = next((value for part, value in PEAK_FLOPS.items() if part in name), None)
    result: dict[str, Any] = {
        "device": name,
        "tokens_per_second": rows * length / seconds,
        "seconds_per_step": seconds,
        "mfu": None if peak is None else operations / seconds / peak,
        "peak_memory": torch.get_device_module(target).max_memory_allocated(target) if accelerated else None,
    }
    if as_json:
        return _print_json(result)

    # Print a table for people, without values that were not measured.
    table = Table(show_header=False)
    for key, value in result.items():
        if value is not None:
            text = f"{value / 2**30:.2f} GiB" if key == "peak_memory" else value
            table.add_row(key.replace("_", " "), f"{text:,.3f}" if isinstance(text, float) else str(text))
    screen.print(table)


@app.command("new-arch")
def new_arch_command(
    name: Annotated[str, typer.Argument(help="model_type of the architecture, which also names the files.")],
    config: Annotated[
        Path, typer.Option("--from", exists=True, dir_okay=False, help="The config.json of a released checkpoint.")
    ],
    model: Annotated[
        str | None, typer.Option(help="Name of the released model, such as Minitron-4B-Base, for its files.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the files of a new architecture from a config.json: a copy of the nearest module, and test data.

    Run it in the root of a checkout, with transformers installed. It compares a tiny model of transformers with each
    text architecture that has a file of its own name, such as llama.py, and copies the nearest one. Then it prints what
    still differs: tensors, settings, and parts of a block. Nothing is overwritten.
    """
    from liger_models.cli.new_arch import PUBLIC, new_arch

    written = new_arch(name, config, model)
    if as_json:
        return _print_json(written._asdict())
    for file in written.files:
        print(file)
    for note in written.notes:
        messages.print(f"note: {note}", soft_wrap=True)

    # Print the next steps to stderr, so that stdout has only the files.
    module = written.files[0]
    steps = [
        f"{module} is a copy of {written.nearest}, the nearest architecture. Change it until nothing differs:",
        *(f"    {line}" for line in written.differences or ["its tensors and its parts equal transformers'"]),
        f"Give tests/fixtures/{name}/tiny.json a variant for each setting of config.json.",
        f"Compare with transformers: make test ARGS=\"-k '{name} or {model or name}'\". Then run make check.",
        f"For a public name, add to {PUBLIC}:",
        *(f"    {line}" for line in written.public),
        "docs/adding-an-architecture.md explains each step.",
    ]
    messages.print("Next:", *steps, sep="\n", soft_wrap=True)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def _dtype(name: str) -> Any:
    from liger_models.convert.files import as_dtype

    try:
        return as_dtype("dtype", name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _device(name: str | None) -> str:
    from liger_models.common.device import available_device

    try:
        return str(available_device("device", name))
    except ValueError as error:
        raise typer.BadParameter(str(error).removeprefix("device: ")) from error


def _load(
    model: str,
    revision: str | None,
    dtype: str,
    device: str,
    adapter: Path | None,
    *,
    progress: bool,
    head: bool | None = True,
) -> "CausalLM":
    from liger_models.adapters.lora import merge_lora
    from liger_models.adapters.peft_files import load_adapter
    from liger_models.arch.auto import load_by_name
    from liger_models.retrieval.settings import is_bidirectional

    _check_revision(model, revision)
    target = None if dtype == "auto" else _dtype(dtype)
    loaded = load_by_name(model, revision=revision, dtype=target, device=device, progress=progress, head=head)
    if adapter is None:
        return loaded
    if is_bidirectional(adapter):
        loaded.set_bidirectional()
    return merge_lora(load_adapter(loaded, adapter))


def _check_revision(model: str, revision: str | None) -> None:
    if revision is not None and Path(model).exists():
        raise typer.BadParameter(
            f"--revision must be given with a name on the hub, got it with the folder {model}. Leave it out."
        )


def _empty_model(model: str, revision: str | None) -> "CausalLM":
    """Return the model on the meta device, without weights."""
    import huggingface_hub

    from liger_models.cli.compare import empty_model
    from liger_models.convert.files import CONFIG
    from liger_models.convert.hub import naming

    _check_revision(model, revision)
    folder = Path(model)
    if not folder.exists():
        with naming(model):
            folder = Path(huggingface_hub.hf_hub_download(model, CONFIG, revision=revision)).parent
    return empty_model(folder)
