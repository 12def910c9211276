"""What may be fed: text, bytes, token ids, or an (async) iterator of these, which is pulled piece by piece."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import cast

from locret_stream.errors import InputError, LocretError, SourceError

Piece = str | bytes | list[int]
Source = str | bytes | Iterable[Piece] | Iterable[int] | AsyncIterable[Piece] | AsyncIterable[int]

_EXPECTED = "expected text (str), UTF-8 bytes, token ids (list[int]), or an iterator or async iterator of these"


def as_piece(value: object) -> Piece:
    """One item of a source as a piece; a single int is one token id. Raises InputError for any other type."""
    if isinstance(value, (str, bytes)):
        return value
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    if isinstance(value, (list, tuple)):
        return list(value)
    item = getattr(value, "tolist", None)  # numpy arrays and tensors of ids
    if item is not None:
        ids = item()
        return ids if isinstance(ids, list) else [ids]
    raise InputError(f"found a piece of type {type(value).__name__}; {_EXPECTED}")


class Puller:
    """Pulls pieces from a source, never more than asked for. It never closes the source: what is left stays in it.

    A plain iterator is advanced on the event loop, so it should not block for long; wrap slow ones in an async
    generator.
    """

    def __init__(self, source: Source):
        self.pulled = 0
        self._ended = False
        self._async: AsyncIterator[object] | None = None
        self._sync: Iterator[object] = iter(())
        if isinstance(source, (str, bytes, bytearray, memoryview)):
            self._sync = iter([as_piece(source)] if len(source) else [])
        elif isinstance(source, (list, tuple)) and source and not isinstance(source[0], (str, bytes, list, tuple)):
            self._sync = iter([list(source)])  # ids; a wrong one inside is reported with its place
        elif hasattr(source, "__aiter__") or hasattr(source, "__iter__"):
            try:
                if hasattr(source, "__aiter__"):
                    self._async = source.__aiter__()
                else:
                    self._sync = iter(cast(Iterable[object], source))
            except Exception as error:  # such as an array without dimensions
                raise SourceError(f"a source of type {type(source).__name__} cannot be iterated "
                                  f"({type(error).__name__}: {error}); {_EXPECTED}") from error
        else:
            raise InputError(f"found a source of type {type(source).__name__}; {_EXPECTED}")

    async def next(self) -> Piece | None:
        """The next piece, or None at the end.

        Raises:
            SourceError: the source raised; its own error is the cause. It counts as ended then.
            InputError: the piece is of another type. It is dropped; the source can be pulled further.
        """
        if self._ended:
            return None
        try:
            value = await anext(self._async) if self._async is not None else next(self._sync)
        except (StopIteration, StopAsyncIteration):
            self._ended = True
            return None
        except LocretError:
            self._ended = True
            raise
        except Exception as error:
            self._ended = True
            raise SourceError(f"the source raised {type(error).__name__} after {self.pulled} pieces: {error}. What it "
                              "gave before is accepted or buffered; feed a new source to go on") from error
        self.pulled += 1
        return as_piece(value)
