"""Which sequences a step trains on: a pure function of the step, the seed and nothing else.

A store of N tokens has N-1 tokens to predict. Window w is tokens [w*S, w*S + S + 1): S inputs and, one
further on, S targets; consecutive windows share one token, so that every token but the first is a target
exactly once. The last window is padded, and its padding is masked by position, never by token id.

Sequence g = step * global_batch + index of the whole run is in epoch g // W at place g % W, where W is the
number of windows: batches straddle epochs, so nothing is lost or repeated within one. Every rank finds its
sequences, and the number of target tokens of the global batch, without a word to any other.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ratrain.data.permutation import permute
from ratrain.data.store import TokenStore
from ratrain.errors import UserError

IGNORED = -100
"""Target value of a masked position; the default `ignore_index` of cross entropy."""

_NO_WINDOW = -1


@dataclass(frozen=True)
class Sequences:
    """n training sequences of length S.

    inputs: int64 [n, S], token ids (0 in padding). targets: int64 [n, S], the next token's id, `IGNORED`
    where masked. sample_ids: int64 [n], which data this is: epoch * windows + window, the same under every
    layout; -1 for a sequence that is all padding.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    sample_ids: NDArray[np.int64]


@dataclass(frozen=True)
class Position:
    """Where a step begins: `sequences` trained on before it, that is `place` windows into `epoch`."""

    sequences: int
    epoch: int
    place: int


class SequenceSource(Protocol):
    """What a training or evaluation step asks of a sampler."""

    seq_len: int
    global_batch: int

    def sequences(self, step: int, indices: range) -> Sequences:
        """Sequences `indices`, a part of range(global_batch), of the step's global order."""

    def target_tokens(self, step: int) -> int:
        """Target tokens that are not masked in the step's whole global batch. Reads no data."""


class Sampler:
    """Endless training sequences, each epoch in an order of its own that depends on (seed, epoch) only."""

    def __init__(self, store: TokenStore, seq_len: int, global_batch: int, seed: int) -> None:
        """Raises UserError for sizes below 1 and for a store with nothing to predict."""
        self._windows = _Windows(store, seq_len)
        _check_global_batch(global_batch)
        self.seq_len, self.global_batch, self.seed = seq_len, global_batch, seed

    @property
    def windows_per_epoch(self) -> int:
        return self._windows.count

    def position(self, step: int) -> Position:
        """The data position before `step`, counted from 0."""
        begun = step * self.global_batch
        return Position(begun, begun // self.windows_per_epoch, begun % self.windows_per_epoch)

    def sequences(self, step: int, indices: range) -> Sequences:
        _check_indices(indices, self.global_batch)
        epochs, windows = self._order(step, indices)
        return self._windows.read(windows, epochs * self.windows_per_epoch + windows)

    def target_tokens(self, step: int) -> int:
        _, windows = self._order(step, range(self.global_batch))
        return self._windows.target_tokens(windows)

    def _order(self, step: int, indices: range) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Epoch and window of each index, both int64 [len(indices)]."""
        run_order = step * self.global_batch + np.asarray(indices, dtype=np.int64)
        epochs, places = np.divmod(run_order, self.windows_per_epoch)
        windows = np.empty_like(places)
        for epoch in np.unique(epochs):
            within = epochs == epoch
            windows[within] = permute(places[within], self.windows_per_epoch, (self.seed, int(epoch)))
        return epochs, windows


class EvaluationSampler:
    """The first batches of a store in order, once, so that evaluations of a run see the same text.

    Where the store ends within the last batch, the rest of that batch is all padding: every batch has the
    same shape, and no text counts twice.
    """

    def __init__(
        self, store: TokenStore, seq_len: int, global_batch: int, batches: int | None = None
    ) -> None:
        """batches: how many at most; all that the store holds if None. Raises UserError as `Sampler`."""
        self._windows = _Windows(store, seq_len)
        _check_global_batch(global_batch)
        self.seq_len, self.global_batch = seq_len, global_batch
        available = -(-self._windows.count // global_batch)
        self.batches = available if batches is None else min(batches, available)

    def sequences(self, step: int, indices: range) -> Sequences:
        _check_indices(indices, self.global_batch)
        windows = self._order(step, indices)
        return self._windows.read(windows, windows)

    def target_tokens(self, step: int) -> int:
        return self._windows.target_tokens(self._order(step, range(self.global_batch)))

    def _order(self, step: int, indices: range) -> NDArray[np.int64]:
        if not 0 <= step < self.batches:
            raise IndexError(f"evaluation batch {step} of {self.batches}")
        windows = step * self.global_batch + np.asarray(indices, dtype=np.int64)
        windows[windows >= self._windows.count] = _NO_WINDOW
        return windows


class _Windows:
    """A store cut into windows of S+1 tokens, stride S."""

    def __init__(self, store: TokenStore, seq_len: int) -> None:
        if seq_len < 1:
            raise UserError(f"sequence length {seq_len} is too small; expected at least 1")
        if store.header.tokens < 2:
            raise UserError(
                f"token store {store.path} holds {store.header.tokens} token; at least 2 are needed "
                f"to predict one from the other; give more text"
            )
        self._store, self._seq_len = store, seq_len
        self._targets = store.header.tokens - 1
        self.count = -(-self._targets // seq_len)

    def read(self, windows: NDArray[np.int64], sample_ids: NDArray[np.int64]) -> Sequences:
        inputs = np.zeros((len(windows), self._seq_len), dtype=np.int64)
        targets = np.full((len(windows), self._seq_len), IGNORED, dtype=np.int64)
        for row, window in enumerate(windows.tolist()):
            if window == _NO_WINDOW:
                continue
            start = window * self._seq_len
            tokens = self._store.tokens[start : start + self._seq_len + 1]
            inputs[row, : len(tokens) - 1] = tokens[:-1]
            targets[row, : len(tokens) - 1] = tokens[1:]
        return Sequences(inputs, targets, sample_ids)

    def target_tokens(self, windows: NDArray[np.int64]) -> int:
        whole = int((windows != _NO_WINDOW).sum())
        missing = self.count * self._seq_len - self._targets
        return whole * self._seq_len - int((windows == self.count - 1).sum()) * missing


def _check_global_batch(global_batch: int) -> None:
    if global_batch < 1:
        raise UserError(f"global batch {global_batch} is too small; expected at least 1 sequence")


def _check_indices(indices: range, global_batch: int) -> None:
    if len(indices) and (min(indices) < 0 or max(indices) >= global_batch):
        raise IndexError(f"sequences {indices} of a global batch of {global_batch}")
