"""Part of the stand-in for torchvision: the one enum that is read at import."""

from enum import Enum

from torchvision import stub


class InterpolationMode(Enum):
    """Names as in torchvision, whose values configurations may hold."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


__getattr__ = stub(__name__)
