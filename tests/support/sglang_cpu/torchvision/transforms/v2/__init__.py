"""See torchvision's stand-in."""

from torchvision import Absent


def __getattr__(name: str) -> Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(f"torchvision.transforms.v2.{name}")
