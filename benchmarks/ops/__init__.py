"""Single ops against their peers.

``op`` defines an op, ``measure`` checks and times it, and ``benchmark`` runs all ops.

The other files list the ops. All tensors are bf16, 2 bytes an element. Letters have their meaning in the package: N
tokens, C hidden size, F MLP width, H query and G key-value heads, D head size, V vocabulary, X experts, K experts per
token, B sequences of T positions, L layers, P pairs of sequences.
"""
