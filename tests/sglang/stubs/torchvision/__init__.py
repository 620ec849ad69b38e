"""Stands in for torchvision, so that SGLang and transformers import on a machine without it.

They ask for names when they are imported and for work only when a picture comes. The names are
here; whatever is called raises.
"""

from torchvision import io, transforms

__version__ = "0.0"
__all__ = ["io", "transforms"]
