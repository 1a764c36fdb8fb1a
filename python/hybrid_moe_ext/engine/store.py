"""Keys and values of finished sequences in host memory, found by their tokens. No context is touched here: the bytes are
llama.cpp's, and any context of the same model and cache types takes them.

Attention's go in pieces of `piece_tokens`. A piece hangs below the piece before it, so sequences that begin alike share what
they have in common, and the way down from the root proves that every token before is the same. Other memories (sliding
windows, recurrent) go in whole: a state serves prompts that begin with all its tokens.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .cache import common
from .context import NO_TOKENS, State, Tokens

# Python's share of an entry: the object, its places in dictionaries, two array headers. tests/test_engine_store.py measures it.
_OVERHEAD = 1024


class Entry:
    """Keys and values of `tokens`, which follow those of `parent`."""

    __slots__ = ("begin", "children", "key", "n_pins", "parent", "state", "tokens")

    def __init__(self, key: bytes, tokens: Tokens, state: State | None, parent: Entry | None):
        self.key = key
        self.tokens = tokens
        self.state = state
        self.parent = parent
        self.begin: int = parent.begin + len(parent.tokens) if parent else 0
        self.children: dict[bytes, Entry] = {}
        self.n_pins = 0

    @property
    def n_bytes(self) -> int:
        return (self.state.nbytes if self.state is not None else 0) + self.tokens.nbytes + _OVERHEAD

    def up(self) -> Iterator[Entry]:
        """Itself and all before it but the root."""
        entry = self
        while entry.parent is not None:
            yield entry
            entry = entry.parent


@dataclass(frozen=True)
class Stored:
    """A state of `n_tokens` from position `begin` on, of which a prompt has those up to `end`."""

    begin: int
    end: int
    n_tokens: int
    state: State


class Lease:
    """The longest prefix of a prompt that the store had: `n` tokens. It stays there until the lease is given back."""

    def __init__(self, store: Store, last: Entry, n: int):
        self.n = n
        self._store = store
        self._last: Entry | None = last
        self._pieces = [
            Stored(e.begin, min(e.begin + len(e.tokens), n), len(e.tokens), e.state)
            for e in last.up()
            if e.state is not None
        ][::-1]

    def piece(self, position: int) -> Stored | None:
        """With the token at `position`."""
        return next((p for p in self._pieces if p.begin <= position < p.end), None)

    def give_back(self) -> None:
        """May be called again. Who still copies a piece holds its memory a moment longer."""
        if self._last is not None:
            self._store.unpin(self._last)
            self._last, self._pieces = None, []


class Store:
    """Least recently used goes first; `limit_bytes` holds for states, tokens and Python's objects. For all threads."""

    def __init__(self, limit_bytes: float, piece_tokens: int, in_pieces: bool):
        self.limit_bytes = limit_bytes
        self.piece_tokens = piece_tokens
        self.in_pieces = in_pieces
        self.version = 0  # another one after every change
        self.n_bytes = 0
        self.n_bytes_written = 0
        self.n_evicted = 0
        self._lock = threading.Lock()
        self._root = Entry(b"", NO_TOKENS, None, None)
        # All but the root, the longest unused first. A use moves a piece and then those before it, so the first has none below.
        self._entries: OrderedDict[Entry, None] = OrderedDict()
        self._lengths: dict[int, int] = {}  # of whole states: how many there are

    @property
    def is_on(self) -> bool:
        return self.limit_bytes > 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, prompt: Tokens) -> int:
        """Tokens of a prompt that are here. At least one is left to compute."""
        with self._lock:
            return self._longest(prompt[:-1])[1]

    def take(self, prompt: Tokens) -> Lease | None:
        with self._lock:
            last, n = self._longest(prompt[:-1])
            if n == 0:
                return None
            self._use(last)
            last.n_pins += 1
            return Lease(self, last, n)

    def unpin(self, entry: Entry) -> None:
        with self._lock:
            entry.n_pins -= 1

    def covers(self, tokens: Tokens) -> int:
        """Tokens of a finished sequence that need not be written. They count as used."""
        with self._lock:
            last, n = self._longest(tokens)
            if n:
                self._use(last)
            return n if self.in_pieces or n == len(tokens) else 0

    def add(self, tokens: Tokens, begin: int, end: int, state: State) -> bool:
        """Keeps `state` itself, of tokens [begin, end): at most one piece, from a multiple of piece_tokens on; or a whole
        sequence, from 0. False: there is no room, or the piece before it is not here."""
        with self._lock:
            parent = self._exactly(tokens[:begin]) if self.in_pieces else self._root
            if parent is None:
                return False
            part = tokens[begin:end]
            key = part.tobytes() if self.in_pieces else _digest(part)
            if self._has_already(parent, key, part):
                return True
            # The key's own bytes are the tokens: not kept twice.
            held = np.frombuffer(key, np.int32) if self.in_pieces else part.copy()
            entry = Entry(key, held, state, parent)
            if not self.in_pieces:
                self._demote(part)
            if not self._make_room(entry.n_bytes, parent):
                return False
            parent.children[key] = entry
            self._entries[entry] = None
            self.n_bytes += entry.n_bytes
            self.n_bytes_written += state.nbytes
            self.version += 1
            if not self.in_pieces:
                self._lengths[len(held)] = self._lengths.get(len(held), 0) + 1
            self._use(entry)
            return True

    def close(self) -> None:
        """Forgets everything and takes nothing more."""
        with self._lock:
            self.limit_bytes = 0
            for entry in self._entries:  # parents and children hold each other
                entry.state = None
                entry.children.clear()
            self._entries.clear()
            self._lengths.clear()
            self._root.children.clear()
            self.n_bytes = 0
            self.version += 1

    # --- under the lock

    def _longest(self, tokens: Tokens) -> tuple[Entry, int]:
        return self._longest_path(tokens) if self.in_pieces else self._longest_whole(tokens)

    def _longest_path(self, tokens: Tokens) -> tuple[Entry, int]:
        last, n = self._path(tokens)
        best, n_best = last, 0
        rest = tokens[n : n + self.piece_tokens]
        for child in last.children.values() if len(rest) else ():  # the last piece, in part
            if child.tokens[0] == rest[0]:
                n_common = common(child.tokens, rest)
                if n_common > n_best:
                    best, n_best = child, n_common
        return best, n + n_best

    def _path(self, tokens: Tokens) -> tuple[Entry, int]:
        """Down as far as whole pieces go."""
        entry, n = self._root, 0
        while n + self.piece_tokens <= len(tokens):
            child = entry.children.get(tokens[n : n + self.piece_tokens].tobytes())
            if child is None:
                break
            entry, n = child, n + self.piece_tokens
        return entry, n

    def _exactly(self, tokens: Tokens) -> Entry | None:
        entry, n = self._path(tokens)
        return entry if n == len(tokens) else None

    def _longest_whole(self, tokens: Tokens) -> tuple[Entry, int]:
        best, n, digest = self._root, 0, _hash()
        for length in sorted(self._lengths):
            if length > len(tokens):
                break
            digest.update(tokens[n:length].data)
            n = length
            entry = self._root.children.get(digest.copy().digest())
            if entry is not None and np.array_equal(entry.tokens, tokens[:length]):
                best = entry
        return best, len(best.tokens)

    def _has_already(self, parent: Entry, key: bytes, part: Tokens) -> bool:
        """Or in a longer piece. Shorter ones that the new one contains go."""
        same = parent.children.get(key)
        if same is not None:
            self._use(same)
            return True
        for other in list(parent.children.values()) if self.in_pieces else ():
            n = common(other.tokens, part)
            if n == len(part):
                self._use(other)
                return True
            if n == len(other.tokens) and other.n_pins == 0:
                self._remove(other)
        return False

    def _make_room(self, n_bytes: int, parent: Entry) -> bool:
        if n_bytes > self.limit_bytes:
            return False
        parent.n_pins += 1
        while self.n_bytes + n_bytes > self.limit_bytes:
            oldest = next((e for e in self._entries if not e.children and not e.n_pins), None)
            if oldest is None:
                break
            self._remove(oldest)
            self.n_evicted += 1
        parent.n_pins -= 1
        return self.n_bytes + n_bytes <= self.limit_bytes

    def _remove(self, entry: Entry) -> None:
        assert entry.parent is not None and not entry.children and not entry.n_pins
        del entry.parent.children[entry.key], self._entries[entry]
        self.n_bytes -= entry.n_bytes
        self.version += 1
        if not self.in_pieces:
            self._lengths[len(entry.tokens)] -= 1
            if not self._lengths[len(entry.tokens)]:
                del self._lengths[len(entry.tokens)]

    def _demote(self, tokens: Tokens) -> None:
        """A conversation that has gone on is hardly continued from where it was before: that state, all of it held once more
        in the new one, is the next to go."""
        before, n = self._longest_whole(tokens[:-1])
        if n:
            self._entries.move_to_end(before, last=False)

    def _use(self, last: Entry) -> None:
        for entry in last.up():
            self._entries.move_to_end(entry)


def _hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


def _digest(tokens: Tokens) -> bytes:
    digest = _hash()
    digest.update(tokens.data)
    return digest.digest()
