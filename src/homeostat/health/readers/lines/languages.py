"""Words for metrics and counters in other languages than English, for lines that scripts print."""

from __future__ import annotations

# A word that says that a line may be a row, in lower case. Others are translated beside it.
_SPEAKS = (
    "\u635f\u5931", "\u640d\u5931", "\u5956\u52b1",  # Chinese, Japanese: loss; Chinese: reward
    "\uc190\uc2e4", "\u5831\u916c",  # Korean: loss; Japanese: reward
    "\u043f\u043e\u0442\u0435\u0440", "\u043e\u0448\u0438\u0431\u043a\u0430",  # Russian
    "perte", "verlust", "p\u00e9rdida", "perdida", "perdita", "perda",
)  # fmt: skip
# The longest first, because one is part of another.
_WORDS = {
    "\u8bad\u7ec3\u635f\u5931": "train loss",
    "\u8a13\u7df4\u640d\u5931": "train loss",
    "\u5b66\u7fd2\u640d\u5931": "train loss",
    "\u9a8c\u8bc1\u635f\u5931": "val loss",
    "\u691c\u8a3c\u640d\u5931": "val loss",
    "\u5e73\u5747\u635f\u5931": "average loss",
    "\u603b\u635f\u5931": "total loss",
    "\u635f\u5931\u503c": "loss",
    "\u635f\u5931": "loss",
    "\u640d\u5931": "loss",
    "\u5e73\u5747\u5956\u52b1": "mean reward",
    "\u5956\u52b1": "reward",
    "\u5831\u916c": "reward",
    "\u5b66\u4e60\u7387": "learning rate",
    "\u5b66\u7fd2\u7387": "learning rate",
    "\u30a8\u30dd\u30c3\u30af": "epoch",
    "\u30b9\u30c6\u30c3\u30d7": "step",
    "\u8f6e\u6b21": "epoch",
    "\u8f6e": "epoch",
    "\u6b65\u6570": "step",
    "\u6b65": "step",
    "\uff1a": ":",
    "\uff0c": ",",
    "\uac80\uc99d \uc190\uc2e4": "val loss",
    "\ud559\uc2b5 \uc190\uc2e4": "train loss",
    "\ud6c8\ub828 \uc190\uc2e4": "train loss",
    "\uc190\uc2e4": "loss",
    "\uc5d0\ud3ed": "epoch",
    "\uc5d0\ud3ec\ud06c": "epoch",
    "\u0444\u0443\u043d\u043a\u0446\u0438\u044f \u043f\u043e\u0442\u0435\u0440\u044c": "loss",
    "\u043f\u043e\u0442\u0435\u0440\u0438": "loss",
    "\u043f\u043e\u0442\u0435\u0440\u044f": "loss",
    "\u043e\u0448\u0438\u0431\u043a\u0430": "loss",
    "\u044d\u043f\u043e\u0445\u0430": "epoch",
    "\u0448\u0430\u0433": "step",
    "perte": "loss",
    "\u00e9poque": "epoch",
    "verlust": "loss",
    "epoche": "epoch",
    "schritt": "step",
    "p\u00e9rdida": "loss",
    "perdida": "loss",
    "\u00e9poca": "epoch",
    "perdita": "loss",
    "epoca": "epoch",
    "perda": "loss",
}


def in_english(body: str) -> str:
    """Return a line with the words for metrics and counters in English, if it has such a metric."""
    low = body.lower()
    for word in _SPEAKS:
        if word in low:
            break
    else:
        return body
    for word, english in _WORDS.items():
        if word in low:
            # Chinese and Japanese write no spaces; parts of a name stay together: perte_val.
            apart = "" if word.isascii() or (word[0].isalpha() and ord(word[0]) < 0x600) else " "
            low = low.replace(word, f"{apart}{english}{apart}")
    return low
