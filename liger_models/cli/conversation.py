"""The text that ``liger-models generate`` prints: the continuation of a prompt, or the answers in a chat."""

from collections.abc import Iterator, Mapping
from typing import Any

from liger_models.base.causal_lm import CausalLM
from liger_models.base.images import locate_image, open_image
from liger_models.base.videos import read_header
from liger_models.base.vision_language import VisionLanguageModel
from liger_models.data.pixels import make_pixels
from liger_models.data.prompts import encode_prompt


class Conversation:
    """A sequence of prompts to a model and the model's answers.

    Args:
        model: the model.
        settings: arguments of `generate`.
        media: images and videos for the first prompt, from `open_medium`.
        chat: whether prompts are turns of a chat. Otherwise each prompt is a text to continue.
        system: system message of the chat; None for no system message.

    Raises:
        ValueError: the model does not accept media of this kind.
    """

    def __init__(
        self, model: CausalLM, settings: Mapping[str, Any], media: list[dict[str, Any]], chat: bool, system: str | None
    ) -> None:
        self.model, self.settings, self.chat = model, settings, chat
        self.processor: Any = model.processor if isinstance(model, VisionLanguageModel) else None
        self.history: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self.media = media
        for part in media:
            self._check_medium(f"--{part['type']}", part["type"])

    def _check_medium(self, option: str, medium: str) -> None:
        if self.processor is None or medium not in self.processor.kinds:
            raise ValueError(
                f"generate: {option} needs a model with {medium}s, got {type(self.model).__name__}. Leave it out."
            )

    def attach(self, command: str, source: str) -> None:
        """Add an image or a video to the next prompt, for the command /image or /video."""
        medium = command.removeprefix("/")
        self._check_medium(command, medium)
        if not source:
            raise ValueError(f"generate: {command} must be followed by the path of the file, got none.")
        self.media.append(open_medium(medium, source))

    def answer(self, prompt: str) -> Iterator[str]:
        """Yield the answer to a prompt in pieces of whole characters.

        In a chat, the prompt and the answer are added to the history. If an error is raised, the history and the
        attached media do not change.

        Raises:
            ValueError: the prompt has no tokens, or the chat template does not accept it.
        """
        turns, media = len(self.history), self.media
        try:
            yield from self._answer(prompt)
        except ValueError:
            del self.history[turns:]
            self.media = media
            raise

    def _answer(self, prompt: str) -> Iterator[str]:
        # In a chat, the model gets the whole conversation with all media. Otherwise, it continues only the prompt.
        inputs: dict[str, Any] = {}
        if self.chat:
            content: Any = [*self.media, {"type": "text", "text": prompt}] if self.media else prompt
            self.history.append({"role": "user", "content": content})
            reader = self.processor or self.model.tokenizer
            ids, media = encode_prompt("generate", {"prompt": self.history}, reader)
            inputs, self.media = make_pixels(media, self.processor), []
        else:
            ids = self.model.tokenizer.encode(prompt)
        if not ids:
            raise ValueError(f"generate: the prompt must have at least one token, got {prompt!r}. Write a text.")

        # The answer becomes a turn of the chat only when it is complete.
        text = ""
        for piece in self.model.tokenizer.decode_stream(self.model.stream(ids, **inputs, **self.settings)):
            text += piece
            yield piece
        self.history.append({"role": "assistant", "content": text})


def open_medium(medium: str, source: str) -> dict[str, Any]:
    """Create the message part for an image or a video. An image is decoded; for a video, only the header is read."""
    # Report a bad file before the model is loaded.
    try:
        if medium == "image":
            return {"type": medium, medium: open_image(source)}
        file: Any = locate_image(source)
        read_header(file)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"generate: {medium} must be a file, got {source}, which does not exist.") from error
    return {"type": medium, medium: file}
