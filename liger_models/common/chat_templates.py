"""Merges the chat templates of a checkpoint.

If a checkpoint has several templates, transformers writes the additional ones to a subfolder.
"""

import json
from collections.abc import Mapping

from liger_models.common.json_files import parse_json

CONFIG, DEFAULT = "tokenizer_config.json", "chat_template.jinja"
ADDITIONAL = "additional_chat_templates/*.jinja"
"""Pattern of the files with the additional templates. Each file is named after its template."""


def join_templates(files: dict[str, bytes], additional: Mapping[str, bytes]) -> dict[str, bytes]:
    """Move all templates to tokenizer_config.json, which transformers also reads templates from.

    A checkpoint with the returned files therefore needs no subfolder for additional templates.

    Args:
        files: contents of the checkpoint's files by name.
        additional: contents of the files with the additional templates, by the names of the templates.

    Returns:
        The contents of the files with the templates in tokenizer_config.json; ``files`` if there are no additional
        templates.

    Raises:
        ValueError: tokenizer_config.json is not a JSON object, or a template is not UTF-8.
    """
    if not additional:
        return files
    templates = []
    sources = {"default": files[DEFAULT], **additional} if DEFAULT in files else additional
    for name, source in sources.items():
        try:
            templates.append({"name": name, "template": source.decode()})
        except UnicodeDecodeError as error:
            raise ValueError(f"chat template {name}: must be UTF-8, got {error}. Download it again.") from error
    config = parse_json(files.get(CONFIG, b"{}"), CONFIG) | {"chat_template": templates}
    joined = {name: content for name, content in files.items() if name != DEFAULT}
    return joined | {CONFIG: json.dumps(config, indent=2, ensure_ascii=False).encode()}
