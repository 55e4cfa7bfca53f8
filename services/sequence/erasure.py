"""Removes what the online store holds of one user.

Knows names of rows. Does not know the log: its rows are tombstoned where they lie.

What the foundation model learned stays learned until it is trained anew; counters that users share keep their sums.
"""

from __future__ import annotations

from feature_store.online import OnlineStore


def erase(store: OnlineStore, user_key: int) -> int:
    """Removes a user's profile, past, ledger, LoopFM memories and pair embeddings of every space; how many rows there were.

    Looks at every row's name, so that no space is forgotten: upkeep, not a request.

    Raises:
        NotReady: the store does not answer; erase again.
    """
    patterns = (f"u/{user_key}/*", f"lf/*/{user_key}", f"sol/*/{user_key}")
    names = [name for pattern in patterns for name in store.find(pattern)]
    return store.delete(names)
