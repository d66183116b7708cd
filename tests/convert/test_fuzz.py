"""Damaged and hostile files: each loads, or is a ValueError or a FileNotFoundError in one line, within seconds.

The cases are the same in every run. LIGER_FUZZ=20 runs twenty times as many.
"""

import copy
import functools
import io
import json
import os
import random
import struct
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from liger_models import AutoLigerModel, LigerLlama, LlamaConfig
from liger_models.arch.auto import get_arch
from liger_models.base.images import read_image
from liger_models.convert.config_map import blaming, read_config
from liger_models.data.encoding import FIELDS, Encoder
from liger_models.data.sources import read_records
from liger_models.text import limits
from liger_models.text.tokenizer import Tokenizer

from ..text.folders import LLAMA3_STYLE, MESSAGES, SPECIAL, byte_level

TIMES = int(os.environ.get("LIGER_FUZZ", "1"))
DATA = Path(__file__).parents[1] / "fixtures"
ODD: list[Any] = [
    None, True, 0, -1, 1, 3, 2**31, 2**63, 10**30, 0.0, -0.5, 1e-320, float("nan"), float("inf"), "", "x", "../x", [],
    [1], [None], {}, {"a": 1}, [[]], "/etc/passwd", "default", "yarn", "dynamic", "longrope",
]  # fmt: skip


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every dict or list inside of JSON, with each of its keys."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield content, key
        if isinstance(value, dict | list):
            yield from places(value)


def damaged_json(content: Any, chance: random.Random) -> Any:
    content = copy.deepcopy(content)
    for _ in range(chance.randint(1, 3)):
        if not content:
            break
        owner, key = chance.choice(list(places(content)))
        kind = chance.random()
        if kind < 0.15:
            del owner[key]
        elif kind < 0.25 and isinstance(owner, dict):
            owner[chance.choice(["rope_scaling", "head_dim", "x", "num_experts"])] = owner[key]
        else:
            owner[key] = copy.deepcopy(chance.choice(ODD))
    return content


def damaged_bytes(content: bytes, chance: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) or 1)
        data[at : at + chance.choice([0, 1, 1, 8])] = chance.randbytes(chance.choice([0, 1, 1, 4]))
    return bytes(data[: chance.choice([len(data), len(data), chance.randrange(len(data) + 1)])])


def survives(call: Callable[[], Any], case: object) -> bool:
    """Whether the call succeeds; any other error than the promised ones fails the test."""
    began, message = time.thread_time(), None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except (FileNotFoundError, ValueError) as error:
        message = str(error)
    except BaseException as error:  # panics of Rust libraries are no Exception
        raise AssertionError(f"{type(error).__name__}: {error} for {case!r:.2000}") from error
    assert time.thread_time() - began < 10, case
    assert message is None or (len(message) > 20 and "\n" not in message), (message, case)
    return message is None


def test_configurations():
    chance, fine = random.Random(0), 0
    files = sorted(path for path in DATA.glob("*/*.json") if ".shapes" not in path.name and path.stem != "tiny")
    for file in files * TIMES:
        hf = json.loads(file.read_text())
        if hf.get("model_type") != file.parent.name:
            continue
        model_class = get_arch(file.parent.name)
        for _ in range(6):
            odd = damaged_json(hf, chance)

            def build(odd: Any = odd, model_class: Any = model_class) -> None:
                config = read_config(model_class.config_class, odd)
                if getattr(config, "num_hidden_layers", 0) <= 4:
                    with blaming("config.json"), torch.device("meta"):
                        model_class(config)

            fine += survives(build, (file.name, odd))
    assert fine > 5


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=400, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
    )  # fmt: skip
    model = LigerLlama(config)
    model.assets = {
        "tokenizer.json": byte_level().to_str().encode(),
        "tokenizer_config.json": json.dumps({**SPECIAL, "chat_template": LLAMA3_STYLE}).encode(),
    }
    model.save_pretrained(tmp_path / "model", max_shard_size="15KB")
    return tmp_path / "model"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_files_of_a_checkpoint(checkpoint, name):
    chance = random.Random(1)
    whole = (checkpoint / name).read_bytes()
    for turn in range(80 * TIMES):
        if turn % 4:
            content = json.dumps(damaged_json(json.loads(whole), chance)).encode()
        else:
            content = damaged_bytes(whole, chance)
        (checkpoint / name).write_bytes(content)
        survives(lambda: AutoLigerModel.from_pretrained(checkpoint, progress=False), content)
    (checkpoint / name).write_bytes(b"[" * 200_000)
    assert not survives(lambda: AutoLigerModel.from_pretrained(checkpoint, progress=False), "deep")


def test_headers_of_safetensors(checkpoint):
    chance = random.Random(2)
    file = sorted(checkpoint.glob("*.safetensors"))[0]
    whole = file.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header, rest = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    for turn in range(80 * TIMES):
        if turn % 4:
            odd = json.dumps(damaged_json(header, chance)).encode()
            content = struct.pack("<Q", len(odd)) + odd + rest
        else:
            content = damaged_bytes(whole[: 8 + length], chance) + rest
        file.unlink()  # the old content may still be mapped
        file.write_bytes(content)
        survives(lambda: AutoLigerModel.from_pretrained(checkpoint, progress=False), content[:1000])


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json"])
def test_tokenizers(checkpoint, name):
    chance = random.Random(3)
    files = {each: (checkpoint / each).read_bytes() for each in ("tokenizer_config.json", "tokenizer.json")}
    parts = json.loads(files[name])
    for turn in range(40 * TIMES):
        odd = json.dumps(damaged_json(parts, chance)).encode() if turn % 4 else damaged_bytes(files[name], chance)

        def use(odd: bytes = odd) -> None:
            tokenizer = Tokenizer.from_files(files | {name: odd})
            tokenizer.decode(tokenizer.encode("Hello <|eot_id|> 🙂"))
            tokenizer(["a", "b c"])

        survives(use, odd)


PIECES = [
    "{{ x }}", "{% for i in range(9999) %}", "{% endfor %}", "{% for m in messages %}", "{{ m.content | trim }}", "}}",
    "{% set ns = namespace(x=[1]) %}", "{% set ns.x = ns.x + ns.x %}", "{{ ns.x }}", "{{ 'ab' * 99999 }}",
    "{% if m %}", "{% endif %}", "{{ messages | tojson(indent=9) }}", "{{ (messages | string) * 999 }}", "{{ 1 // 0 }}",
    "{% macro f(a) %}",
    "{% endmacro %}", "{{ f(f) }}", "{{ range(99999) | join('abc') }}", "{{ ns.x[1:] == ns.x[:-1] }}", "{% set x %}",
    "{% endset %}", "{{ '%99999s' % x }}", "{{ x.replace('a', x) }}", "{{ messages[99].x.y }}", "{% generation %}",
    "{% endgeneration %}", "{{ 9 ** 99 ** 9 }}", "{{ x | batch(99999, x) | list | length }}", "{{ x ~ x ~ ns }}", "\0",
]  # fmt: skip


def test_chat_templates(monkeypatch):
    monkeypatch.setattr(limits, "WORK", 1_000_000)
    chance, fine = random.Random(4), 0
    for turn in range(300 * TIMES):
        template = "".join(chance.choices(PIECES, k=chance.randint(1, 8)))
        if turn % 3 == 0:
            template = damaged_bytes(LLAMA3_STYLE.encode(), chance).decode(errors="replace")
        tokenizer = Tokenizer(byte_level_once(), {**SPECIAL, "chat_template": template})

        def use(tokenizer: Tokenizer = tokenizer) -> None:
            tokenizer.apply_chat_template(MESSAGES, tokenize=False)

        fine += survives(use, template)
    assert fine > 5


byte_level_once = functools.cache(byte_level)


@pytest.mark.filterwarnings("ignore")
def test_images():
    chance = random.Random(5)
    image = Image.frombytes("RGB", (16, 12), chance.randbytes(16 * 12 * 3))
    for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"):
        content = io.BytesIO()
        image.save(content, kind)
        for _ in range(60 * TIMES):
            odd = damaged_bytes(content.getvalue(), chance)
            survives(lambda odd=odd: read_image(odd), (kind, odd))


LINES: list[dict[str, Any]] = [
    {"text": "Hello there. 🙂"},
    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]},
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
        ],
        "tools": '[{"type": "function", "function": {"name": "f"}}]',
    },
]


def test_lines_of_training_data(tmp_path):
    chance, fine = random.Random(6), 0
    tokenizer = Tokenizer(byte_level_once(), {**SPECIAL, "chat_template": LLAMA3_STYLE})
    odd_lines = [b'{"text": "\\ud800"}', b'{"text": ' + b"[" * 100_000, b'{"input_ids": [1' + b"0" * 5000 + b"]}"]
    for turn in range(400 * TIMES):
        line = json.dumps(damaged_json(chance.choice(LINES), chance)).encode()
        line = damaged_bytes(line, chance) if turn % 4 == 0 else line
        content = line.replace(b"\n", b" ") if turn >= len(odd_lines) else odd_lines[turn]
        (tmp_path / "train.jsonl").write_bytes(content + b"\n")

        def use() -> None:
            list(Encoder(tokenizer, None).encode(read_records((tmp_path / "train.jsonl",), FIELDS)))

        fine += survives(use, content)
    assert fine > 20
