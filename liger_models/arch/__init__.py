"""The model families: one file per family, or a folder if it has several model types, or a tower and a processor.

The file of a family is named after its ``model_type`` in config.json. The ``__init__.py`` of a folder has the table
``MODEL_TYPES``, which names the file of each model type.
"""

from typing import TYPE_CHECKING

from liger_models.common.lazy import lazy_exports

if TYPE_CHECKING:
    from liger_models.arch.auto import AutoLigerModel as AutoLigerModel
    from liger_models.arch.auto import get_arch as get_arch
    from liger_models.arch.auto import list_archs as list_archs
    from liger_models.arch.registry import built_in as built_in
    from liger_models.arch.registry import register as register
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__, {"auto": ["AutoLigerModel", "get_arch", "list_archs"], "registry": ["built_in", "register"]}
    )
