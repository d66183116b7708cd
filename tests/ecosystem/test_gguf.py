"""llama.cpp's converter on folders that `save_pretrained` writes, and the files that `save_gguf` writes without it."""

import ast
import io
import itertools
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from safetensors import safe_open

from liger_models import AutoLigerModel
from liger_models.convert.files import read_headers
from liger_models.convert.gguf import ARCHITECTURES, PROBE, RELEASED, save_gguf

from ..arch.families import tiny
from ..convert.test_gguf import GGUF, as_stacked
from ..convert.test_save_gguf import assets, sizes
from ..text.folders import byte_level

NAME, VERSION = "llama-cpp-python", "0.3.36"
"""Its source distribution holds llama.cpp, with the converter."""
WANTED = ("convert_hf_to_gguf.py", "conversion/", "gguf-py/")
FAMILIES = ("llama", "mixtral", "phi3", "gemma2")
"""Those of the converter that take a SentencePiece file: it recognizes other tokenizers by hashes of released ones."""


@pytest.fixture(scope="session")
def llama_cpp(tmp_path_factory) -> Path:
    """The converter: in the folder that LLAMA_CPP names, or from the package index."""
    if "LLAMA_CPP" in os.environ:
        return Path(os.environ["LLAMA_CPP"])
    folder = tmp_path_factory.mktemp("llama.cpp")
    command = ["-m", "pip", "download", "-q", "--no-deps", "--no-binary", NAME, f"{NAME}=={VERSION}", "-d", str(folder)]
    subprocess.run([sys.executable, *command], check=True, timeout=500)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        for member in archive.getmembers():
            name = member.name.partition("vendor/llama.cpp/")[2]
            if name.startswith(WANTED):
                member.name = name
                archive.extract(member, folder, filter="data")
    return folder


def save(family: str, folder: Path) -> None:
    """A tiny checkpoint with a SentencePiece tokenizer."""
    torch.manual_seed(0)
    words, model = (
        io.StringIO("\n".join(f"{n} times {m} is {n * m}" for n in range(40) for m in range(9))),
        io.BytesIO(),
    )
    size = next(iter(tiny(family).values()))["vocab_size"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=words, model_writer=model, vocab_size=size, model_type="bpe", hard_vocab_limit=False,
        character_coverage=1.0, minloglevel=9,
    )  # fmt: skip
    config = {**next(iter(tiny(family).values())), "model_type": family}
    made = AutoLigerModel.from_config(config, dtype=torch.float32)
    made.assets = {
        "tokenizer.model": model.getvalue(),
        "tokenizer_config.json": b'{"tokenizer_class": "LlamaTokenizer"}',
    }
    made.save_pretrained(folder)


def expected(family: str, name: str, values: np.ndarray, config: dict) -> np.ndarray:
    """What the converter makes of a tensor: llama.cpp's order of rotated rows, and Gemma's norms with 1 added."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads and GGUF[family] == "LLAMA":
        count = config[heads]
        return values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    return values + 1 if family.startswith("gemma") and "norm" in name else values


@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_has_every_tensor(llama_cpp, tmp_path, family):
    save(family, tmp_path / "model")
    command = [sys.executable, str(llama_cpp / "convert_hf_to_gguf.py"), str(tmp_path / "model")]
    command += ["--outfile", str(tmp_path / "model.gguf"), "--outtype", "f32"]
    place = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:]
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    found = {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}
    stored = read_headers(tmp_path / "model")
    config = {**next(iter(tiny(family).values()))}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[GGUF[family]], config["num_hidden_layers"])
    wanted: dict[str, list[np.ndarray]] = {}
    for name, place_of in stored.items():
        with safe_open(place_of.file, "np") as file:
            values = expected(family, name, file.get_tensor(name), config)
        theirs = names.get_name(as_stacked(name), try_suffixes=(".weight", ".bias"))
        wanted.setdefault(theirs, []).append(values)
    for name, values in wanted.items():
        whole = np.stack(values) if ".experts." in name or "_exps" in name else values[0]
        assert found.pop(name).tobytes() == whole.tobytes(), name
    assert {name for name in found if "rope" not in name} == set()


SCRIPT = """
import runpy, sys
folder = sys.argv[1]
sys.path[:0] = [folder, folder + "/gguf-py"]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv = sys.argv[1:]
runpy.run_path(folder + "/convert_hf_to_gguf.py", run_name="__main__")
"""
"""The converter, which takes every byte-level tokenizer for GPT-2's: it knows none of the tests by its tokens."""


def read(path: Path) -> tuple[dict, dict]:
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return fields, {t.name: (t.tensor_type.name, np.asarray(t.data).tobytes()) for t in reader.tensors}


@pytest.mark.parametrize("quantization", ["f16", "bf16", "q8_0"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
def test_our_file_is_that_of_the_converter(llama_cpp, tmp_path, family, quantization):
    torch.manual_seed(0)
    model = AutoLigerModel.from_config({**sizes(family), "model_type": family}, dtype=torch.bfloat16)
    assets(byte_level(), tmp_path / "tokenizer")
    model.assets = {path.name: path.read_bytes() for path in (tmp_path / "tokenizer").iterdir()}
    model.save_pretrained(tmp_path / "model")
    command = [sys.executable, "-c", SCRIPT, str(llama_cpp), str(tmp_path / "model")]
    command += ["--outfile", str(tmp_path / "theirs.gguf"), "--outtype", quantization]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:]
    save_gguf(model, tmp_path / "ours.gguf", quantization, name="model")
    (ours, our_tensors), (theirs, their_tensors) = read(tmp_path / "ours.gguf"), read(tmp_path / "theirs.gguf")
    if family == "gemma3_text":  # the converter drops rows without a token, and pads the list of tokens all the same
        ours_first, theirs_first = (t.pop("token_embd.weight")[1] for t in (our_tensors, their_tensors))
        assert len(theirs_first) < len(ours_first)
        assert ours_first.startswith(theirs_first)
    assert our_tensors == their_tensors
    for fields in (ours, theirs):
        # The converter makes a name of the folder's, and counts the rows without those that it drops.
        del fields["general.name"], fields["general.size_label"]
        # transformers adds a token to every Qwen2 tokenizer without it.
        for key in ("tokens", "token_type"):
            fields[f"tokenizer.ggml.{key}"] = fields[f"tokenizer.ggml.{key}"][: len(model.tokenizer)]
    assert {name: ours.get(name) for name in theirs} == theirs


def test_the_pre_tokenizers_are_those_of_the_converter(llama_cpp):
    source = (llama_cpp / "conversion" / "base.py").read_text()
    (probe,) = re.findall(r"^ +chktxt = (.*)$", source, re.MULTILINE)
    assert ast.literal_eval(probe) == PROBE
    assert RELEASED.items() <= dict(re.findall(r'chkhsh == "(\w+)":\n.*\n +res = "([^"]+)"', source)).items()


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_llama_cpp_generates_the_same_text(tmp_path, family):
    llama_cpp = pytest.importorskip("llama_cpp", reason=f"compile it: pip install {NAME}")
    torch.manual_seed(0)
    config = {**sizes(family), "model_type": family, "initializer_range": 0.2}
    model = AutoLigerModel.from_config(config, dtype=torch.float32)
    assets(byte_level(), tmp_path / "tokenizer")
    model.assets = {path.name: path.read_bytes() for path in (tmp_path / "tokenizer").iterdir()}
    model = model.half().float()  # exact in an f16 file
    save_gguf(model, tmp_path / "model.gguf", "f16")

    prompt, new = "the quick brown fox", 24
    engine = llama_cpp.Llama(str(tmp_path / "model.gguf"), n_ctx=64, verbose=False, logits_all=True)
    ids = engine.tokenize(prompt.encode(), add_bos=True, special=True)
    assert ids == model.tokenizer.encode(prompt)
    engine.eval(ids)
    logits = np.asarray(engine.scores[: len(ids)])
    expected = model(torch.tensor([ids])).logits[0].detach().numpy()
    np.testing.assert_allclose(logits, expected, atol=5e-3 * np.abs(expected).max())

    # Random tokens are not valid UTF-8, so tokens are compared, and then the bytes of their text.
    engine.reset()
    chosen = list(itertools.islice(engine.generate(ids, temp=0.0), new))
    answer = model.generate(prompt, max_new_tokens=new, do_sample=False, eos_token_id=[])[0, len(ids) :].tolist()
    assert chosen == answer
    text = engine.detokenize(chosen, prev_tokens=ids).decode(errors="replace")
    assert text == model.tokenizer.decode(answer, skip_special_tokens=True)
