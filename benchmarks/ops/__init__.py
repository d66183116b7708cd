"""Single ops against their peers.

``op`` defines an op, ``measure`` checks and times it, and ``benchmark`` runs all ops.

The other files define the ops. All tensors are in bf16, with 2 bytes per element. Letters mean the same as in the
package: N tokens, C hidden size, F MLP width, H query and G key-value heads, D head size, V vocabulary, X experts, K
experts per token, B sequences of T positions, L layers, P pairs of sequences.
"""
