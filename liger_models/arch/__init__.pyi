from liger_models.arch.auto import AutoLigerModel as AutoLigerModel
from liger_models.arch.auto import get_arch as get_arch
from liger_models.arch.auto import list_archs as list_archs
from liger_models.arch.registry import built_in as built_in
from liger_models.arch.registry import register as register
