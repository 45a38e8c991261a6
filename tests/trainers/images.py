"""Generated images for the scripts that train on images."""

import torch
from torchvision.transforms.functional import to_pil_image


class Squares(torch.utils.data.Dataset):
    """Noise with a bright square at one of four places, which is the label."""

    def __init__(self, count, seed, transform=None):
        numbers = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(4, (count,), generator=numbers).tolist()
        self.images = torch.randn(count, 3, 32, 32, generator=numbers)
        for image, label in zip(self.images, self.labels, strict=True):
            row, column = label // 2 * 16, label % 2 * 16
            image[:, row + 4 : row + 12, column + 4 : column + 12] += 2
        self.transform = transform  # timm's create_loader() sets one

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        return self.transform(image) if self.transform else image, self.labels[index]


class Pictures(Squares):
    """The same as PIL's images, as timm's transforms expect them."""

    def __getitem__(self, index):
        image = to_pil_image(((self.images[index] + 4) / 10).clamp(0, 1))
        return self.transform(image), self.labels[index]
