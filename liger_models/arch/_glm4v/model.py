"""Base class of GLM-4.1V and GLM-4.5V, which distinguish video frames from images by nearby tokens in the text."""

import torch
from torch import Tensor

from liger_models.arch._glm4v.processor import Glm4vProcessor
from liger_models.arch._glm4v.tower import Glm4vTower
from liger_models.arch._qwen_vl.model import MRopeModel
from liger_models.layers.batch import number_documents


class Glm4vModel(MRopeModel):
    """A model in which images and video frames have the same placeholder.

    transformers rejects a batch with both images and videos, because it can't tell their placeholders apart. In this
    package, a batch may contain both images and videos.
    """

    tower_class = Glm4vTower
    processor_class = Glm4vProcessor
    frames_apart = True

    def media_places(self, input_ids: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `GridImageModel.media_places`.

        A placeholder belongs to a video if a video-start token precedes it in the same document and no video-end token
        lies between the two. The processor replaces every token whose id is ``video_token_id``. If the ids do not come
        from the processor, tokens with this id count as video placeholders.
        """
        config, device, (B, T) = self.config, input_ids.device, input_ids.shape
        # For each token, the index of the last video start and of the last video end before it, or −1, [B, T] each.
        index = torch.arange(T, device=device).expand(B, T)
        start, end = (
            torch.where(input_ids == token, index, -1).cummax(1).values
            for token in (config.video_start_token_id, config.video_end_token_id)
        )
        inside = start > end
        if cu_seqlens is not None:
            first = index - number_documents(cu_seqlens, B, T, device)[1]  # start of the document
            inside = inside & (start >= first)
        here = input_ids == config.image_token_id
        return here & ~inside, (here & inside) | (input_ids == config.video_token_id)
