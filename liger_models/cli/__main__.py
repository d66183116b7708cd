"""``python -m liger_models.cli``, for when the console script is not on the PATH."""

from liger_models.cli import main

main()
