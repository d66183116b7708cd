"""``python -m liger_models``, for when the command ``liger-models`` is not on the PATH."""

from liger_models.cli import main

main()
