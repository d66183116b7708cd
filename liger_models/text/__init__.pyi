from liger_models.text.chat import answer_mask as answer_mask
from liger_models.text.tokenizer import ModelInputs as ModelInputs
from liger_models.text.tokenizer import Tokenizer as Tokenizer
