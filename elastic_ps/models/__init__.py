"""Networks, as plain torch modules. `elastic_ps.zoo.catalog` knows them by name."""

from elastic_ps.models.gpt import GPT
from elastic_ps.models.lenet import LeNet, accuracy
from elastic_ps.models.resnet import ResNet
from elastic_ps.models.tables import DeepFM, WideDeep
from elastic_ps.models.vgg import VGG

__all__ = ["GPT", "VGG", "DeepFM", "LeNet", "ResNet", "WideDeep", "accuracy"]
