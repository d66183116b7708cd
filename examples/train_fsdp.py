"""Train or fine-tune a model with FSDP2 on packed data. Started again, it resumes from its last checkpoint.

    torchrun --nproc-per-node 8 examples/train_fsdp.py examples/train.yaml --output run
    python examples/train_fsdp.py --help

The loop is liger_models/train/loop.py, about 300 lines from the options to the export. To change it, copy that file
over this one: it uses only public functions.
"""

from liger_models.train import main

if __name__ == "__main__":
    main()
