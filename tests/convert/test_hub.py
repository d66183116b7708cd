import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, file_download
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

from liger_models.arch.auto import AutoLigerModel
from liger_models.arch.llama import LigerLlama, LlamaConfig
from liger_models.convert import hub as hub_module

from ..processes import environment
from .conftest import TINY, assert_same_bits, edit_json, read_tensors
from .hub_server import HubServer, Repo

Make = Callable[..., Path]
upload_warns = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's own call
REPO = "someone/tiny-llama"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A hub, and the client set up for it as HF_ENDPOINT, HF_HOME and HF_HUB_DISABLE_XET do at its import."""
    server = HubServer()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    if "transformers.utils.hub" in sys.modules:  # which keeps a client of the hub of an earlier test
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield server
    server.close()


def upload(server: HubServer, folder: Path, branch: str = "main", private: bool = False) -> str:
    """Put a folder on the hub, with the files that many repositories hold beside it."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    clutter = dict.fromkeys(
        ["README.md", "pytorch_model.bin", "consolidated.00.pth", "original/params.json", "onnx/model.onnx"], b"large"
    )
    return server.repos.setdefault(REPO, Repo(private)).commit(branch, clutter | files)


def load(**options: Any) -> LigerLlama:
    return LigerLlama.from_hub(REPO, progress=False, **options)


def assert_loads(model: torch.nn.Module, folder: Path) -> None:
    expected = LigerLlama.from_pretrained(folder, progress=False)
    assert_same_bits(dict(model.named_parameters()), dict(expected.named_parameters()))


def test_a_single_file(hub: HubServer, make_checkpoint: Make) -> None:
    source = make_checkpoint(dtype=torch.bfloat16)
    (source / "tokenizer.json").write_bytes(b"{}")
    upload(hub, source)
    model = load()
    assert_loads(model, source)
    small = {"config.json", "generation_config.json", "tokenizer.json", "README.md"}
    assert hub.downloaded() == small | {"model.safetensors"}
    assert model.assets["tokenizer.json"] == b"{}"

    asked = len(hub.requests)
    assert_loads(AutoLigerModel.from_hub(REPO, progress=False), source)
    assert not [path for method, path in hub.requests[asked:] if "/cdn/" in path and method == "GET"]
    load(force_download=True)
    assert [path for method, path in hub.requests[asked:] if "/cdn/" in path and method == "GET"]


def test_shards(hub: HubServer, make_checkpoint: Make) -> None:
    source = make_checkpoint(max_shard_size="15KB")
    upload(hub, source)
    stray = hub.repos[REPO].commits[hub.repos[REPO].branches["main"]]
    stray["consolidated.safetensors"] = b"another layout of the same weights"
    assert_loads(load(), source)
    shards = {path.name for path in source.glob("*.safetensors")}
    assert len(shards) > 2
    small = {"config.json", "generation_config.json", "model.safetensors.index.json", "README.md"}
    assert hub.downloaded() == small | shards


def test_branches_and_commits(hub: HubServer, make_checkpoint: Make) -> None:
    first = make_checkpoint("first", dtype=torch.bfloat16)
    second = make_checkpoint("second", num_hidden_layers=1)
    commit = upload(hub, first)
    upload(hub, second, branch="next/version")
    upload(hub, second)
    assert_loads(load(revision=commit), first)
    assert_loads(load(revision="next/version"), second)
    assert_loads(load(), second)
    with pytest.raises(RevisionNotFoundError, match="nowhere"):
        load(revision="nowhere")


def test_all_files_are_of_one_commit(hub: HubServer, make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make_checkpoint("first"), make_checkpoint("second", hidden_size=16)
    upload(hub, first)
    download = hub_module.snapshot_download

    def push_after_the_first_answer(*args: Any, **options: Any) -> str:
        folder = download(*args, **options)
        if options["allow_patterns"] == ["config.json"]:
            upload(hub, second)
        return folder

    monkeypatch.setattr(hub_module, "snapshot_download", push_after_the_first_answer)
    assert_loads(load(), first)


def test_a_private_repository_needs_the_token(hub: HubServer, make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint()
    upload(hub, source, private=True)
    with pytest.raises(RepositoryNotFoundError, match=r"401[\s\S]*someone/tiny-llama"):
        load()
    with pytest.raises(RepositoryNotFoundError, match="401"):
        load(token="hf_wrong")
    assert_loads(load(token=hub.token), source)
    (tmp_path / "token").write_text(hub.token)  # what `hf auth login` leaves
    assert_loads(load(cache_dir=tmp_path / "other"), source)
    with pytest.raises(RepositoryNotFoundError, match="nobody/nothing"):
        LigerLlama.from_hub("nobody/nothing")
    with pytest.raises(RepositoryNotFoundError, match="run/checkpoint is no folder of this machine, either"):
        AutoLigerModel.from_pretrained("run/checkpoint")
    assert_loads(AutoLigerModel.from_pretrained(REPO, token=hub.token, progress=False), source)


def test_a_broken_connection_is_resumed(hub: HubServer, make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)  # between attempts
    source = make_checkpoint()
    upload(hub, source)
    hub.cut["model.safetensors"] = (source / "model.safetensors").stat().st_size * 2 // 3
    # The client writes 10 MB at a time: of this small file nothing stays after a break, so each attempt is in vain.
    with pytest.raises(Exception, match="peer closed connection without sending complete message body"):
        load()
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    asked = len(hub.requests)
    assert_loads(load(), source)
    assert sum("/cdn/" in path and method == "GET" for method, path in hub.requests[asked:]) == 2


def test_a_cut_off_download_is_an_error_and_the_next_one_works(hub: HubServer, make_checkpoint: Make) -> None:
    source = make_checkpoint()
    upload(hub, source)
    size = (source / "model.safetensors").stat().st_size
    hub.short["model.safetensors"] = size - 1
    with pytest.raises(OSError, match=rf"should be of size {size} but has size {size - 1}"):
        load()
    hub.short.clear()
    assert_loads(load(), source)


def test_a_shard_that_is_not_there(hub: HubServer, make_checkpoint: Make) -> None:
    source = make_checkpoint(max_shard_size="15KB")
    gone = sorted(source.glob("model-*.safetensors"))[1]
    gone.unlink()
    upload(hub, source)
    with pytest.raises(FileNotFoundError, match=rf"index.json names, got \d+: missing {gone.name}"):
        load()


def test_an_unsupported_model_is_refused_before_its_weights_are_fetched(hub: HubServer, make_checkpoint: Make) -> None:
    source = make_checkpoint()
    cases = [
        ({"quantization_config": {"quant_method": "gptq"}}, "must not be quantized"),
        ({"quantization_config": None, "rope_parameters": {"rope_type": "new"}}, "got 'new'"),
        ({"rope_parameters": None, "model_type": "mamba"}, "model_type 'mamba' is not supported"),
    ]
    for changes, message in cases:
        edit_json(source / "config.json", **changes)
        upload(hub, source)
        with pytest.raises(ValueError, match=message):
            AutoLigerModel.from_hub(REPO)
    with pytest.raises(ValueError, match="must be 'llama', got 'mamba'"):
        hub_module.download(REPO, lambda config: LigerLlama)
    edit_json(source / "config.json", model_type="llama", house="blue")
    upload(hub, source)
    with pytest.raises(ValueError, match="does not know the keys house"):
        AutoLigerModel.from_hub(REPO, strict=True)
    hub.repos[REPO].commit("main", {"README.md": b"no model"})
    with pytest.raises(FileNotFoundError, match=r"someone/tiny-llama: must hold config\.json"):
        load()
    assert hub.downloaded() == {"config.json"}


def test_without_a_server(hub: HubServer, make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_checkpoint()
    upload(hub, source)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(LocalEntryNotFoundError, match=r"check your internet connection"):
        load()
    with pytest.raises(LocalEntryNotFoundError, match="local_files_only"):
        load(local_files_only=True)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    assert_loads(load(), source)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert_loads(load(), source)
    assert_loads(load(local_files_only=True), source)


@upload_warns
@pytest.mark.parametrize("size", ["5GB", "15KB"])
@pytest.mark.parametrize("tied", [False, True])
def test_push_then_load_is_bit_exact(hub: HubServer, tmp_path: Path, size: str, tied: bool) -> None:
    torch.manual_seed(3)
    model = LigerLlama(LlamaConfig(**TINY, tie_word_embeddings=tied)).to(torch.bfloat16)
    model.assets = {"tokenizer.json": b"{}"}
    model.push_to_hub(REPO, token=hub.token, private=True, commit_message="First", max_shard_size=size)
    assert hub.repos[REPO].private
    assert hub.repos[REPO].messages[-1] == "First"
    again = load(token=hub.token)
    assert_same_bits(dict(again.named_parameters()), dict(model.named_parameters()))
    assert again.assets == model.assets
    again.save_pretrained(tmp_path / "a", max_shard_size=size)
    model.save_pretrained(tmp_path / "b", max_shard_size=size)
    assert_same_bits(read_tensors(tmp_path / "a"), read_tensors(tmp_path / "b"))


@upload_warns
def test_push_replaces_the_weights_and_keeps_the_rest(hub: HubServer, make_checkpoint: Make) -> None:
    upload(hub, make_checkpoint(max_shard_size="15KB"))
    small = LigerLlama(LlamaConfig(**TINY | {"num_hidden_layers": 1}))
    address = hub_module.push(small, REPO, token=hub.token)
    repo = hub.repos[REPO]
    assert address == f"{hub.url}/{REPO}/commit/{repo.branches['main']}"
    assert repo.messages[-1] == "Upload LigerLlama"
    names = repo.commits[repo.branches["main"]].keys()
    assert {name for name in names if "safetensors" in name} == {"model.safetensors"}
    assert {"README.md", "pytorch_model.bin", "generation_config.json"} <= names
    assert_same_bits(dict(load().named_parameters()), dict(small.named_parameters()))


@upload_warns
def test_push_to_a_branch(hub: HubServer, make_checkpoint: Make) -> None:
    source = make_checkpoint()
    upload(hub, source)
    model = LigerLlama.from_pretrained(source, progress=False)
    for _ in range(2):  # the branch is made the first time
        model.push_to_hub(REPO, token=hub.token, revision="half", dtype=torch.float16)
    assert load(revision="half").dtype == torch.float16
    assert load().dtype == torch.float32


def test_push_without_access_saves_nothing(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "save_pretrained", lambda *args, **options: pytest.fail("saved"))
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="401"):
        LigerLlama(LlamaConfig(**TINY)).push_to_hub(REPO, token="hf_wrong")


def test_progress_bars_can_be_switched_off(
    hub: HubServer, make_checkpoint: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    upload(hub, make_checkpoint(max_shard_size="15KB"))
    capsys.readouterr()
    load()
    assert capsys.readouterr().err == ""
    LigerLlama.from_hub(REPO, progress=True, force_download=True)
    assert "Loading weights" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["RemoteProtocolError", "ReadTimeout"])
def test_errors_of_the_clients_http_library_name_the_model(
    hub: HubServer, make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """They are no OSError, which the command line prints in one line."""
    http = sys.modules[huggingface_hub.errors.HfHubHTTPError.__mro__[1].__module__.partition(".")[0]]
    upload(hub, make_checkpoint())
    download = hub_module.snapshot_download

    for file in ("config.json", "model.safetensors"):

        def broken(*args: Any, file: str = file, **options: Any) -> str:
            if options["allow_patterns"] == [file]:
                raise getattr(http, name)("peer closed")
            return download(*args, **options)

        monkeypatch.setattr(hub_module, "snapshot_download", broken)
        with pytest.raises(ConnectionError, match=f"{REPO}: the hub must answer, got {name}: peer closed. Call again"):
            load()


@pytest.mark.parametrize("offline", [False, True])
def test_a_folder_is_no_name(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in (str(tmp_path), "runs/first"):
        with pytest.raises(FileNotFoundError, match=f"{name}: must be a name on the hub, got a folder. Load it"):
            LigerLlama.from_hub(name, local_files_only=offline)


SCRIPT = """
import json
import os
import sys
import torch  # takes most of the time, and reads none of the client's variables

assert "huggingface_hub" not in sys.modules
for line in sys.stdin:
    repo, out, variables = json.loads(line)
    if os.fork() == 0:
        os.environ |= variables
        from liger_models.arch.auto import AutoLigerModel
        try:
            AutoLigerModel.from_hub(repo, progress=False).save_pretrained(out)
            print(json.dumps("loaded"), flush=True)
        except Exception as error:
            print(json.dumps(f"{type(error).__name__} {error}"), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
"""Loads in processes that import the client, because the client reads its variables when it is imported."""


@pytest.mark.slow
def test_the_clients_environment_variables_count(hub: HubServer, make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint(max_shard_size="15KB")
    upload(hub, source, private=True)
    client = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": hub.token, "HF_HUB_OFFLINE": ""}
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment()
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def load(out: str, **extra: str) -> str:
            process.stdin.write(json.dumps([REPO, str(tmp_path / out), client | extra]) + "\n")
            return json.loads(process.stdout.readline())

        assert load("online") == "loaded"
        asked = len(hub.requests)
        assert load("offline", HF_HUB_OFFLINE="1") == "loaded"
        empty = load("empty", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "empty"))
    assert empty.startswith("LocalEntryNotFoundError")
    assert "HF_HUB_OFFLINE" in empty
    assert len(hub.requests) == asked
    for out in ("online", "offline"):
        assert_same_bits(read_tensors(tmp_path / out), read_tensors(source))
        assert json.loads((tmp_path / out / "config.json").read_text())["vocab_size"] == TINY["vocab_size"]
