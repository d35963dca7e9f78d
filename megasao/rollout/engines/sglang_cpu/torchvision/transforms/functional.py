"""Part of the stand-in for torchvision."""

from torchvision import stub
from torchvision.transforms import InterpolationMode as InterpolationMode

__getattr__ = stub(__name__)
