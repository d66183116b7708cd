# Four GPUs, second call: everything on ranks.
. .gpu/setup.sh
tests ${1:-180} tests/parallel/test_rollout.py tests/parallel/test_tensor.py tests/parallel/test_four_gpus.py tests/parallel
