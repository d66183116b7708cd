"""Entry point of ``python -m liger_models``, which works even if the command ``liger-models`` is not on the PATH."""

from liger_models.cli import main

main()
