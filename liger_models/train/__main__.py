"""``python -m liger_models.train config.yaml``."""

from liger_models.train.loop import main

main(command="python -m liger_models.train")
