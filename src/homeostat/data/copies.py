"""Find rows that occur more than once, and held-out rows that are trained on, too."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from homeostat.data.prompts import PromptSet
from homeostat.data.store import RowStore

# Rows that are compared to find duplicates: enough to estimate a share, and quickly done.
MAX_COMPARED = 50_000


def copies(rows: Iterable[bytes]) -> tuple[float, set[bytes]]:
    """Return the share of rows that are copies of an earlier one, and the digests of all rows."""
    seen: set[bytes] = set()
    count = again = 0
    for content in rows:
        if count == MAX_COMPARED:
            break
        digest = hashlib.blake2b(content, digest_size=12).digest()
        again += digest in seen
        count += 1
        seen.add(digest)
    return again / max(1, count), seen


def row_facts(
    train: RowStore | PromptSet, held_out: RowStore | PromptSet | None
) -> dict[str, float]:
    """Measure duplicates among the rows, and the share of held-out rows that are trained on."""
    share, seen = copies(_contents(train))
    facts = {"duplicate_rows": share}
    if held_out is not None and len(held_out):
        found = [
            hashlib.blake2b(content, digest_size=12).digest() in seen
            for _, content in zip(range(MAX_COMPARED), _contents(held_out), strict=False)
        ]
        facts["validation_overlap"] = sum(found) / len(found)
    return facts


def _contents(rows: RowStore | PromptSet) -> Iterator[bytes]:
    for index in range(len(rows)):
        yield rows[index].tokens_T.tobytes()
