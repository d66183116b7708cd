"""Images, videos and texts as the tensors that a vision-language model takes. Needs Pillow: the extra ``vision``."""
