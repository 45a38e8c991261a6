"""Generated images for the scripts that train on images."""

import torch


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
