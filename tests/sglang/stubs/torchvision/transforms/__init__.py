"""Names that change pictures: modes by value, transforms by whatever name is asked for."""

import enum

from torchvision.absent import absent


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return absent(f"torchvision.transforms.{name}")


from torchvision.transforms import functional, v2  # noqa: E402  they read the modes above

__all__ = ["InterpolationMode", "functional", "v2"]
