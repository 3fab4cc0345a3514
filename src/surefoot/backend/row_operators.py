"""What a device must offer for the rows of a step: cache writes, attention, recurrence.

Shapes are those of `protocol`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from surefoot.backend.operands import (
    Compression,
    DeltaCaches,
    DeltaInputs,
    Entries,
    LatentPages,
    Latents,
    Placing,
)


class RowOperators(Protocol):
    """Cache writes and attention of one step, prepared once and used by every layer."""

    def paged_write(self, pool: Tensor, entries: Tensor) -> None:
        """Store each token's entry at its page and offset.

        Args:
            pool: [pages, *lead, P, dim]; written in place.
            entries: [T, *lead, dim], finite: a masked entry is multiplied by zero.
        """
        ...

    def paged_attention(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float) -> Tensor:
        """Causal attention of each token over its row's pages, its own entry included.

        Args:
            q: [T, H, D].
            k_pool: [pages, K, P, D]; the step's entries are already written.
            v_pool: the same for values.
            scale: factor on the scores.

        Returns:
            [T, H, D] in q's dtype.
        """
        ...

    def attend_pages(
        self,
        q_and_k: Tensor,
        v: Tensor,
        placing: Placing,
        pools: tuple[Tensor, Tensor],
        scale: float,
    ) -> Tensor:
        """Norm and rotate heads, store keys and values, and attend as `paged_attention` does.

        Args:
            q_and_k: [T, H + K, D], queries first.
            v: [T, K, D].
            placing: what happens to `q_and_k`.
            pools: of keys and of values, each [pages, K, P, D]; written in place.
            scale: factor on the scores.

        Returns:
            [T, H, D] in q_and_k's dtype.
        """
        ...

    def ring_write(self, ring: Tensor, entries: Tensor) -> None:
        """Store the last min(n, capacity) entries of each row in columns position % capacity.

        Args:
            ring: [slots, capacity, *shape]; written in place.
            entries: [T, *shape], finite.
        """
        ...

    def window_attention(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        rings: tuple[Tensor, Tensor],
        window: int,
        scale: float,
    ) -> Tensor:
        """Causal attention over the last `window` positions, the token's own included.

        Ring columns are read only for positions before the row's first token; the step's own keys
        and values are taken from `kv`. Must run before `ring_write` of the same layer.

        Args:
            q: [T, H, D].
            kv: keys and values of the step, each [T, K, D].
            rings: key ring and value ring, each [slots, capacity, K, D].
            window: positions each token sees.
            scale: factor on the scores.

        Returns:
            [T, H, D] in q's dtype.
        """
        ...

    def causal_conv(self, x: Tensor, ring: Tensor, weight: Tensor) -> Tensor:
        """Silu of a depthwise causal convolution along each row.

        Ring columns are read only for positions before the row's first token; before position 0
        there are zeros. Must run before `ring_write` of the same inputs.

        Args:
            x: [T, C] inputs of the step.
            ring: [slots, capacity, C] earlier inputs.
            weight: [C, K]; the last tap meets the token itself.

        Returns:
            [T, C] in x's dtype.
        """
        ...

    def delta_rule(self, inputs: DeltaInputs, caches: DeltaCaches) -> Tensor:
        """Gated delta rule (arXiv 2412.06464) of each row from its checkpoint.

        With S the state before a token: S' = exp(decay) S; u = beta (v - S'^T k);
        S = S' + k u^T; the output is S^T q. Computed block by block at absolute multiples of
        `caches.block`, so a token's bits do not depend on where the row starts. Ring columns are
        read for positions from the checkpoint to the row's first token. Afterwards the step's own
        columns are written (the last `capacity` of them), and the checkpoint stands at the last
        block boundary up to `settles`.

        Returns:
            [T, Hv, dv] float32.
        """
        ...

    def compress(self, raw: Tensor, ring: Tensor, pool: Tensor, form: Compression) -> None:
        """Write an entry for each window that a token of the step closes.

        An entry is the sum of the values of its window, each number weighted by the softmax of its
        scores over the window, normed and rotated. Ring columns are read only for positions before
        the row's first token. Must run before `ring_write` of the same rows.

        Args:
            raw: [T, width] values, then scores; finite.
            ring: [slots, capacity, width] float32, earlier raw rows.
            pool: [pages, P / ratio, size]; written in place.
            form: how.
        """
        ...

    def choose_entries(
        self, q: Tensor, weights: Tensor, pool: Tensor, ratio: int, count: int
    ) -> Tensor:
        """The entries that matter most to each token (a lightning indexer).

        Args:
            q: [T, H, D].
            weights: [T, H] float32.
            pool: [pages, P / ratio, D] keys of entries.
            ratio: tokens of an entry.
            count: most entries a token.

        Returns:
            [T, count] int64: of the entries that a token can see those with the greatest sum of
            weight * relu(q . key) over heads, the lowest index among equals; ascending, then -1.
            What begins below the row's `visible_from` cannot be seen. What becomes of scores that
            are not numbers is open.
        """
        ...

    def attend_latents(
        self, q: Tensor, latents: Latents, entries: Entries | None, sinks: Tensor, scale: float
    ) -> Tensor:
        """Attention over a window and compressed entries in one softmax, which a sink joins.

        Must run before `ring_write` of the step's latents.

        Args:
            q: [T, H, D].
            latents: of the window.
            entries: what is seen besides.
            sinks: [H] float32 scores of a key whose value is zero.
            scale: factor on the other scores.

        Returns:
            [T, H, D] in q's dtype.
        """
        ...

    def attend_chosen(
        self, q: Tensor, turned: Tensor, keys: LatentPages, chosen: Tensor | None, scale: float
    ) -> Tensor:
        """Attention over chosen positions of latents that are keys and values at once.

        A score is (q . values + turned . keys.turned) * scale; weights apply to `values`. What is
        not chosen is not read. A token that chooses nothing gets zeros.

        Args:
            q: [T, H, R].
            turned: [T, H, dr], the part of the queries that is rotated.
            keys: the step's own entries are already written.
            chosen: [T, n] int64 positions that each token looks at, ascending, then -1; None for
                all that it can see.
            scale: factor on the scores.

        Returns:
            [T, H, R] in q's dtype.

        Raises:
            ValueError: `chosen` has more or fewer rows than there are queries.
        """
        ...
