"""The model families, each in one file, or in a folder if the family has several model types or a vision tower.

The file of a family is named after the family's ``model_type`` in config.json. The ``__init__.py`` of a folder has the
table ``MODEL_TYPES``, which maps each model type to its file.
"""

from liger_models.common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
