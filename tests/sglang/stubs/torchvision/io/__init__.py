"""Names that read pictures."""

from torchvision.absent import absent


class ImageReadMode:
    RGB = "RGB"


decode_image = absent("torchvision.io.decode_image")
decode_jpeg = absent("torchvision.io.decode_jpeg")
