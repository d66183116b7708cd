from typing import Any

from liger_models.hf.auto import register as register
from liger_models.hf.auto import registered as registered
from liger_models.hf.auto import unregister as unregister
from liger_models.hf.auto import wrap as wrap
from liger_models.hf.cache import LigerCache as LigerCache
from liger_models.hf.classification import LigerForSequenceClassification as LigerForSequenceClassification
from liger_models.hf.model import LigerForCausalLM as LigerForCausalLM
from liger_models.hf.model import LigerModel as LigerModel

def __getattr__(name: str) -> Any: ...
