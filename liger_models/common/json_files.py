"""Parsing of a checkpoint's JSON files."""

import json
from typing import Any


def parse_json(text: bytes, name: object) -> dict[str, Any]:
    """Parse the content of a file that holds one JSON object.

    Args:
        text: content of the file.
        name: name of the file, for the error message.

    Raises:
        ValueError: the content is not a JSON object.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: must be JSON, got {error}. Download it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name}: must be a JSON object, got {type(content).__name__}. Download it again.")
    return content
