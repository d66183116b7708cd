"""Entry point of ``python -m liger_models.train config.yaml``."""

from liger_models.common.printable import show_warnings_as_lines
from liger_models.train.loop import main

show_warnings_as_lines()
main(command="python -m liger_models.train")
