"""The files, apart from the weights, in which sentence-transformers describes an embedding model or a reranker.

``modules.json`` lists the modules. The first module is the transformer, whose files are in the folder itself. An
embedding model also has a pooling module and a normalization module. A reranker also has a module that computes the
score. Each module after the first has a ``config.json`` in a subfolder. ``config_sentence_transformers.json`` has the
prompts.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from huggingface_hub import snapshot_download

from liger_models.common.foreign import is_hub_name
from liger_models.common.json_files import parse_json
from liger_models.convert.hub import naming
from liger_models.retrieval.texts import POOLINGS, check_pooling

MODULES, CONFIG, TRANSFORMER = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
FILES = (MODULES, CONFIG, TRANSFORMER, "*_*/config.json")
"""Names of the files, and a pattern for the configs of modules."""

_POOLING_KEYS = {"lasttoken": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}
"""Maps each pooling to its key in a pooling module's config. In the config, the key has the prefix ``pooling_mode_``.
"""
_OTHER_POOLING_KEYS = ("max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, kw_only=True)
class EmbedderSettings:
    """How the hidden states of a model become embeddings.

    Attributes:
        pooling: "lasttoken", "mean" or "cls"; see `pool`.
        normalize: whether embeddings are normalized to length 1.
        prompts: maps the name of a prompt, such as "query" or "document", to the text that is put before the text to
            embed.
        default_prompt: the name of the prompt that is used by default; None for no prompt.
        max_length: maximum number of tokens; longer texts are cut. None for the model's maximum length.
    """

    pooling: str = "lasttoken"
    normalize: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        check_pooling("EmbedderSettings", self.pooling)

    @classmethod
    def read(cls, name: str | os.PathLike[str], **options: Any) -> "EmbedderSettings | None":
        """Read the settings of an embedding model. Returns None if the folder has no ``modules.json``.

        Args:
            name: folder, or name of a repository on the hub.
            options: ``revision``, ``cache_dir``, ``token`` and ``local_files_only``, as in huggingface_hub.

        Raises:
            ValueError: a module or a kind of pooling is not supported.
        """
        files = _Files(name, options)
        if not files.modules:
            return None
        settings: dict[str, Any] = {"normalize": False, "max_length": files.read(TRANSFORMER).get("max_seq_length")}
        for module, path in files.modules[1:]:
            if module == "Pooling":
                settings["pooling"] = _read_pooling(f"{name}/{path}", files.read(f"{path}/config.json"))
            elif module == "Normalize":
                settings["normalize"] = True
            else:
                raise ValueError(
                    f"{name}: {MODULES} must have the modules Transformer, Pooling and Normalize, got {module}. Other "
                    "modules are not supported."
                )
        described = files.read(CONFIG)
        prompts = {prompt: text for prompt, text in (described.get("prompts") or {}).items() if text is not None}
        return cls(**settings, prompts=prompts, default_prompt=described.get("default_prompt_name"))

    def write(self, folder: str | os.PathLike[str], hidden_size: int, *, bidirectional: bool = False) -> None:
        """Write the files into the folder of a checkpoint or adapter. sentence-transformers can then load this folder.

        Args:
            folder: the folder.
            hidden_size: C, the size of embeddings.
            bidirectional: whether the model is bidirectional. For an adapter, only these files store this setting,
                because the config.json of the base model does not.
        """
        modules = ["Pooling", *["Normalize"] * self.normalize]
        pooling = {"word_embedding_dimension": hidden_size}
        pooling |= {f"pooling_mode_{key}": name == self.pooling for name, key in _POOLING_KEYS.items()}
        pooling |= {f"pooling_mode_{key}": False for key in _OTHER_POOLING_KEYS}
        transformer: dict[str, Any] = (
            {} if self.max_length is None else {"max_seq_length": self.max_length, "do_lower_case": False}
        )
        if bidirectional:
            transformer["config_args"] = {"is_causal": False}
        described = {
            "prompts": dict(self.prompts), "default_prompt_name": self.default_prompt, "similarity_fn_name": "cosine"
        }  # fmt: skip
        _write(
            Path(folder),
            {f"1_{modules[0]}/config.json": {**pooling, "include_prompt": True}, TRANSFORMER: transformer,
             CONFIG: described, MODULES: _list_modules("sentence_transformers.models", modules)},
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RerankerSettings:
    """The settings with which a causal language model scores a document for a query.

    The model computes the logits of two tokens, ``yes`` and ``no``, after a prompt. The score is the logit of ``yes``
    minus the logit of ``no``. The sigmoid of the score is the probability of ``yes``, under the condition that the next
    token is ``yes`` or ``no``.

    Attributes:
        instruction: text that says what makes a document fit a query.
        prefix, suffix: the texts before and after instruction, query and document; by default as in Qwen3-Reranker.
        yes, no: the texts of the two tokens.
        max_length: maximum number of tokens; in longer prompts, the document is cut. None for the model's maximum
            length.
    """

    instruction: str = INSTRUCTION
    prefix: str = PREFIX
    suffix: str = SUFFIX
    yes: str = "yes"
    no: str = "no"
    max_length: int | None = None

    def body(self, query: str, document: str) -> str:
        """Return the text between ``prefix`` and ``suffix``."""
        return f"<Instruct>: {self.instruction}\n<Query>: {query}\n<Document>: {document}"

    @property
    def template(self) -> str:
        """The prompt as a chat template for messages with the roles system, query and document."""
        content = "(messages | selectattr('role', 'eq', '{}') | map(attribute='content') | list + [{}]) | first"
        roles = {"system": json.dumps(self.instruction), "query": "''", "document": "''"}
        system, query, document = (f"{{{{ {content.format(role, text)} }}}}" for role, text in roles.items())
        parts = [f"{{{{ {json.dumps(text)} }}}}" for text in (self.prefix, self.suffix)]
        return f"{parts[0]}<Instruct>: {system}\n<Query>: {query}\n<Document>: {document}{parts[1]}"

    @classmethod
    def read(cls, name: str | os.PathLike[str], **options: Any) -> "RerankerSettings | None":
        """Read the settings that `write` has written, or return None if there are none.

        Args:
            name, options: as in `EmbedderSettings.read`.
        """
        described = _Files(name, options).read(CONFIG).get("liger_reranker")
        return None if described is None else cls(**described)

    def write(self, folder: str | os.PathLike[str], yes: int, no: int) -> None:
        """Write the files into a checkpoint's folder, so that sentence-transformers' ``CrossEncoder`` can load it.

        Args:
            folder: the folder.
            yes, no: the ids of the two tokens.
        """
        described = {"model_type": "CrossEncoder", "liger_reranker": {**vars(self)}, "prompts": {}}
        transformer: dict[str, Any] = {
            "transformer_task": "text-generation",
            "modality_config": {
                "text": {"method": "forward", "method_output_name": "logits"},
                "message": {"method": "forward", "method_output_name": "logits", "format": "flat"},
            },
            "module_output_name": "causal_logits",
            "processor_kwargs": {"chat_template": self.template},
        }
        score = {"true_token_id": yes, "false_token_id": no, "module_input_name": "causal_logits"}
        module = "sentence_transformers.cross_encoder.modules.logit_score"
        _write(
            Path(folder),
            {"1_LogitScore/config.json": score, TRANSFORMER: transformer, CONFIG: described,
             MODULES: _list_modules(module, ["LogitScore"], "sentence_transformers.base.modules.transformer")},
        )  # fmt: skip


def is_bidirectional(folder: Path) -> bool:
    """Return whether the files in an adapter's folder say that the adapter's model is bidirectional."""
    path = folder / TRANSFORMER
    described = parse_json(path.read_bytes(), path) if path.is_file() else {}
    return (described.get("config_args") or {}).get("is_causal") is False


def settings_folder(name: str | os.PathLike[str], **options: Any) -> Path:
    """Return the local folder with sentence-transformers' files. For a name on the hub, the files are downloaded.

    Args:
        name, options: as in `EmbedderSettings.read`.
    """
    if not is_hub_name(name):
        return Path(name)
    with naming(str(name)):
        return Path(snapshot_download(str(name), allow_patterns=[*FILES], **options))


def has_settings(folder: Path) -> bool:
    """Return whether a local folder of a checkpoint or adapter has the files of sentence-transformers."""
    return (folder / MODULES).is_file()


def copy_settings(source: Path, folder: Path) -> None:
    """Copy sentence-transformers' files, if there are any, from the local folder of a checkpoint or adapter to
    ``folder``."""
    if has_settings(source):
        paths = [path for pattern in FILES for path in source.glob(pattern)]
        _write(folder, {str(path.relative_to(source)): json.loads(path.read_bytes()) for path in paths[1:] + paths[:1]})


class _Files:
    """The files of a local folder or of a repository on the hub, without the weights."""

    def __init__(self, name: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
        self.folder = settings_folder(name, **options)
        self.modules: list[tuple[str, str]] = []
        """Pairs of a module's class and its subfolder."""
        path = self.folder / MODULES
        if path.is_file():
            try:
                listed = [(str(module["type"]), str(module["path"])) for module in json.loads(path.read_bytes())]
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}: must be a list of modules, got {error!r}. Download it again.") from error
            self.modules = [(module.rpartition(".")[2], PurePath(place).name) for module, place in listed]

    def read(self, name: str) -> dict[str, Any]:
        """Return the content of a file, or an empty dict if there is no such file."""
        path = self.folder / name
        return parse_json(path.read_bytes(), name) if path.is_file() else {}


def _read_pooling(where: str, described: Mapping[str, Any]) -> str:
    """Return the pooling in a module's config. Formats from before sentence-transformers 6 are also read."""
    keys = {key: name for name, key in _POOLING_KEYS.items()}
    chosen = [key for key in (*keys, *_OTHER_POOLING_KEYS) if described.get(f"pooling_mode_{key}")]
    poolings = described.get("pooling_mode", [keys.get(key, key) for key in chosen] or ["mean"])
    poolings = [poolings] if isinstance(poolings, str) else [*poolings]
    if len(poolings) != 1 or poolings[0] not in POOLINGS or not described.get("include_prompt", True):
        raise ValueError(
            f"{where}: the pooling must be one of {', '.join(POOLINGS)} and include the prompt, got "
            f"{', '.join(poolings)} with include_prompt={described.get('include_prompt', True)}."
        )
    return str(poolings[0])


def _list_modules(package: str, names: list[str], transformer: str = "sentence_transformers.models") -> Any:
    """Return the content of `MODULES`: a list with a transformer and then the modules ``names``."""
    types = [f"{transformer}.Transformer", *(f"{package}.{name}" for name in names)]
    paths = ["", *(f"{number}_{name}" for number, name in enumerate(names, 1))]
    return [
        {"idx": number, "name": str(number), "path": path, "type": module}
        for number, (path, module) in enumerate(zip(paths, types, strict=True))
    ]


def _write(folder: Path, files: Mapping[str, Any]) -> None:
    """Write JSON files, each through a temporary file.

    `MODULES` must come last in ``files``, because readers find the other files through it.
    """
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary.replace(path)
