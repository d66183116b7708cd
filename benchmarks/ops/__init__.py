"""Single ops against their peers: ``op`` says what an op is, ``measure`` checks and times one, ``benchmark`` runs all.

The other files define the ops. In them everything is bf16, 2 bytes an element, and letters are the package's: N tokens,
C hidden size, F MLP width, H query and G key-value heads, D head size, V vocabulary, X experts, K experts per token,
B sequences of T positions, L layers, P pairs of sequences.
"""
