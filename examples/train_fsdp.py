"""Train or fine-tune a model with FSDP2 on packed data. A restarted run resumes from its last checkpoint.

    torchrun --nproc-per-node 8 examples/train_fsdp.py examples/train.yaml --output run
    python examples/train_fsdp.py --help

The loop is `train` in liger_models/train/loop.py, about 100 lines from the process group to the export. To change it,
copy that file over this one.
"""

from liger_models.train import main

if __name__ == "__main__":
    main()
