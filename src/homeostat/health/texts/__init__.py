"""Error texts, their context, and what they mean. Tables of `Trouble`, one file per family."""
