"""Part of the stand-in for torchvision."""

from torchvision import stub

__getattr__ = stub(__name__)
