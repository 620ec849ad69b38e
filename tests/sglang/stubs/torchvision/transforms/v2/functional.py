from torchvision.absent import absent
from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode", "pil_to_tensor"]
pil_to_tensor = absent("torchvision.transforms.v2.functional.pil_to_tensor")
