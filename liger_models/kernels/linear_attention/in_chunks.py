"""Linear attention in plain PyTorch, for the reference implementations of the delta rules and the state-space scan."""

import torch
from torch import Tensor

CHUNK = 64
"""Number of tokens that are computed at a time."""


def in_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, *, initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute linear attention: for each head and token, S ← exp(g) · S, S ← S + k dᵀ, o = qᵀ S.

    S [Dk, Dv] is the state of the head, and ``beta`` defines d. With a decay for each channel, row c of S is multiplied
    by exp(g_c).

    Args:
        q, k: [B, H, T, Dk], fp32 or fp64.
        v: [B, H, T, Dv].
        g: the logarithms of the decays, at most 0: [B, H, T], or [B, H, T, Dk] for one decay per channel.
        beta: [B, H, T]. With beta, d = β · (v − kᵀ S) as in the delta rule. If beta is None, d = v.
        initial_state: [B or documents, H, Dk, Dv]; None if S starts at 0.
        cu_seqlens: [documents + 1], the bounds of packed documents; None if each row is a document.

    Returns:
        The output [B, H, T, Dv], and the final states.
    """
    dtype = v.dtype
    (B, H, T, Dk), Dv = k.shape, v.shape[3]
    by_channel = g.dim() == 4
    g = g if by_channel else g[..., None]
    if T == 1 and cu_seqlens is None:
        # For a decoding step, the computation in chunks would take many small operations.
        state = v.new_zeros(B, H, Dk, Dv) if initial_state is None else initial_state.to(dtype)
        state = state * g.exp().mT
        d = v if beta is None else beta[..., None] * (v - k @ state)
        state = state + k.mT * d
        return q @ state, state

    # Find the document of each token. Without `cu_seqlens`, each row is a document.
    token = torch.arange(T, device=v.device)
    edges = torch.arange(2, device=v.device) * T if cu_seqlens is None else cu_seqlens.long()
    # Search all of `edges` instead of edges[1:], because the Inductor of PyTorch 2.11 does not support a slice.
    document = torch.searchsorted(edges, token, right=True) - 1

    # ``state`` [B, H, Dk, Dv] is the state before a chunk, and ``finals`` has the final state of each document.
    state = v.new_zeros(B, H, Dk, Dv)
    initial = None if initial_state is None else initial_state.to(dtype)
    if cu_seqlens is None:
        state, initial = state if initial is None else initial, None
    finals = v.new_zeros(len(edges) - 1, H, Dk, Dv)
    if initial is not None:
        finals = initial * (edges.diff() == 0)[:, None, None, None]

    def chunk(start: int, state: Tensor, finals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        Q, K, V, decay = (x[:, :, start : start + CHUNK] for x in (q, k, v, g))
        tokens_document = document[start : start + CHUNK]

        # Find for each token which tokens of the chunk it attends to [C, C], and whether it reads the previous chunk's
        # state [C, 1].
        causal = torch.ones(len(tokens_document), len(tokens_document), dtype=torch.bool, device=v.device).tril()
        causal = causal & (tokens_document[:, None] == tokens_document)
        # Documents that began before this chunk continue from `state`. Others start from their initial state.
        carried = tokens_document == document[max(start - 1, 0)]
        carried = (carried if start or cu_seqlens is None else carried & False).to(dtype)[:, None]

        # Compute the decays from token to token, [.., C, C, 1 or Dk], and from the state to each token,
        # [.., C, 1 or Dk]. Each decay is computed from a separate sum. In a difference of running sums, small terms
        # would be lost beside a large term, and an infinite term would give NaN.
        later = torch.ones_like(causal).tril(-1)[..., None]
        C = len(tokens_document)
        sums = decay[..., :, None, :].expand(-1, -1, C, C, -1).masked_fill(~later, 0).cumsum(-3)
        between = sums.masked_fill(~causal[..., None], -torch.inf).exp()
        first = (tokens_document[:, None] > tokens_document).sum(-1)  # first token of the same document in this chunk
        since = sums.gather(-2, first[:, None, None].expand(*decay.shape[:3], 1, decay.shape[3])).squeeze(-2)
        since = (since + decay[..., first, :]).exp()

        def pairs(rows: Tensor) -> Tensor:
            """Return the dot product of each row with each key, [.., C, C], multiplied by the decay between their
            tokens.
            """
            if by_channel:
                return torch.einsum("bhik,bhjk,bhijk->bhij", rows, K, between)
            return rows @ K.mT * between[..., 0]

        def read_state(x: Tensor) -> Tensor:
            """Multiply each row of x by the state that the row's document had before this chunk. The state is first
            decayed up to the row's token.
            """
            x = x * since
            out = (x @ state) * carried
            if initial is not None:
                out = out + torch.einsum("bhtk,thkv->bhtv", x, initial[tokens_document]) * (1 - carried)
            return out

        # Solve (I + M) D = β · (V − K̂ S) for D [.., C, Dv], where M is `system` and K̂ S is `read_state(K)`. Then
        # compute the output.
        d = V
        if beta is not None:
            b = beta[:, :, start : start + CHUNK, None]
            system = (pairs(K) * b).tril(-1)
            d = torch.linalg.solve_triangular(system, b * (V - read_state(K)), upper=False, unitriangular=True)
        out = read_state(Q) + pairs(Q) @ d
        # Compute the state after the last token or, with documents, after each token, because a document may end at any
        # token.
        ends = slice(-1, None) if cu_seqlens is None else slice(None)
        after = (between[:, :, ends] * K[:, :, None]).mT @ d[:, :, None]
        previous = state[:, :, None] * carried[ends, :, None]
        if initial is not None:
            previous = previous + initial[tokens_document[ends]].transpose(0, 1) * (1 - carried[ends, :, None])
        after = after + previous * since[:, :, ends, :, None]
        if cu_seqlens is not None:
            is_last = (token[start : start + CHUNK] + 1 == edges[tokens_document + 1]).to(dtype)
            last_states = after[0].transpose(0, 1) * is_last[:, None, None, None]
            finals = finals.index_add(0, tokens_document, last_states)
        return out, after[:, :, -1], finals

    outputs = [v[:, :, :0]]
    for start in range(0, T, CHUNK):
        out, state, finals = chunk(start, state, finals)
        outputs.append(out)
    return torch.cat(outputs, 2), state if cu_seqlens is None else finals
