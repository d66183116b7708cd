# Four GPUs, second call: everything on ranks, then the kernels that changed.
. .gpu/setup.sh
tests 240 tests/parallel tests/kernels/moe tests/kernels/test_seeded_scores.py tests/kernels/test_gated_delta_rule.py tests/kernels/test_divergence.py tests/kernels/test_logits_divergence.py tests/kernels/test_distribution_divergence.py tests/test_quantize.py tests/test_rollout.py tests/test_generation.py
