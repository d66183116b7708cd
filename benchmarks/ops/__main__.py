"""Measure one peer of one op in this process: ``python -m benchmarks.ops OP PEER``.

The process imports the peer, then waits for a line on its standard input before it touches the GPU.
"""

import gc
import importlib
import json
import sys
from typing import Any

import torch

from .benchmark import OPS
from .measure import ceilings, measure


def main(op_name: str, peer_name: str) -> None:
    # Import the peer, and wait.
    if op_name != "ceilings":
        op = OPS[op_name]
        needs = op.peers["torch" if peer_name == "compile" else peer_name].needs.partition(":")[0]
        if needs:
            importlib.import_module("liger_kernel.transformers.functional" if needs == "liger_kernel" else needs)
    sys.stdin.readline()
    device = {"device": torch.cuda.get_device_name()}
    if op_name == "ceilings":
        print(json.dumps(device | ceilings("cuda")))
        return

    # Print a row for each shape. If a shape fails, the other shapes are still measured.
    for sizes in op.shapes:
        row: dict[str, Any] = {"shape": " ".join(f"{name}={size}" for name, size in sizes.items())} | device
        try:
            row |= measure(op, peer_name, sizes, "cuda")
        except Exception as error:
            row["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        print(json.dumps(row), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
